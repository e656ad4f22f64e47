"""LoHa's merge in Triton, and the factors' gradients for the bypass through tiles of ΔW.

    merge     ΔW[O, I] = scale · P1 ∘ P2,  P1 = up1 @ down1,  P2 = up2 @ down2     both products in registers
      backward  G1 = G ∘ P2, G2 = G ∘ P1:  grad_up1 = scale · G1 @ down1ᵀ, grad_down1 = scale · up1ᵀ @ G1, 2 likewise
                G[O, I] read once and P1, P2 made once a tile, then one reduction

Sums over more than one program go through float32 partials that a reduction adds in a fixed order: results are
deterministic. G1 and G2 feed 16-bit dots; they are scaled by a power of two where they leave float16's range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import precision, to_operand
from kernels.common.views import cdiv, rows, sm_count
from kernels.loha.grads import new_grads
from kernels.loha.triton_loads import load_down, load_up, rank_block
from kernels.loha.triton_reduce import reduce_grads
from kernels.loha.triton_rows import Rows, row_backward


@dataclass(frozen=True)
class Merge:
    """Launch of the merge: a program writes `block_o` rows of ΔW over `span` columns, `block_i` at a time."""

    block_o: int
    block_i: int
    span: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class MergeBackward:
    """Launch of the merge's backward: a program walks `span` rows of G, `block_o` at a time, over `block_i` columns."""

    block_o: int
    block_i: int
    span: int
    num_warps: int
    num_stages: int


