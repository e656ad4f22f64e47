"""What follows the solve of kernels/common/cayley_solve_tilelang.py, and its backward, as TileLang macros and kernels.

Macros take the Dsl of `kernels.common.tilelang_target`. A tile holds N blocks one below another, each padded from S to P
rows and columns: [N * P, P].
"""

from typing import Any

from torch import Tensor

from kernels.common.cayley import pad
from kernels.common.tilelang_target import Dsl, build, dtype_name, target_of


def finish_scalars(dsl: Dsl, product: Any, delta: Any, grad: Any, size: int) -> Any:
    """grad[S * S] = ∂L/∂Q - ∂L/∂Qᵀ of one block from P and D, all in every thread's own registers."""
    T = dsl.T
    each = tuple(range(size))

    @T.macro
    def finished(product, delta, grad):  # type: ignore[no-untyped-def]
        half = T.alloc_local((size * size,), "float32")
        both = T.alloc_local((size * size,), "float32")
        for i in each:
            for j in each:
                half[i * size + j] = product[i * size + j]
                for n in each:
                    half[i * size + j] += 0.5 * delta[n * size + i] * product[n * size + j]
        for i in each:
            for j in each:
                both[i * size + j] = half[i * size + j]
                for n in each:
                    both[i * size + j] += 0.5 * delta[j * size + n] * half[i * size + n]
        # Turned in a buffer of its own: the compiler takes an element less itself for 0, which NaN is not.
        for i in each:
            for j in each:
                half[j * size + i] = both[i * size + j]
        for i in each:
            for j in each:
                grad[i * size + j] = 2.0 * (both[i * size + j] - half[i * size + j])

    return finished(product, delta, grad)


def split(dsl: Dsl, value: Any, high: Any, low: Any, factor: Any, bounded: bool) -> Any:
    """Shared tiles with value = (high + low) · factor[0], to twice the precision of their dtype; value is a register tile.

    float16 tiles are scaled by a power of two that keeps both parts clear of its range's ends; `bounded` says that no
    entry passes 2 (as in R - I), which makes that power a constant. A float32 tile is its own high part.
    """
    T = dsl.T
    rows, cols = value.shape

    @T.macro
    def whole(value, high, low, factor):  # type: ignore[no-untyped-def]
        factor[0] = 1.0
        T.copy(value, high)

    @T.macro
    def parts(value, high, low, factor):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(rows, cols):
            high[i, j] = T.cast(value[i, j], high.dtype)
            low[i, j] = T.cast(value[i, j] - T.cast(T.cast(value[i, j], high.dtype), "float32"), high.dtype)

    @T.macro
    def scaled(value, high, low, factor):  # type: ignore[no-untyped-def]
        if bounded:
            factor[0] = 1.0 / 16384.0
            for i, j in dsl.parallel(rows, cols):
                value[i, j] *= 16384.0
        else:
            row_top = dsl.fragment((rows,))
            top = dsl.fragment((1,))
            T.reduce_absmax(value, row_top, dim=1)
            T.reduce_max(row_top, top, dim=0)
            exponent = T.reinterpret(T.min(T.max(top[0], 1e-30), 1e30), "int32") & 0x7F800000
            factor[0] = T.reinterpret(exponent, "float32") * (1.0 / 16384.0)
            inverse = T.reinterpret(0x7F000000 - exponent, "float32") * 16384.0
            for i, j in dsl.parallel(rows, cols):
                value[i, j] *= inverse
        parts(value, high, low, factor)

    @T.macro
    def cast(value, high, low, factor):  # type: ignore[no-untyped-def]
        factor[0] = 1.0
        parts(value, high, low, factor)

    form = {"float32": whole, "float16": scaled}.get(str(high.dtype), cast)
    return form(value, high, low, factor)


