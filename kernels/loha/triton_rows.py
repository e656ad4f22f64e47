"""LoHa's merge backward in Triton without large partials: ΔW's gradient read once for up and once for down.

    G1 = G ∘ (up2 @ down2):  grad_up1 = scale · G1 @ down1ᵀ by programs that walk rows of G, and
                             grad_down1ᵀ = scale · G1ᵀ @ up1 by programs that walk its columns; 2 likewise

A program keeps its sums in registers to the end. One pass over G (triton_strips.py) has to write half of them tile by
tile, which from rank 64 on moves more bytes than G has. Programs that read the same rows of G come one after the other,
so that its second reading finds them in L2; a tile's rows are its product's, so that each is scaled by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import precision, to_operand_by_row
from kernels.common.views import cdiv
from kernels.loha.grads import Grads, new_grads
from kernels.loha.triton_loads import load_down, load_up, rank_block
from kernels.loha.triton_reduce import reduce_grads


@dataclass(frozen=True)
class Rows:
    """Launch: a program sums over `span` columns of G, or of its transpose, `block_n` at a time, for `block_m` rows."""

    block_m: int
    block_n: int
    span: int
    num_warps: int
    num_stages: int


@triton.jit
def _row_sums(
    block, part, g, l1, r1, l2, r2, out1, out2, n_m, n_n, n_r, span, scale,
    stride_gm, stride_gn, stride_om, stride_or, stride_part,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out1[part, m] = scale · Σ_n (g ∘ (l2 @ r2))[m, n] · r1[:, n] over the part-th span; out2 with 1 and 2 swapped.

    Each factor comes as (pointer, stride, stride), those of its rows first.
    """
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, BLOCK_R)
    mask_m = offs_m < n_m
    rows_m = offs_m.to(tl.int64)
    dtype = g.dtype.element_ty
    u1 = load_up(l1[0], rows_m, mask_m, offs_r, n_r, l1[1], l1[2])
    u2 = load_up(l2[0], rows_m, mask_m, offs_r, n_r, l2[1], l2[2])
    acc1 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    acc2 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    start = part * span
    stop = tl.minimum(start + span, n_n)
    for n in range(start, stop, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < stop
        rows_n = offs_n.to(tl.int64)
        at = g + rows_m[:, None] * stride_gm + rows_n[None, :] * stride_gn
        tile = tl.load(at, mask=mask_m[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        d1 = load_down(r1[0], rows_n, mask_n, offs_r, n_r, r1[1], r1[2])
        d2 = load_down(r2[0], rows_n, mask_n, offs_r, n_r, r2[1], r2[2])
        if out1 is not None:
            operand, factor = to_operand_by_row(tile * tl.dot(u2, d2, input_precision=PRECISION), dtype)
            acc1 += tl.dot(operand, tl.trans(d1), input_precision=PRECISION) * factor
        if out2 is not None:
            operand, factor = to_operand_by_row(tile * tl.dot(u1, d1, input_precision=PRECISION), dtype)
            acc2 += tl.dot(operand, tl.trans(d2), input_precision=PRECISION) * factor
    at = part.to(tl.int64) * stride_part + rows_m[:, None] * stride_om + offs_r[None, :] * stride_or
    mask = mask_m[:, None] & (offs_r < n_r)[None, :]
    if out1 is not None:
        tl.store(out1 + at, (acc1 * scale).to(out1.dtype.element_ty), mask=mask)
    if out2 is not None:
        tl.store(out2 + at, (acc2 * scale).to(out2.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _rows_kernel(
    g, up1, down1, up2, down2, out_up1, out_down1, out_up2, out_down2, n_o, n_i, n_r, span, up_group, down_group,
    up_scale, down_scale, up_part, down_part, stride_go,
    stride_u1o, stride_u1r, stride_d1r, stride_d1i, stride_u2o, stride_u2r, stride_d2r, stride_d2i,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    group = pid // (up_group + down_group)
    pid = pid % (up_group + down_group)
    if pid < up_group:
        pid += group * up_group
        spans = tl.cdiv(n_i, span)
        _row_sums(
            pid // spans, pid % spans, g, (up1, stride_u1o, stride_u1r), (down1, stride_d1r, stride_d1i),
            (up2, stride_u2o, stride_u2r), (down2, stride_d2r, stride_d2i), out_up1, out_up2, n_o, n_i, n_r, span, up_scale,
            stride_go, 1, n_r, 1, up_part, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION,
        )  # fmt: skip
    else:
        _row_sums(
            pid - up_group, group, g, (down1, stride_d1i, stride_d1r), (up1, stride_u1r, stride_u1o),
            (down2, stride_d2i, stride_d2r), (up2, stride_u2r, stride_u2o), out_down1, out_down2, n_i, n_o, n_r, span, down_scale,
            1, stride_go, 1, n_i, down_part, BLOCK_M, BLOCK_N, BLOCK_R, PRECISION,
        )  # fmt: skip


def _outs(parts: Tensor | None, grads: Grads, scale: float) -> tuple[Grads, float, Tensor | None]:
    """Where the sums go and with what scale: to the gradients, or to float32 partials that are reduced afterwards."""
    if parts is None or parts.shape[0] == 1:
        return grads, scale, None
    slots = iter(parts.unbind(1))
    first, second = (next(slots) if grad is not None else None for grad in grads)
    return (first, second), 1.0, parts


def row_backward(
    op: str,
    g: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    needs: tuple[bool, ...],
    config: Rows,
) -> tuple[Tensor | None, ...]:
    """The factors' gradients from ΔW's gradient g[O, I]; partials, and a reduction, only of what is split into spans."""
    up1, down1, up2, down2 = factors
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    up_splits, down_splits = cdiv(n_i, config.span), cdiv(n_o, config.span)
    up_parts, ups = new_grads(up1, up2, (needs[0], needs[2]), up_splits)
    down_parts, downs = new_grads(down1, down2, (needs[1], needs[3]), down_splits)
    up_outs, up_scale, up_parts = _outs(up_parts, ups, scale)
    down_outs, down_scale, down_parts = _outs(down_parts, downs, scale)
    # A group of programs: a span's rows of G for down, and about the same rows for up.
    groups = down_splits if downs != (None, None) else 1
    up_group = cdiv(cdiv(n_o, config.block_m) * up_splits, groups) if ups != (None, None) else 0
    down_group = cdiv(n_i, config.block_m) if downs != (None, None) else 0
    _rows_kernel[(groups * (up_group + down_group),)](
        g, up1, down1, up2, down2, up_outs[0], down_outs[0], up_outs[1], down_outs[1], n_o, n_i, n_r, config.span,
        up_group, down_group, up_scale, down_scale, 0 if up_parts is None else up_parts.stride(0),
        0 if down_parts is None else down_parts.stride(0), g.stride(0),
        *up1.stride(), *down1.stride(), *up2.stride(), *down2.stride(),
        config.block_m, config.block_n, rank_block(op, n_r), precision(g.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    reduce_grads((up_parts, down_parts), (ups, downs), scale)
    return ups[0], downs[0], ups[1], downs[1]
