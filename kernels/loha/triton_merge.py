"""LoHa's merge in Triton, and the factors' gradients for the bypass through tiles of ΔW.

merge     ΔW[O, I] = scale · P1 ∘ P2,  P1 = up1 @ down1,  P2 = up2 @ down2     both products in registers
  backward  one pass over G[O, I] (triton_strips.py), then one reduction
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, rows, sm_count
from kernels.loha.grads import new_grads
from kernels.loha.triton_loads import rank_block
from kernels.loha.triton_reduce import reduce_grads
from kernels.loha.triton_rows import Rows, row_backward
from kernels.loha.triton_strips import strips_kernel


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
    """Launch of the backward: a program walks `span` rows of G, `block_o` at a time, over `subs` tiles of `block_i`."""

    block_o: int
    block_i: int
    span: int
    num_warps: int
    num_stages: int
    subs: int = 1


@triton.jit
def _load(factor, at, mask, in_rank, EVEN: tl.constexpr, FULL: tl.constexpr):
    if EVEN and FULL:
        return tl.load(factor + at)
    elif EVEN:
        return tl.load(factor + at, mask=in_rank, other=0.0)
    else:
        return tl.load(factor + at, mask=in_rank & mask, other=0.0)


@planned
@triton.jit
def _merge_kernel(
    up1, down1, up2, down2, base, out, n_o, n_r, span, scale, stride_bo, N_I: tl.constexpr, N_R: tl.constexpr,
    U1O: tl.constexpr, U1R: tl.constexpr, D1R: tl.constexpr, D1I: tl.constexpr,
    U2O: tl.constexpr, U2R: tl.constexpr, D2R: tl.constexpr, D2I: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of ΔW over a span of its columns; EVEN sizes need no masks along O and I, nor offsets of 64 bits.

    Sizes and strides are constants: half of the instructions before the first load go, of a kernel of 2 µs.
    """
    # A rank of 16 is masked in a walk, by a bound that is no constant: with no mask the first step's loads and barriers are
    # compiled into every step, as predicated ones, which cost 5120×1280 a microsecond.
    FULL: tl.constexpr = N_R == BLOCK_R and (ONCE or N_R > 16)
    bound = n_r if N_R == BLOCK_R else N_R
    offs_r = tl.arange(0, BLOCK_R)
    first = tl.program_id(0) * span
    rows_o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    if not EVEN:
        offs_r = offs_r.to(tl.int64)
        rows_o = rows_o.to(tl.int64)
    rows_o = rows_o[:, None]
    mask_o = rows_o < n_o
    up_rank = (offs_r < bound)[None, :]
    down_rank = (offs_r < bound)[:, None]
    u1 = tl.zeros((BLOCK_O, BLOCK_R), up1.dtype.element_ty)
    u2 = tl.zeros((BLOCK_O, BLOCK_R), up2.dtype.element_ty)
    for step in range(0, BLOCK_I if ONCE else tl.minimum(span, N_I - first), BLOCK_I):
        rows_i = (first + step + tl.arange(0, BLOCK_I))[None, :]
        if not EVEN:
            rows_i = rows_i.to(tl.int64)
        mask_i = rows_i < N_I
        d1 = _load(down1, offs_r[:, None] * D1R + rows_i * D1I, mask_i, down_rank, EVEN, FULL)
        d2 = _load(down2, offs_r[:, None] * D2R + rows_i * D2I, mask_i, down_rank, EVEN, FULL)
        if step == 0:
            # Here, and not before the loop, so that the first tiles of down are under way when these are waited for.
            u1 = _load(up1, rows_o * U1O + offs_r[None, :] * U1R, mask_o, up_rank, EVEN, FULL)
            u2 = _load(up2, rows_o * U2O + offs_r[None, :] * U2R, mask_o, up_rank, EVEN, FULL)
        value = tl.dot(u1, d1, input_precision=PRECISION) * tl.dot(u2, d2, input_precision=PRECISION) * scale
        mask = None if EVEN else mask_o & mask_i
        if HAS_BASE:
            value += tl.load(base + rows_o * stride_bo + rows_i, mask=mask).to(tl.float32)
        tl.store(out + rows_o * N_I + rows_i, value.to(out.dtype.element_ty), mask=mask)