def rotation(
    dsl: Dsl,
    delta: Any,
    rescale: Any,
    first: Any,
    tile: Any,
    high: Any,
    low: Any,
    factor: Any,
    size: int,
    width: int,
    transposed: bool,
) -> Any:
    """M = D diag(r) + diag(r - 1) of N blocks (M = D without rescale), or its transpose, through `split`.

    delta: D as [k, S, S], or None where `tile`, shared [N * P, P] in float32, holds it.
    """
    T = dsl.T
    rows = tile.shape[0]

    def entry(i: Any, n: Any, m: Any) -> Any:
        if size == width:
            k = T.min(first + i // width, delta.shape[0] - 1)
            return delta[k, n, m]
        exists = (first + i // width < delta.shape[0]) & (n < size) & (m < size)
        k = T.min(first + i // width, delta.shape[0] - 1)
        return T.if_then_else(exists, delta[k, T.min(n, size - 1), T.min(m, size - 1)], 0.0)

    @T.macro
    def filled(tile, high, low, factor):  # type: ignore[no-untyped-def]
        value = dsl.fragment((rows, width))
        for i, j in dsl.parallel(rows, width):
            n, m = (j, i % width) if transposed else (i % width, j)
            d = tile[i - i % width + n, m] if delta is None else entry(i, n, m)
            if rescale is None:
                value[i, j] = d
            else:
                index = T.min((first + i // width) * size + T.min(m, size - 1), rescale.shape[0] - 1)
                r = T.cast(rescale[index], "float32")
                value[i, j] = d * r + T.if_then_else(n == m, r - 1.0, 0.0)
        split(dsl, value, high, low, factor, rescale is None)

    return filled(tile, high, low, factor)


def load_blocks(dsl: Dsl, delta: Any, first: Any, tile: Any, size: int, width: int) -> Any:
    """tile[N * P, P] = delta[k, S, S] of N blocks from `first` on, zero where there is nothing."""
    T = dsl.T

    @T.macro
    def loaded(delta, first, tile):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(tile.shape[0], width):
            exists = (first + i // width < delta.shape[0]) & (i % width < size) & (j < size)
            tile[i, j] = T.if_then_else(
                exists,
                delta[T.min(first + i // width, delta.shape[0] - 1), T.min(i % width, size - 1), T.min(j, size - 1)],
                0.0,
            )

    return loaded(delta, first, tile)


def finish_tile(
    dsl: Dsl, product: Any, d: Any, rescale: Any, grad_blocks: Any, grad_rescale: Any, first: Any, size: int, width: int,
    need_blocks: bool, need_rescale: bool,
) -> Any:  # fmt: skip
    """Writes the gradients of N blocks and of their rescale, from the shared tiles P and D, [N * P, P]; overwrites P."""
    T = dsl.T
    rows = product.shape[0]

    @T.macro
    def finished(product, d, grad_blocks, grad_rescale, first):  # type: ignore[no-untyped-def]
        if need_rescale:
            total = dsl.fragment((rows,))
            for i in dsl.parallel(rows):
                total[i] = product[i, i % width]
            for n in T.serial(size):
                for i in dsl.parallel(rows):
                    total[i] += d[i - i % width + n, i % width] * product[i - i % width + n, i % width]
            for i in dsl.parallel(rows):
                if i % width < size and (first + i // width) * size + i % width < grad_rescale.shape[0]:
                    grad_rescale[(first + i // width) * size + i % width] = total[i]
        if need_blocks:
            acc = dsl.fragment((rows, width))
            half = dsl.shared((rows, width), "float32")
            if rescale is not None:
                for i, j in dsl.parallel(rows, width):
                    index = T.min((first + i // width) * size + T.min(j, size - 1), rescale.shape[0] - 1)
                    product[i, j] *= T.cast(rescale[index], "float32")
            for i, j in dsl.parallel(rows, width):
                acc[i, j] = product[i, j]
            for n in T.serial(size):
                for i, j in dsl.parallel(rows, width):
                    acc[i, j] += 0.5 * d[i - i % width + n, i % width] * product[i - i % width + n, j]
            for i, j in dsl.parallel(rows, width):
                half[i, j] = acc[i, j]
            for n in T.serial(size):
                for i, j in dsl.parallel(rows, width):
                    acc[i, j] += 0.5 * half[i, n] * d[i - i % width + j, n]
            for i, j in dsl.parallel(rows, width):
                product[i, j] = acc[i, j]
            for i, j in dsl.parallel(rows, width):
                if i % width < size and j < size and first + i // width < grad_blocks.shape[0]:
                    grad_blocks[first + i // width, i % width, j] = 2.0 * (
                        product[i, j] - product[i - i % width + j, i % width]
                    )

    return finished(product, d, grad_blocks, grad_rescale, first)


def _finish(
    dsl: Dsl,
    *,
    S: int,
    P: int,
    dtype: str,
    rescale_dtype: str,
    has_rescale: bool,
    need_blocks: bool,
    need_rescale: bool,
) -> Any:
    """The gradients of one block a program from P = Σ_s parts[s], in the order of s."""
    T = dsl.T
    splits, n_k, n_o = T.dynamic("splits"), T.dynamic("n_k"), T.dynamic("n_o")
    # Sums of every eighth partial of a small block, so that many loads are in flight at once.
    GROUPS = 8 if P <= 16 else 1
    groups = tuple(range(GROUPS))
    threads = 64 if P <= 16 and GROUPS == 1 else 256

    @T.prim_func
    def kernel(
        parts: T.Tensor((splits, n_k, S, S), "float32"),
        delta: T.Tensor((n_k, S, S), "float32"),
        rescale: T.Tensor((n_o,), rescale_dtype),
        grad_blocks: T.Tensor((n_k, S, S), dtype),
        grad_rescale: T.Tensor((n_o,), rescale_dtype),
    ):
        with T.Kernel(n_k, threads=threads) as pid_k:
            product = dsl.shared((P, P), "float32")
            d = dsl.shared((P, P), "float32")
            total = dsl.fragment((P, P))
            load_blocks(dsl, delta, pid_k, d, S, P)
            if GROUPS > 1:
                sums = dsl.fragment((GROUPS * P, P))
                gathered = dsl.shared((GROUPS * P, P), "float32")
                T.clear(sums)
                for step in T.serial(T.ceildiv(splits, GROUPS)):
                    for i, j in dsl.parallel(GROUPS * P, P):
                        s = step * GROUPS + i // P
                        if s < splits and i % P < S and j < S:
                            sums[i, j] += parts[s, pid_k, i % P, j]
                T.copy(sums, gathered)
                for i, j in dsl.parallel(P, P):
                    total[i, j] = gathered[i, j]
                    for group in groups[1:]:
                        total[i, j] += gathered[group * P + i, j]
            else:
                T.clear(total)
                for s in T.serial(splits):
                    for i, j in dsl.parallel(P, P):
                        if i < S and j < S:
                            total[i, j] += parts[s, pid_k, i, j]
            T.copy(total, product)
            finish_tile(
                dsl, product, d, rescale if has_rescale else None, grad_blocks, grad_rescale, pid_k, S, P,
                need_blocks, need_rescale,
            )  # fmt: skip

    return kernel


def finish(
    parts: Tensor, blocks_grad: Tensor | None, rescale_grad: Tensor | None, delta: Tensor, rescale: Tensor | None
) -> None:
    """Writes the gradients of blocks and rescale from float32 parts[splits, k, s, s], summed in the order of the splits."""
    run = build(
        _finish,
        target_of(parts),
        S=parts.shape[2],
        P=pad(parts.shape[2]),
        dtype="float32" if blocks_grad is None else dtype_name(blocks_grad.dtype),
        rescale_dtype="float32" if rescale is None else dtype_name(rescale.dtype),
        has_rescale=rescale is not None,
        need_blocks=blocks_grad is not None,
        need_rescale=rescale_grad is not None,
    )
    run(parts, delta, rescale, blocks_grad, rescale_grad)
