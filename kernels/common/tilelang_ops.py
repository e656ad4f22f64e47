"""TileLang pieces that several families share."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kernels.common.tilelang_target import Dsl, build, dtype_name, target_of

# Small blocks, since the sums are few and short: a wide launch is what makes them quick.
_REDUCE_BLOCK = 256
_REDUCE_THREADS = 64


def to_operand(dsl: Dsl, value: Any, operand: Any, factor: Any) -> Any:
    """Writes the float32 tile `value` to the shared tile `operand` of the compute dtype, factor[0] undoing its scaling.

    float16 tiles whose largest value passes 2^14 are scaled by a power of two, so that nothing finite becomes inf (cases
    where x @ downᵀ leaves float16's range but the result does not); others are just cast. `factor` is a shared (1,) tile.
    """
    T = dsl.T
    rows, cols = value.shape

    def exponent(top: Any) -> Any:
        # An expression and no variable of the kernel: in a pipelined loop TileLang loses the scope of one.
        return T.reinterpret(T.max(T.min(top, 1e38), 16384.0), "int32") & 0x7F800000

    @T.macro
    def scaled(value, operand, factor):  # type: ignore[no-untyped-def]
        row_top = dsl.fragment((rows,))
        top = dsl.fragment((1,))
        T.reduce_absmax(value, row_top, dim=1)
        T.reduce_max(row_top, top, dim=0)
        factor[0] = T.reinterpret(exponent(top[0]), "float32") * (1.0 / 16384.0)
        for i, j in dsl.parallel(rows, cols):
            operand[i, j] = value[i, j] * (T.reinterpret(0x7F000000 - exponent(top[0]), "float32") * 16384.0)

    @T.macro
    def cast(value, operand, factor):  # type: ignore[no-untyped-def]
        factor[0] = 1.0
        T.copy(value, operand)

    return (scaled if operand.dtype == "float16" else cast)(value, operand, factor)


def _reduce(dsl: Dsl, *, width: int, jobs: int, dtype: str) -> Any:
    """out[n] = scale · Σ_s parts[s, n] for one or two such pairs, in the order of s; n counts vectors of `width`."""
    T = dsl.T
    block = _REDUCE_BLOCK // width
    splits_a, size_a, splits_b, size_b = (T.dynamic(name) for name in ("splits_a", "size_a", "splits_b", "size_b"))

    @T.macro
    def total(parts, out, first, scale):  # type: ignore[no-untyped-def]
        acc = dsl.fragment((block, width))
        T.clear(acc)
        for s in T.serial(parts.shape[0]):
            for n, lane in dsl.parallel(block, width):
                if first + n < parts.shape[1]:
                    acc[n, lane] += parts[s, first + n, lane]
        for n, lane in dsl.parallel(block, width):
            if first + n < parts.shape[1]:
                out[first + n, lane] = acc[n, lane] * scale

    @T.prim_func
    def kernel(
        parts_a: T.Tensor((splits_a, size_a, width), "float32"),
        out_a: T.Tensor((size_a, width), dtype),
        parts_b: T.Tensor((splits_b, size_b, width), "float32"),
        out_b: T.Tensor((size_b, width), dtype),
        scale: T.float32,
    ):
        if jobs == 1:
            with T.Kernel(T.ceildiv(size_a, block), threads=_REDUCE_THREADS) as pid:
                total(parts_a, out_a, pid * block, scale)
        else:
            with T.Kernel(T.ceildiv(size_a, block) + T.ceildiv(size_b, block), threads=_REDUCE_THREADS) as pid:
                if pid < T.ceildiv(size_a, block):
                    total(parts_a, out_a, pid * block, scale)
                else:
                    total(parts_b, out_b, (pid - T.ceildiv(size_a, block)) * block, scale)

    return kernel


def reduce_partials(parts: Sequence[Tensor | None], outs: Sequence[Tensor | None], scale: float) -> None:
    """outs[k] = scale · Σ_s parts[k][s] for the one or two k that are not None, in one launch and in a fixed order.

    parts[k]: float32, contiguous, [S, ...]; outs[k]: contiguous, one of parts[k]'s slices in shape.
    """
    pairs = [(p, o) for p, o in zip(parts, outs, strict=True) if p is not None and o is not None]
    if not pairs:
        return
    width = 1 if any(out.numel() % 4 for _, out in pairs) else 4
    first = pairs[0][1]
    views = [(p.view(p.shape[0], -1, width), o.view(-1, width)) for p, o in pairs]
    (a, out_a), (b, out_b) = views if len(views) == 2 else (views[0], (None, None))
    run = build(_reduce, target_of(first), width=width, jobs=len(views), dtype=dtype_name(first.dtype))
    run(a, out_a, b, out_b, scale)
