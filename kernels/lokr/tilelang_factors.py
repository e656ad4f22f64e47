"""A factor as LoKr's TileLang kernels take it: full, or made from its pair inside the kernel."""

from typing import Any, NamedTuple

from torch import Tensor

from kernels.common import tilelang_ops
from kernels.common.errors import UnsupportedCase
from kernels.common.tilelang_target import Dsl, Size, Target, ready, sizes

MAX_RANK = 256
# Float32 products of a pair are chains of this many multiply-adds, added up: one of 128 is off by twice PyTorch's error.
CHAIN = 32


class Side(NamedTuple):
    """A factor [rows, cols]: wa itself (rank 0, no wb), or wa[rows, rank] @ wb[rank, cols]."""

    wa: Tensor
    wb: Tensor | None
    rows: int
    cols: int
    rank: int

    def block_r(self, target: Target) -> int:
        """The rank as tiles hold it, 0 where there is none; on the CPU one of few sizes, so that few builds serve all ranks."""
        if not self.rank:
            return 0
        return next(size for size in (16, 64, MAX_RANK) if self.rank <= size) if target.cpu else padded(self.rank)


def side(op: str, name: str, wa: Tensor, wb: Tensor | None) -> Side:
    """The side of a full factor (wb None) or of a pair; raises UnsupportedCase for a rank past MAX_RANK."""
    if wb is None:
        return Side(ready(wa), None, wa.shape[0], wa.shape[1], 0)
    rank = wa.shape[1]
    if rank > MAX_RANK:
        raise UnsupportedCase(
            f"{op}: {name}: TileLang kernels hold a pair's rank in a tile: got {rank}, at most {MAX_RANK}"
        )
    return Side(ready(wa), ready(wb), wa.shape[0], wb.shape[1], rank)


def side_sizes(target: Target, side1: Side, side2: Side) -> dict[str, Size]:
    """The constants that say what both sides are."""
    axes = sizes(target, A=side1.rows, B=side1.cols, C=side2.rows, D=side2.cols, R1=side1.rank, R2=side2.rank)
    return {**axes, "BLOCK_R1": side1.block_r(target), "BLOCK_R2": side2.block_r(target)}