def merge_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> Merge:
    """The merge's tiles, as measured on an H200: one a program, or a walk that leaves the busiest SM the fewest tiles.

    At rank 64 an SM holds three programs, and a walk is as long as lets all of them run at once: 5120×1280 7.7 µs in 7
    steps, 8.3 in 5 and 9.8 in 4; 12288×3072 28.9 in 24 and 29.5 in 12. At rank 4: 12288×3072 20.5 in 6 steps, 21.6 in 8.
    """
    size = n_o * n_i
    if dtype is torch.float32 or n_r > 64:
        return Merge(32, 64, 64, 4, 1)
    if size <= 1 << 21:
        if n_r > 16 and size > 1 << 20:
            return Merge(128, 128, 128, 8, 1)
        return Merge(32 if n_r <= 16 and size <= 1 << 19 else 64, 64, 64, 4, 1)
    down, along = cdiv(n_o, 64), cdiv(n_i, 64)
    spans = range(max(1, min(along, 3 * sms // down)), 0, -1)
    choices = (6, 7, 8) if n_r <= 16 else tuple(cdiv(along, n) for n in spans)
    steps = min(choices, key=lambda n: cdiv(down * cdiv(along, n), sms) * n)
    return Merge(64, 64, 64 * steps, 4, 4 if n_r <= 16 else 3)


def strip_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> MergeBackward:
    """The backward's strip: wide (it divides up's partials) and long, as long as every SM has a program.

    To rank 16 two tiles side by side need 224 registers a thread, so that an SM holds two programs, and with three
    stages the next tiles of G load while one is worked on. Both are reasons from the compiled kernel, not measurements.
    """
    rank = rank_block("loha", n_r)
    waves, stages, subs = 1, 2, 1
    if dtype is torch.float32 or rank > 64:
        block_o, block_i, num_warps, waves = 16, 64 if rank <= 32 else 32, 4, 2
    elif n_o * n_i <= 1 << (21 if rank > 16 else 20):
        block_o, block_i, num_warps = 64, 64, 4
    elif rank > 16:
        block_o, block_i, num_warps = 128, 128, 8
    else:
        block_o, block_i, num_warps, waves, stages, subs = 64, 64, 4, 2, 3, 2
    spans = max(1, waves * sms // cdiv(n_i, block_i * subs))
    span = cdiv(cdiv(n_o, spans), block_o) * block_o
    return MergeBackward(block_o, block_i, span, num_warps, stages, subs)


def token_config(n_o: int, n_i: int, dtype: torch.dtype, sms: int) -> MergeBackward:
    """The strip where ΔW's gradient is summed over tokens on the way: its tile takes registers of its own."""
    block, num_warps = (32, 4) if dtype is torch.float32 else (64, 8)
    spans = max(1, 2 * sms // cdiv(n_i, block))
    return MergeBackward(block, block, cdiv(cdiv(n_o, spans), block) * block, num_warps, 2)


def merge_backward_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> MergeBackward | Rows:
    """The merge's backward: two passes over G where one would write large partials, as measured on an H200.

    Rank 64: 12288×3072 134.1 µs against 200.2 in one pass, 3072×3072 43.5 against 55.9. Rank 16: 71.4 against 66.4, but
    1280×1280 8.6 against 9.3.
    """
    size = n_o * n_i
    if dtype is torch.float32 or n_r > 64 or (n_r <= 16 and not 1 << 20 < size <= 1 << 21):
        return strip_config(n_o, n_i, n_r, dtype, sms)
    if size <= 1 << 21:
        span = 128 if size <= 1 << 19 else 192
    elif size <= 1 << 23:
        span = 640
    else:
        span = 512 if size <= 1 << 24 else 1536
    return Rows(64, 64, span, 4, 3)


def _within_int32(t: Tensor) -> bool:
    return sum((size - 1) * abs(stride) for size, stride in zip(t.shape, t.stride(), strict=True)) < 1 << 31


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
    small = (up1, down1, up2, down2, out) if bias is None else (up1, down1, up2, down2, out, bias)
    even = n_o % config.block_o == 0 and n_i % config.block_i == 0 and all(_within_int32(t) for t in small)
    _merge_kernel[(cdiv(n_i, config.span), cdiv(n_o, config.block_o))](
        up1, down1, up2, down2, bias, out, n_o, n_r, config.span, scale, 0 if bias is None else bias.stride(0), n_i, n_r,
        *up1.stride(), *down1.stride(), *up2.stride(), *down2.stride(),
        config.block_o, config.block_i, rank_block("loha", n_r), config.span == config.block_i, even,
        bias is not None, precision(up1.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
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
    strips, spans = cdiv(n_i, config.block_i * config.subs), cdiv(n_o, config.span)
    up_parts, ups = new_grads(up1, up2, (need_up1, need_up2), strips)
    down_parts, downs = new_grads(down1, down2, (need_down1, need_down2), spans)
    strips_kernel[(strips, spans)](
        g, x, up1, down1, up2, down2, up_parts, down_parts, g.shape[0], n_o, n_i, n_r, config.span,
        g.stride(0), 0 if x is None else x.stride(0),
        *up1.stride(), *down1.stride(), *up2.stride(), *down2.stride(),
        config.block_o, config.block_i, rank_block(op, n_r), 32 if g.dtype is torch.float32 else 64, config.subs,
        x is not None, *needs, precision(g.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    reduce_grads((up_parts, down_parts), (ups, downs), scale)
    return ups[0], downs[0], ups[1], downs[1]
