"""A factor as LoKr's TileLang kernels take it: full, or made from its pair inside the kernel."""

from typing import Any, NamedTuple

from torch import Tensor

from kernels.common.errors import UnsupportedCase
from kernels.common.tilelang_target import Dsl, Size, ready

MAX_RANK = 256


class Side(NamedTuple):
    """A factor [rows, cols]: wa itself (rank 0, no wb), or wa[rows, rank] @ wb[rank, cols]."""

    wa: Tensor
    wb: Tensor | None
    rows: int
    cols: int
    rank: int


def side(op: str, name: str, wa: Tensor, wb: Tensor | None) -> Side:
    """The side of a full factor (wb None) or of a pair; raises UnsupportedCase for a rank past MAX_RANK."""
    if wb is None:
        return Side(ready(wa), None, wa.shape[0], wa.shape[1], 0)
    rank = wa.shape[1]
    if rank > MAX_RANK:
        raise UnsupportedCase(f"{op}: {name}: TileLang kernels hold a pair's rank in a tile: got {rank}, at most {MAX_RANK}")
    return Side(ready(wa), ready(wb), wa.shape[0], wb.shape[1], rank)


def side_shapes(rows: Size, cols: Size, rank: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shapes of wa and wb."""
    return ((rows, rank), (rank, cols)) if rank else ((rows, cols), (1, 1))


def padded(n: int) -> int:
    """n up to the next multiple of 16, the least that a tensor-core product takes."""
    return max(16, (n + 15) // 16 * 16)


def load_factor(dsl: Dsl, wa: Any, wb: Any, rank: int, out: Any, row_of: Any, col_of: Any) -> Any:
    """The shared float32 tile out[i, j] = factor[row_of(i), col_of(j)], zero where that is past the factor's end."""
    T = dsl.T
    rows, cols = out.shape
    n_rows, n_cols = wa.shape[0], (wb if rank else wa).shape[1]
    dtype = wa.dtype
    zero = T.cast(0, dtype)

    @T.macro
    def load(wa, out):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(rows, cols):
            inside = T.And(row_of(i) < n_rows, col_of(j) < n_cols)
            out[i, j] = T.cast(T.if_then_else(inside, wa[row_of(i), col_of(j)], zero), "float32")

    @T.macro
    def multiply(wa, wb, out):  # type: ignore[no-untyped-def]
        left = dsl.shared((padded(rows), padded(rank)), dtype)
        right = dsl.shared((padded(rank), padded(cols)), dtype)
        product = dsl.fragment((padded(rows), padded(cols)))
        for i, r in dsl.parallel(padded(rows), padded(rank)):
            inside = T.And(row_of(i) < n_rows, r < rank)
            left[i, r] = T.if_then_else(inside, wa[row_of(i), r], zero)
        for r, j in dsl.parallel(padded(rank), padded(cols)):
            inside = T.And(r < rank, col_of(j) < n_cols)
            right[r, j] = T.if_then_else(inside, wb[r, col_of(j)], zero)
        T.clear(product)
        dsl.gemm(left, right, product)
        for i, j in dsl.parallel(padded(rows), padded(cols)):
            if i < rows and j < cols:
                out[i, j] = product[i, j]

    return multiply(wa, wb, out) if rank else load(wa, out)