def side_shapes(rows: Any, cols: Any, rank: Any, block_r: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shapes of wa and wb."""
    return ((rows, rank), (rank, cols)) if block_r else ((rows, cols), (1, 1))


def padded(n: int, multiple: int = 16) -> int:
    """n up to the next multiple of 16, the least that a tensor-core product takes, or of another number."""
    return max(1, (n + multiple - 1) // multiple) * multiple


def to_operand(dsl: Dsl, value: Any, operand: Any, factor: Any) -> Any:
    """As kernels.common's, whose rows are spread where a tile has more than a warpgroup's product holds at a time."""
    return tilelang_ops.to_operand(dsl, value, operand, factor, spread=value.shape[0] > 64)


def load_factor(
    dsl: Dsl, wa: Any, wb: Any, block_r: int, out: Any, threads: int, row_of: Any, col_of: Any, repeated: bool = False
) -> Any:
    """The shared float32 tile out[i, j] = factor[row_of(i), col_of(j)], zero where that is past the factor's end.

    `repeated`: neighbouring columns may be the same.
    """
    T = dsl.T
    rows, cols = out.shape
    n_rows, n_cols = wa.shape[0], (wb if block_r else wa).shape[1]
    dtype = wa.dtype
    zero = T.cast(0, dtype)

    @T.macro
    def load(wa, out):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(rows, cols):
            inside = T.And(row_of(i) < n_rows, col_of(j) < n_cols)
            out[i, j] = T.cast(T.if_then_else(inside, wa[row_of(i), col_of(j)], zero), "float32")

    def columns(*extents: Any) -> Any:
        # Vectors of equal addresses are written as a gather, which for bfloat16 is code that no compiler takes.
        alone = repeated and dtype == "bfloat16" and not dsl.cpu
        return T.Parallel(*extents, coalesced_width=T.int32(1)) if alone else dsl.parallel(*extents)

    # A product gives every warp at least 16 rows or 8 columns of its own.
    tall, wide, deep = padded(rows), padded(cols, max(16, threads // 4)), block_r

    chained = dtype == "float32" and deep > CHAIN and not dsl.cpu

    @T.macro
    def multiply(wa, wb, out):  # type: ignore[no-untyped-def]
        left = dsl.shared((deep, tall) if chained else (tall, deep), dtype)
        right = dsl.shared((deep, wide), dtype)
        product = dsl.fragment((tall, wide))
        if chained:
            part = dsl.fragment((tall, wide))
            for r, i in dsl.parallel(deep, tall):
                inside = T.And(row_of(i) < n_rows, r < wb.shape[0])
                left[r, i] = T.if_then_else(inside, wa[row_of(i), r], zero)
        else:
            for i, r in dsl.parallel(tall, deep):
                inside = T.And(row_of(i) < n_rows, r < wb.shape[0])
                left[i, r] = T.if_then_else(inside, wa[row_of(i), r], zero)
        for r, j in columns(deep, wide):
            inside = T.And(r < wb.shape[0], col_of(j) < n_cols)
            right[r, j] = T.if_then_else(inside, wb[r, col_of(j)], zero)
        T.clear(product)
        if chained:
            for start in tuple(range(0, deep, CHAIN)):
                stop = min(start + CHAIN, deep)
                T.clear(part)
                dsl.gemm(left[start:stop, 0:tall], right[start:stop, 0:wide], part, transpose_a=True)
                for i, j in dsl.parallel(tall, wide):
                    product[i, j] += part[i, j]
        else:
            dsl.gemm(left, right, product)
        for i, j in dsl.parallel(tall, wide):
            if i < rows and j < cols:
                out[i, j] = product[i, j]

    return multiply(wa, wb, out) if block_r else load(wa, out)


def factor_operand(
    dsl: Dsl, wa: Any, wb: Any, block_r: int, tile: Any, factors: Any, index: int, row: Any = 0, col: Any = 0,
    transposed: bool = False,
) -> Any:  # fmt: skip
    """Fills the shared operand `tile` from [row, col] of the factor (or its transpose) on, zero past its end.

    A pair's product may be scaled, which factors[index] undoes.
    """
    T = dsl.T
    rows, cols = tile.shape
    dtype = tile.dtype
    zero = T.cast(0, dtype)

    @T.macro
    def load(wa, tile, row, col):  # type: ignore[no-untyped-def]
        if transposed:
            for i, j in dsl.parallel(rows, cols):
                inside = T.And(row + i < wa.shape[1], col + j < wa.shape[0])
                tile[i, j] = T.if_then_else(inside, wa[col + j, row + i], zero)
        else:
            T.copy(wa[row, col], tile)

    @T.macro
    def multiply(wa, wb, tile, factors, row, col):  # type: ignore[no-untyped-def]
        left = dsl.shared((block_r, rows) if transposed else (rows, block_r), dtype)
        right = dsl.shared((cols, block_r) if transposed else (block_r, cols), dtype)
        product = dsl.fragment((rows, cols))
        factor = dsl.shared((1,), "float32")
        if transposed:
            T.copy(wb[0, row], left)
            T.copy(wa[col, 0], right)
        else:
            T.copy(wa[row, 0], left)
            T.copy(wb[0, col], right)
        T.clear(product)
        dsl.gemm(left, right, product, transpose_a=transposed, transpose_b=transposed)
        to_operand(dsl, product, tile, factor)
        factors[index] = factor[0]

    return multiply(wa, wb, tile, factors, row, col) if block_r else load(wa, tile, row, col)


def unscaled(factors: Any, block_r1: int, block_r2: int, value: Any) -> Any:
    """value times the factors that undo the scaling of the sides that are pairs."""
    for index, block_r in enumerate((block_r1, block_r2)):
        value = value * factors[index] if block_r else value
    return value
