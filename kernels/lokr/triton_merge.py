"""LoKr's merge in Triton.

    forward   ΔW[a·c, b·d] = scale · w1[a, b] · w2[c, d] (+ base)        one launch; ΔW is written once, in order
    backward  grad_w1[a, b] = scale · Σ_{c,d} G[a, c, b, d] · w2[c, d]
              grad_w2[c, d] = scale · Σ_{a,b} G[a, c, b, d] · w1[a, b]   G read once, then one reduction

A column of ΔW is a pair (b, d). The forward takes VEC neighbouring d at a time, so that a run never crosses into the next b
and needs one value of w1. In the backward a program keeps a tile of w2 and of its gradient in registers and walks over
G's blocks (a, b): each gives that tile's part of one element of w1's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, rows, sm_count
from kernels.lokr.triton_factors import Finish, GradPlan, Layout, factor_tile, side


@dataclass(frozen=True)
class Merge:
    """Launch of the forward: a program writes `block_a` × `block_c` rows of ΔW, `block_k` runs of `vec` columns each."""

    block_a: int
    block_c: int
    block_k: int
    vec: int
    num_warps: int


@dataclass(frozen=True)
class MergeGrad:
    """Launch of the backward: a program's tile of w2 is `block_c` × `block_d`; it walks `span` blocks of `block_b` b's."""

    block_c: int
    block_b: int
    block_d: int
    span: int
    num_warps: int
    num_stages: int


@planned
@triton.jit
def _merge_kernel(
    wa1, wb1, wa2, wb2, base, out, scale,
    LAYOUT1: tl.constexpr, BLOCK_R1: tl.constexpr, LAYOUT2: tl.constexpr, BLOCK_R2: tl.constexpr,
    STRIDE_BASE: tl.constexpr, VEC: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = LAYOUT1[0]
    B: tl.constexpr = LAYOUT1[1]
    C: tl.constexpr = LAYOUT2[0]
    D: tl.constexpr = LAYOUT2[1]
    RUNS: tl.constexpr = D // VEC
    TILES_K: tl.constexpr = (B * RUNS + BLOCK_K - 1) // BLOCK_K
    TILES_C: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    offs_a = pid // (TILES_K * TILES_C) * BLOCK_A + tl.arange(0, BLOCK_A)
    offs_c = pid // TILES_K % TILES_C * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_k = pid % TILES_K * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, VEC)
    mask_a, mask_c, mask_k = offs_a < A, offs_c < C, offs_k < B * RUNS
    offs_b = offs_k // RUNS
    # Tiles are [a, c, k, v] from the pointers on, so that every load arrives in the layout of the store.
    if LAYOUT1[2] == 0:
        at = wa1 + offs_a[:, None, None, None] * LAYOUT1[3] + offs_b[None, None, :, None] * LAYOUT1[4]
        w1 = tl.load(at, mask=mask_a[:, None, None, None] & mask_k[None, None, :, None], other=0.0)
    else:
        w1 = factor_tile(wa1, wb1, offs_a, offs_b, mask_a, mask_k, LAYOUT1, BLOCK_R1, PRECISION)[:, None, :, None]
    if LAYOUT2[2] == 0:
        offs_d = (offs_k % RUNS * VEC)[:, None] + offs_v[None, :]
        at = wa2 + offs_c[None, :, None, None] * LAYOUT2[3] + offs_d[None, None, :, :] * LAYOUT2[4]
        w2 = tl.load(at, mask=mask_c[None, :, None, None] & mask_k[None, None, :, None], other=0.0)
    else:
        offs_j = pid % TILES_K * (BLOCK_K * VEC) + tl.arange(0, BLOCK_K * VEC)
        tile = factor_tile(wa2, wb2, offs_c, offs_j % D, mask_c, offs_j < B * D, LAYOUT2, BLOCK_R2, PRECISION)
        w2 = tl.reshape(tile, (1, BLOCK_C, BLOCK_K, VEC))
    value = w1.to(tl.float32) * scale * w2.to(tl.float32)
    offs_o = offs_a.to(tl.int64)[:, None] * C + offs_c[None, :]
    offs_i = (offs_k * VEC)[:, None] + offs_v[None, :]
    mask = (mask_a[:, None] & mask_c[None, :])[:, :, None, None] & mask_k[None, None, :, None]
    if HAS_BASE:
        at = base + offs_o[:, :, None, None] * STRIDE_BASE + offs_i[None, None, :, :]
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = out + offs_o[:, :, None, None] * (B * D) + offs_i[None, None, :, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _merge_grad_kernel(
    g, wa1, wb1, wa2, wb2, parts1, parts2, scale1, scale2,
    LAYOUT1: tl.constexpr, BLOCK_R1: tl.constexpr, LAYOUT2: tl.constexpr, BLOCK_R2: tl.constexpr,
    STRIDE_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, SPAN: tl.constexpr,
    NEED1: tl.constexpr, NEED2: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts1[tile of w2, a, b] and parts2[span of (a, b), c, d] of both gradients times their scale, with G read once."""
    A: tl.constexpr = LAYOUT1[0]
    B: tl.constexpr = LAYOUT1[1]
    C: tl.constexpr = LAYOUT2[0]
    D: tl.constexpr = LAYOUT2[1]
    TILES_B: tl.constexpr = (B + BLOCK_B - 1) // BLOCK_B
    TILES_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    # The load of a w2 that is no row-major matrix can decide the layout of its product with G. With c and d made one axis, that
    # axis may then lie on lanes that are no neighbours, of which Triton 3.6's reduction adds up the wrong ones: axis by axis.
    APART: tl.constexpr = LAYOUT2[2] == 0 and LAYOUT2[4] != 1
    tile, pid_s = tl.program_id(0), tl.program_id(1)
    offs_c = tile // TILES_D * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_d = tile % TILES_D * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_c, mask_d = offs_c < C, offs_d < D
    if NEED1:
        if LAYOUT2[2] == 0:
            # One lane a (c, b, d) as in G, so that the loop does not wait for an exchange between threads.
            shape: tl.constexpr = (BLOCK_C, BLOCK_B, BLOCK_D)
            at_w2 = wa2 + offs_c[:, None, None] * LAYOUT2[3] + offs_d[None, None, :] * LAYOUT2[4]
            mask_w2 = tl.broadcast_to(mask_c[:, None, None] & mask_d[None, None, :], shape)
            w2 = tl.load(tl.broadcast_to(at_w2, shape), mask=mask_w2, other=0.0)
        else:
            w2 = factor_tile(wa2, wb2, offs_c, offs_d, mask_c, mask_d, LAYOUT2, BLOCK_R2, PRECISION)[:, None, :]
        w2 = w2.to(tl.float32)
    if NEED2:
        # One lane a (c, b, d): b is summed once, after the walk.
        acc = tl.zeros((BLOCK_C, BLOCK_B, BLOCK_D), tl.float32)
    for step in tl.range(pid_s * SPAN, tl.minimum(pid_s * SPAN + SPAN, A * TILES_B), num_stages=STAGES):
        a = step // TILES_B
        offs_b = step % TILES_B * BLOCK_B + tl.arange(0, BLOCK_B)
        mask_b = offs_b < B
        at = (
            g
            + (a.to(tl.int64) * C + offs_c[:, None, None]) * STRIDE_G
            + (offs_b[None, :, None] * D + offs_d[None, None, :])
        )
        mask = mask_c[:, None, None] & mask_b[None, :, None] & mask_d[None, None, :]
        grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if NEED2:
            acc += grad * _w1_row(wa1, wb1, a, offs_b, mask_b, LAYOUT1, BLOCK_R1)
        if NEED1:
            by_b = grad * w2
            if APART:
                by_b = tl.sum(by_b, axis=2)
            else:
                by_b = tl.reshape(tl.permute(by_b, (1, 0, 2)), (BLOCK_B, BLOCK_C * BLOCK_D))
            at = parts1 + (tile * A + a).to(tl.int64) * B + offs_b
            value = tl.sum(by_b, axis=0 if APART else 1) * scale1
            tl.store(at, value.to(parts1.dtype.element_ty), mask=mask_b)
    if NEED2:
        at = parts2 + (pid_s * C + offs_c[:, None]).to(tl.int64) * D + offs_d[None, :]
        value = tl.sum(acc, axis=1) * scale2
        tl.store(at, value.to(parts2.dtype.element_ty), mask=mask_c[:, None] & mask_d[None, :])


