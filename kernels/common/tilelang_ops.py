"""TileLang pieces that several families share."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.common.tilelang_target import Dsl, Size, build, dtype_name, target_of

# Small blocks, since the sums are few and short: a wide launch is what makes them quick.
_REDUCE_BLOCK = 256
_REDUCE_THREADS = 64


def to_operand(dsl: Dsl, value: Any, operand: Any, factor: Any, spread: bool = False) -> Any:
    """Writes the float32 tile `value` to the shared tile `operand` in the compute dtype; factor[0] undoes its scaling.

    float16 tiles whose largest value passes 2^14 are scaled by a power of two, so that nothing finite becomes inf
    (cases where x @ downᵀ leaves float16's range but the result does not); others are just cast. `factor` is a shared
    (1,) tile. `spread` is for products of a warpgroup with more than 64 rows, which lie 64 at a time: TileLang doesn't see
    that their largest value can be found across threads ("a source index depends on a thread-owned reduce segment"), so
    shared memory puts the rows' one to a thread.
    """
    T = dsl.T
    rows, cols = value.shape

    @T.macro
    def scaled(value, operand, factor):  # type: ignore[no-untyped-def]
        row_top = dsl.fragment((rows,))
        top = dsl.fragment((1,))
        inverse = dsl.fragment((1,))
        T.reduce_absmax(value, row_top, dim=1)
        if spread:
            shared_top = dsl.shared((rows,), "float32")
            spread_top = dsl.fragment((rows,))
            T.copy(row_top, shared_top)
            T.copy(shared_top, spread_top)
            T.reduce_max(spread_top, top, dim=0)
        else:
            T.reduce_max(row_top, top, dim=0)
        # Registers for the powers of two: TileLang loses plain variables that are bound inside a pipelined loop.
        top[0] = T.reinterpret(T.reinterpret(T.max(T.min(top[0], 1e38), 16384.0), "int32") & 0x7F800000, "float32")
        factor[0] = top[0] * (1.0 / 16384.0)
        inverse[0] = T.reinterpret(0x7F000000 - T.reinterpret(top[0], "int32"), "float32") * 16384.0
        for i, j in dsl.parallel(rows, cols):
            operand[i, j] = value[i, j] * inverse[0]

    @T.macro
    def cast(value, operand, factor):  # type: ignore[no-untyped-def]
        factor[0] = 1.0
        T.copy(value, operand)

    return (scaled if operand.dtype == "float16" else cast)(value, operand, factor)


def to_operand_by_row(dsl: Dsl, value: Any, operand: Any, top: Any, factor: Any, inverse: Any) -> Any:
    """As `to_operand`, with a factor[i] for each row: for a left operand, whose rows are the product's.

    `operand` may be a register tile; `top`, `factor` and `inverse` are register tiles of a number a row. A row lies in
    one warp, so that no barrier is needed to find its largest value.
    """
    T = dsl.T
    rows, cols = value.shape

    @T.macro
    def scaled(value, operand, top, factor, inverse):  # type: ignore[no-untyped-def]
        T.reduce_absmax(value, top, dim=1)
        for i in dsl.parallel(rows):
            top[i] = T.reinterpret(T.reinterpret(T.max(T.min(top[i], 1e38), 16384.0), "int32") & 0x7F800000, "float32")
        for i in dsl.parallel(rows):
            factor[i] = top[i] * (1.0 / 16384.0)
            inverse[i] = T.reinterpret(0x7F000000 - T.reinterpret(top[i], "int32"), "float32") * 16384.0
        for i, j in dsl.parallel(rows, cols):
            operand[i, j] = value[i, j] * inverse[i]

    @T.macro
    def cast(value, operand, factor):  # type: ignore[no-untyped-def]
        for i in dsl.parallel(rows):
            factor[i] = 1.0
        T.copy(value, operand)

    if operand.dtype == "float16":
        return scaled(value, operand, top, factor, inverse)
    return cast(value, operand, factor)


def sum_parts(dsl: Dsl, parts: Any, row: Any, total: Any, part: Any, splits: Size) -> Any:
    """total = Σ_s parts[s, row:, :] in the order of s; `part` is a register tile like `total`.

    A constant number of `splits` is unrolled, so that all loads are in flight at once; None means known at run time.
    """
    T = dsl.T

    @T.macro
    def sum_rows(parts, row, total, part):  # type: ignore[no-untyped-def]
        T.copy(parts[0, row, 0], total)
        for s in T.serial(parts.shape[0] - 1) if splits is None else T.unroll(splits - 1):
            T.copy(parts[s + 1, row, 0], part)
            for i, r in dsl.parallel(total.shape[0], total.shape[1]):
                total[i, r] += part[i, r]

    return sum_rows(parts, row, total, part)


def store_tile(dsl: Dsl, acc: Any, base: Any, out: Any, row: Any, col: Any, staged: bool) -> Any:
    """out[row:, col:] = acc (+ base); `staged` gathers the tile in shared memory, for 16-byte or bulk stores."""
    T = dsl.T
    rows, cols = acc.shape

    @T.macro
    def store(acc, out, row, col):  # type: ignore[no-untyped-def]
        if base is not None:
            for i, j in dsl.parallel(rows, cols):
                if row + i < out.shape[0] and col + j < out.shape[1]:
                    acc[i, j] += T.cast(base[row + i, col + j], "float32")
        if staged:
            tile = dsl.shared((rows, cols), out.dtype)
            T.copy(acc, tile)
            T.copy(tile, out[row, col])
        else:
            T.copy(acc, out[row, col])

    return store(acc, out, row, col)


def _reduce(dsl: Dsl, *, width: int, dtypes: tuple[str, ...]) -> Any:
    """out[n] = scale · Σ_s parts[s, n] for one or two such pairs, in the order of s; n counts vectors of `width`."""
    T = dsl.T
    block = _REDUCE_BLOCK // width
    splits_a, size_a, splits_b, size_b = (T.dynamic(name) for name in ("splits_a", "size_a", "splits_b", "size_b"))

    def total(parts: Any, out: Any, first: Any, scale: Any) -> Any:
        # A macro renames the kernel's scalars that are its arguments, and two of one name don't compile.
        @T.macro
        def sum_block(first):  # type: ignore[no-untyped-def]
            acc = dsl.fragment((block, width))
            T.clear(acc)
            for s in T.serial(parts.shape[0]):
                for n, lane in dsl.parallel(block, width):
                    if first + n < parts.shape[1]:
                        acc[n, lane] += parts[s, first + n, lane]
            for n, lane in dsl.parallel(block, width):
                if first + n < parts.shape[1]:
                    out[first + n, lane] = acc[n, lane] * scale

        return sum_block(first)

    @T.prim_func
    def kernel(
        parts_a: T.Tensor((splits_a, size_a, width), "float32"),
        out_a: T.Tensor((size_a, width), dtypes[0]),
        parts_b: T.Tensor((splits_b, size_b, width), "float32"),
        out_b: T.Tensor((size_b, width), dtypes[-1]),
        scale_a: T.float32,
        scale_b: T.float32,
    ):
        if len(dtypes) == 1:
            with T.Kernel(T.ceildiv(size_a, block), threads=_REDUCE_THREADS) as pid:
                total(parts_a, out_a, pid * block, scale_a)
        else:
            with T.Kernel(T.ceildiv(size_a, block) + T.ceildiv(size_b, block), threads=_REDUCE_THREADS) as pid:
                if pid < T.ceildiv(size_a, block):
                    total(parts_a, out_a, pid * block, scale_a)
                else:
                    total(parts_b, out_b, (pid - T.ceildiv(size_a, block)) * block, scale_b)

    return kernel


def reduce_partials(
    parts: Sequence[Tensor | None], outs: Sequence[Tensor | None], scale: float | Sequence[float]
) -> None:
    """outs[k] = scale[k] · Σ_s parts[k][s] for the one or two k that are not None, in one launch and a fixed order.

    parts[k]: float32, contiguous, [S, ...]; outs[k]: contiguous, one of parts[k]'s slices in shape; one scale for all,
    or one each.
    """
    scales = [scale] * len(outs) if isinstance(scale, float) else scale
    jobs = [(p, o, f) for p, o, f in zip(parts, outs, scales, strict=True) if p is not None and o is not None]
    if not jobs:
        return
    width = 1 if any(out.numel() % 4 for _, out, _ in jobs) else 4
    views = [(p.view(p.shape[0], -1, width), o.view(-1, width)) for p, o, _ in jobs]
    (a, out_a), (b, out_b) = views if len(views) == 2 else (views[0], (None, None))
    dtypes = tuple(dtype_name(out.dtype) for _, out, _ in jobs)
    build(_reduce, target_of(jobs[0][1]), width=width, dtypes=dtypes)(a, out_a, b, out_b, jobs[0][2], jobs[-1][2])