@planned
@triton.jit
def _merge_kernel(
    up1, down1, up2, down2, base, out, n_o, n_i, n_r, span, scale,
    stride_u1o, stride_u1r, stride_d1r, stride_d1i, stride_u2o, stride_u2r, stride_d2r, stride_d2i, stride_bo,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    spans = tl.cdiv(n_i, span)
    offs_o = (pid // spans) * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_r = tl.arange(0, BLOCK_R)
    mask_o = offs_o < n_o
    rows_o = offs_o.to(tl.int64)
    u1 = load_up(up1, rows_o, mask_o, offs_r, n_r, stride_u1o, stride_u1r)
    u2 = load_up(up2, rows_o, mask_o, offs_r, n_r, stride_u2o, stride_u2r)
    start = (pid % spans) * span
    stop = tl.minimum(start + span, n_i)
    for i in range(start, stop, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        mask_i = offs_i < stop
        rows_i = offs_i.to(tl.int64)
        d1 = load_down(down1, rows_i, mask_i, offs_r, n_r, stride_d1r, stride_d1i)
        d2 = load_down(down2, rows_i, mask_i, offs_r, n_r, stride_d2r, stride_d2i)
        mask = mask_o[:, None] & mask_i[None, :]
        value = tl.dot(u1, d1, input_precision=PRECISION) * tl.dot(u2, d2, input_precision=PRECISION) * scale
        if HAS_BASE:
            value += tl.load(base + rows_o[:, None] * stride_bo + offs_i[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + rows_o[:, None] * n_i + offs_i[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def factor_grads(
    tile, p, u, d, acc, up_parts, part, rows_o, mask_o, n_o, offs_r, n_r, dtype: tl.constexpr,
    NEED_UP: tl.constexpr, NEED_DOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile of ΔW's gradient: writes up_parts[part] = (tile ∘ p) @ dᵀ and returns acc + (tile ∘ p)ᵀ @ u."""
    operand, factor = to_operand(tile.to(tl.float32) * p, dtype)
    if NEED_UP:
        value = tl.dot(operand, tl.trans(d), input_precision=PRECISION) * factor
        mask = mask_o[:, None] & (offs_r < n_r)[None, :]
        tl.store(up_parts + (part * n_o + rows_o[:, None]) * n_r + offs_r[None, :], value, mask=mask)
    if NEED_DOWN:
        acc += tl.dot(tl.trans(operand), u, input_precision=PRECISION) * factor
    return acc


@triton.jit
def store_down(acc, down_parts, part, offs_r, n_r, rows_i, mask_i, n_i):
    """Writes acc[BLOCK_I, BLOCK_R] as down_parts[part, R, I]."""
    mask = (offs_r < n_r)[None, :] & mask_i[:, None]
    tl.store(down_parts + (part * n_r + offs_r[None, :]) * n_i + rows_i[:, None], acc, mask=mask)


@triton.jit
def _token_tile(
    g, x, rows_o, mask_o, rows_i, mask_i, n_t, stride_gt, stride_xt,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile gᵀ @ x of ΔW's gradient, summed over all tokens."""
    acc = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
    for t in range(0, n_t, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask_t = offs_t < n_t
        rows_t = offs_t.to(tl.int64)
        mask = mask_o[:, None] & mask_t[None, :]
        left = tl.load(g + rows_t[None, :] * stride_gt + rows_o[:, None], mask=mask, other=0.0)
        mask = mask_t[:, None] & mask_i[None, :]
        right = tl.load(x + rows_t[:, None] * stride_xt + rows_i[None, :], mask=mask, other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@planned
@triton.jit
def _factor_backward_kernel(
    g, x, up1, down1, up2, down2, up_parts, down_parts, n_t, n_o, n_i, n_r, span, stride_g, stride_xt,
    stride_u1o, stride_u1r, stride_d1r, stride_d1i, stride_u2o, stride_u2r, stride_d2r, stride_d2i,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, HAS_X: tl.constexpr,
    NEED_UP1: tl.constexpr, NEED_DOWN1: tl.constexpr, NEED_UP2: tl.constexpr, NEED_DOWN2: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """up_parts[strip, 1 and 2, O, R] and down_parts[span, 1 and 2, R, I], those that are needed.

    ΔW's gradient is g[O, I], read once, or, with x, g[T, O]ᵀ @ x[T, I], made tile by tile and not stored.
    """
    pid_i, pid_s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows_i = pid_i * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_r = tl.arange(0, BLOCK_R)
    mask_i = rows_i < n_i
    dtype = g.dtype.element_ty
    d1 = load_down(down1, rows_i, mask_i, offs_r, n_r, stride_d1r, stride_d1i)
    d2 = load_down(down2, rows_i, mask_i, offs_r, n_r, stride_d2r, stride_d2i)
    up_part = pid_i * (NEED_UP1 + NEED_UP2)
    acc1 = tl.zeros((BLOCK_I, BLOCK_R), tl.float32)
    acc2 = tl.zeros((BLOCK_I, BLOCK_R), tl.float32)
    start = tl.program_id(1) * span
    stop = tl.minimum(start + span, n_o)
    for o in range(start, stop, BLOCK_O):
        offs_o = o + tl.arange(0, BLOCK_O)
        mask_o = offs_o < stop
        rows_o = offs_o.to(tl.int64)
        if HAS_X:
            tile = _token_tile(
                g, x, rows_o, mask_o, rows_i, mask_i, n_t, stride_g, stride_xt, BLOCK_O, BLOCK_I, BLOCK_T, PRECISION
            )
        else:
            mask = mask_o[:, None] & mask_i[None, :]
            tile = tl.load(g + rows_o[:, None] * stride_g + rows_i[None, :], mask=mask, other=0.0)
        u1 = load_up(up1, rows_o, mask_o, offs_r, n_r, stride_u1o, stride_u1r)
        u2 = load_up(up2, rows_o, mask_o, offs_r, n_r, stride_u2o, stride_u2r)
        if NEED_UP1 or NEED_DOWN1:
            acc1 = factor_grads(
                tile, tl.dot(u2, d2, input_precision=PRECISION), u1, d1, acc1, up_parts, up_part,
                rows_o, mask_o, n_o, offs_r, n_r, dtype, NEED_UP1, NEED_DOWN1, PRECISION,
            )  # fmt: skip
        if NEED_UP2 or NEED_DOWN2:
            acc2 = factor_grads(
                tile, tl.dot(u1, d1, input_precision=PRECISION), u2, d2, acc2, up_parts, up_part + NEED_UP1,
                rows_o, mask_o, n_o, offs_r, n_r, dtype, NEED_UP2, NEED_DOWN2, PRECISION,
            )  # fmt: skip
    down_part = pid_s * (NEED_DOWN1 + NEED_DOWN2)
    if NEED_DOWN1:
        store_down(acc1, down_parts, down_part, offs_r, n_r, rows_i, mask_i, n_i)
    if NEED_DOWN2:
        store_down(acc2, down_parts, down_part + NEED_DOWN1, offs_r, n_r, rows_i, mask_i, n_i)


def merge_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> Merge:
    """The merge's tiles, as measured on an H200: square ones, which load the least of four factors, a few to a program.

    12288×3072, rank 16: 24.2 µs, with tiles of 64×128 31.7; rank 64: 37.0 µs against 52.8.
    """
    if dtype is torch.float32 or n_r > 64:
        return Merge(32, 64, 64, 4, 1)
    if n_o * n_i <= 1 << 21:
        return Merge(64, 64, 64, 4, 1)
    if n_r > 16 or n_o * n_i <= 1 << 23:
        return Merge(128, 64, 256, 8, 3)
    return Merge(64, 64, 256, 4, 2)


def strip_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> MergeBackward:
    """The backward's strip: wide (it divides up's partials) and long, as long as every SM has a program."""
    rank = rank_block("loha", n_r)
    waves = 1
    if dtype is torch.float32 or rank > 64:
        block_o, block_i, num_warps, waves = 16, 64 if rank <= 32 else 32, 4, 2
    elif n_o * n_i <= 1 << (21 if rank > 16 else 20):
        block_o, block_i, num_warps = 64, 64, 4
    elif rank > 16:
        block_o, block_i, num_warps = 128, 128, 8
    else:
        block_o, block_i, num_warps, waves = 64, 128, 4, 2 if n_o * n_i <= 1 << 23 else 1
    spans = max(1, waves * sms // cdiv(n_i, block_i))
    span = cdiv(cdiv(n_o, spans), block_o) * block_o
    return MergeBackward(block_o, block_i, span, num_warps, 2)


def token_config(n_o: int, n_i: int, dtype: torch.dtype, sms: int) -> MergeBackward:
    """The strip where ΔW's gradient is summed over tokens on the way: its tile takes registers of its own."""
    block, num_warps = (32, 4) if dtype is torch.float32 else (64, 8)
    spans = max(1, 2 * sms // cdiv(n_i, block))
    return MergeBackward(block, block, cdiv(cdiv(n_o, spans), block) * block, num_warps, 2)


def merge_backward_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> MergeBackward | Rows:
    """The merge's backward: one pass over G (`Rows` gives the same sums in two, without large partials)."""
    return strip_config(n_o, n_i, n_r, dtype, sms)


def merge_forward(
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Merge | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[O, I]; saves nothing."""
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    config = config or merge_config(n_o, n_i, n_r, up1.dtype, sm_count(up1.device))
    out = torch.empty((n_o, n_i), dtype=out_dtype, device=up1.device)
    bias = None if base is None else rows(base)
    _merge_kernel[(cdiv(n_o, config.block_o) * cdiv(n_i, config.span),)](
        up1, down1, up2, down2, bias, out, n_o, n_i, n_r, config.span, scale,
        *up1.stride(), *down1.stride(), *up2.stride(), *down2.stride(), 0 if bias is None else bias.stride(0),
        config.block_o, config.block_i, rank_block("loha", n_r), bias is not None, precision(up1.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, ()


def merge_backward(
    grad: Tensor,
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: MergeBackward | Rows | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_up1[O, R], grad_down1[R, I], grad_up2[O, R], grad_down2[R, I])."""
    g, factors = rows(grad), (up1, down1, up2, down2)
    config = config or merge_backward_config(g.shape[0], g.shape[1], up1.shape[1], g.dtype, sm_count(g.device))
    if isinstance(config, Rows):
        return row_backward("loha", g, factors, scale, needs, config)
    return factor_backward("loha", g, None, factors, scale, needs, config)


def factor_backward(
    op: str,
    g: Tensor,
    x: Tensor | None,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    needs: tuple[bool, ...],
    config: MergeBackward | None,
) -> tuple[Tensor | None, ...]:
    """The factors' gradients from that of ΔW, which is g[O, I] or, with x, g[T, O]ᵀ @ x[T, I]."""
    up1, down1, up2, down2 = factors
    need_up1, need_down1, need_up2, need_down2 = needs
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    if config is None:
        sms = sm_count(g.device)
        config = strip_config(n_o, n_i, n_r, g.dtype, sms) if x is None else token_config(n_o, n_i, g.dtype, sms)
    strips, spans = cdiv(n_i, config.block_i), cdiv(n_o, config.span)
    up_parts, ups = new_grads(up1, up2, (need_up1, need_up2), strips)
    down_parts, downs = new_grads(down1, down2, (need_down1, need_down2), spans)
    _factor_backward_kernel[(strips, spans)](
        g, x, up1, down1, up2, down2, up_parts, down_parts, g.shape[0], n_o, n_i, n_r, config.span,
        g.stride(0), 0 if x is None else x.stride(0),
        *up1.stride(), *down1.stride(), *up2.stride(), *down2.stride(),
        config.block_o, config.block_i, rank_block(op, n_r), 32 if g.dtype is torch.float32 else 64, x is not None,
        *needs, precision(g.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    reduce_grads((up_parts, down_parts), (ups, downs), scale)
    return ups[0], downs[0], ups[1], downs[1]