@triton.jit
def _w1_row(wa1, wb1, a, offs_b, mask_b, LAYOUT: tl.constexpr, BLOCK_R: tl.constexpr):
    """w1[a, offs_b] in float32 as [1, BLOCK_B, 1]."""
    if LAYOUT[2] == 0:
        at = wa1 + a * LAYOUT[3] + offs_b[None, :, None] * LAYOUT[4]
        return tl.load(at, mask=mask_b[None, :, None], other=0.0).to(tl.float32)
    else:
        row = tl.zeros((offs_b.shape[0],), tl.float32)
        for start in range(0, LAYOUT[2], BLOCK_R):
            offs_r = start + tl.arange(0, BLOCK_R)
            mask_r = offs_r < LAYOUT[2]
            left = tl.load(wa1 + a * LAYOUT[3] + offs_r * LAYOUT[4], mask=mask_r, other=0.0).to(tl.float32)
            at = wb1 + offs_r[:, None] * LAYOUT[5] + offs_b[None, :] * LAYOUT[6]
            right = tl.load(at, mask=mask_r[:, None] & mask_b[None, :], other=0.0).to(tl.float32)
            row += tl.sum(left[:, None] * right, axis=0)
        return row[None, :, None]


def merge_config(layout1: Layout, layout2: Layout, itemsize: int) -> Merge:
    """The forward's launch for factors of these layouts and an output of this many bytes an element."""
    (_, b, rank1), (_, d, rank2) = layout1[:3], layout2[:3]
    # Runs shorter than 8 bytes are left to Triton's own vectorisation along k.
    vec = gcd(d, max(1, 16 // itemsize))
    vec = vec if vec * itemsize >= 8 else 1
    runs = b * d // vec
    if rank1 or rank2:
        return Merge(4 if rank1 else 1, 16 if rank2 else 4, 16 if vec > 1 else 128, vec, 4)
    if vec == 1:
        return Merge(1, 8, 128, 1, 4)
    # Four stores of `vec` a thread: with one, the SMs start programs no faster than they write 3.3 TB/s.
    block_k = min(256, triton.next_power_of_2(runs))
    return Merge(1, 512 // block_k, block_k, vec, 4)


def merge_grad_config(layout1: Layout, layout2: Layout, itemsize: int, sms: int) -> MergeGrad:
    """The backward's launch: a tile of about 4096 elements of G a step, and enough programs for every SM."""
    (a, b), (c, d) = layout1[:2], layout2[:2]
    width = triton.next_power_of_2(d)
    block_d = min((128, 64), key=lambda k: cdiv(d, k) * k) if width > 128 else width
    # Threads fill d, then b: with 8 elements each, 1024 elements of a row keep every warp's b's its own, so that the sum
    # for w1's gradient needs no exchange between warps.
    block_b = min(triton.next_power_of_2(b), max(1, 1024 // block_d))
    tile = 4096 if itemsize == 2 else 2048
    block_c = min(triton.next_power_of_2(c), max(1, tile // (block_b * block_d)))
    tiles, steps = cdiv(c, block_c) * cdiv(d, block_d), a * cdiv(b, block_b)
    span = cdiv(steps, max(1, min(steps, cdiv(4 * sms, tiles))))
    return MergeGrad(block_c, block_b, block_d, span, 4, 3)


def merge_forward(
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Merge | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[a·c, b·d]; saves nothing."""
    side1, side2 = side(w1, w1_b), side(w2, w2_b)
    (a, b), (c, d) = side1.layout[:2], side2.layout[:2]
    out = torch.empty((a * c, b * d), dtype=out_dtype, device=w1.device)
    bias = out if base is None else rows(base)
    config = config or merge_config(side1.layout, side2.layout, out.itemsize)
    programs = cdiv(a, config.block_a) * cdiv(c, config.block_c) * cdiv(b * d, config.block_k * config.vec)
    _merge_kernel[(programs,)](
        side1.wa, side1.wb, side2.wa, side2.wb, bias, out, scale,
        side1.layout, side1.block_r, side2.layout, side2.block_r, bias.stride(0),
        config.vec, config.block_a, config.block_c, config.block_k, base is not None, precision(w1.dtype),
        num_warps=config.num_warps,
    )  # fmt: skip
    return out, ()


def merge_backward(
    grad: Tensor,
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: MergeGrad | None = None,
    finish_config: Finish | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (w1, w1_b, w2, w2_b)."""
    side1, side2 = side(w1, w1_b), side(w2, w2_b)
    g = rows(grad)
    (a, b), (c, d) = side1.layout[:2], side2.layout[:2]
    config = config or merge_grad_config(side1.layout, side2.layout, g.itemsize, sm_count(g.device))
    tiles = cdiv(c, config.block_c) * cdiv(d, config.block_d)
    spans = cdiv(a * cdiv(b, config.block_b), config.span)
    plan = GradPlan(scale)
    parts1, scale1 = plan.add(side1, tiles, needs[0], needs[1])
    parts2, scale2 = plan.add(side2, spans, needs[2], needs[3])
    _merge_grad_kernel[(tiles, spans)](
        g, side1.wa, side1.wb, side2.wa, side2.wb, parts1, parts2, scale1, scale2,
        side1.layout, side1.block_r, side2.layout, side2.block_r, g.stride(0),
        config.block_c, config.block_b, config.block_d, config.span,
        parts1 is not None, parts2 is not None, config.num_stages, precision(g.dtype), num_warps=config.num_warps,
    )  # fmt: skip
    return plan.finish(finish_config)
