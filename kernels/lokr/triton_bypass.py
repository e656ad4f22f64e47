"""LoKr's bypass in Triton where both factors fit on an SM; kernels.lokr.triton_tiled has the rest.

    forward   Y = scale · (w1 X) w2ᵀ for each token, with X the token as [b, d] and Y as [a, c]
    backward  P = w1ᵀ G,  grad_X = scale · P w2,  grad_w2 = scale · Σ_t Pᵀ X
              Z = X w2ᵀ,                          grad_w1 = scale · Σ_t G Zᵀ        X and G read once, then one reduction

A program loads both factors once and walks over tokens; its parts of the factors' gradients stay in registers. The forward
makes w1 X first, because the left operand of a tensor-core product may come from registers: it never passes through
shared memory. The next token is loaded into registers, which leaves room for more programs an SM than a pipeline through
shared memory (4096 tokens of 4096: 16.1 µs against 17.0 with three stages, on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import precision, to_operand, to_operand_by_row
from kernels.common.views import rows, shared_bytes, sm_count
from kernels.lokr import triton_tiled
from kernels.lokr.triton_factors import Finish, GradPlan, Side, factor_tile, side


@dataclass(frozen=True)
class Forward:
    """Launch of the forward: at most `per_sm` programs an SM walk over tokens."""

    per_sm: int
    num_warps: int


@dataclass(frozen=True)
class Backward:
    """Launch of the backward: at most `per_sm` programs an SM walk over tokens."""

    per_sm: int
    num_warps: int
    num_stages: int


@triton.jit
def _blocks(LAYOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column offsets of a whole factor, and their masks."""
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    return offs_m, offs_n, offs_m < LAYOUT[0], offs_n < LAYOUT[1]


@planned
@triton.jit
def _forward_kernel(
    x, wa1, wb1, wa2, wb2, base, out, n_t, scale,
    LAYOUT1: tl.constexpr, BLOCK_R1: tl.constexpr, LAYOUT2: tl.constexpr, BLOCK_R2: tl.constexpr,
    STRIDE_X: tl.constexpr, STRIDE_BASE: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = LAYOUT1[0]
    C: tl.constexpr = LAYOUT2[0]
    D: tl.constexpr = LAYOUT2[1]
    dtype = x.dtype.element_ty
    first, programs = tl.program_id(0), tl.num_programs(0)
    offs_a, offs_b, mask_a, mask_b = _blocks(LAYOUT1, BLOCK_A, BLOCK_B)
    offs_c, offs_d, mask_c, mask_d = _blocks(LAYOUT2, BLOCK_C, BLOCK_D)
    at_x = x + (offs_b[:, None] * D + offs_d[None, :])
    mask_x = mask_b[:, None] & mask_d[None, :]
    at_y = offs_a[:, None] * C + offs_c[None, :]
    mask_y = mask_a[:, None] & mask_c[None, :]
    # Before the factors: all of a program's first loads are in flight at once.
    tile = tl.load(at_x + tl.cast(first, tl.int64) * STRIDE_X, mask=mask_x, other=0.0)
    w1 = factor_tile(wa1, wb1, offs_a, offs_b, mask_a, mask_b, LAYOUT1, BLOCK_R1, PRECISION)
    w2 = factor_tile(wa2, wb2, offs_c, offs_d, mask_c, mask_d, LAYOUT2, BLOCK_R2, PRECISION)
    if LAYOUT1[2] > 0:
        w1, factor = to_operand(w1, dtype)
        scale *= factor
    if LAYOUT2[2] > 0:
        w2, factor = to_operand(w2, dtype)
        scale *= factor
    w2_t = tl.trans(w2)
    for t in tl.range(first, n_t, programs, num_stages=1):
        token = tl.cast(t, tl.int64)
        ahead = token + programs
        following = tl.load(at_x + ahead * STRIDE_X, mask=mask_x & (ahead < n_t), other=0.0)
        u, row_factor = to_operand_by_row(tl.dot(w1, tile, input_precision=PRECISION), dtype)
        y = tl.dot(u, w2_t, input_precision=PRECISION) * (scale * row_factor)
        if HAS_BASE:
            y += tl.load(base + token * STRIDE_BASE + at_y, mask=mask_y, other=0.0).to(tl.float32)
        tl.store(out + token * (A * C) + at_y, y.to(out.dtype.element_ty), mask=mask_y)
        tile = following


@planned
@triton.jit
def _backward_kernel(
    g, x, wa1, wb1, wa2, wb2, grad_x, parts1, parts2, n_t, scale, scale1, scale2,
    LAYOUT1: tl.constexpr, BLOCK_R1: tl.constexpr, LAYOUT2: tl.constexpr, BLOCK_R2: tl.constexpr,
    STRIDE_G: tl.constexpr, STRIDE_X: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    NEED_X: tl.constexpr, NEED1: tl.constexpr, NEED2: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x, and parts1[program, a, b] and parts2[program, c, d] of the factors' gradients."""
    A: tl.constexpr = LAYOUT1[0]
    B: tl.constexpr = LAYOUT1[1]
    C: tl.constexpr = LAYOUT2[0]
    D: tl.constexpr = LAYOUT2[1]
    dtype = g.dtype.element_ty
    pid = tl.program_id(0)
    offs_a, offs_b, mask_a, mask_b = _blocks(LAYOUT1, BLOCK_A, BLOCK_B)
    offs_c, offs_d, mask_c, mask_d = _blocks(LAYOUT2, BLOCK_C, BLOCK_D)
    factor1, factor2 = 1.0, 1.0
    w1 = factor_tile(wa1, wb1, offs_a, offs_b, mask_a, mask_b, LAYOUT1, BLOCK_R1, PRECISION)
    w2 = factor_tile(wa2, wb2, offs_c, offs_d, mask_c, mask_d, LAYOUT2, BLOCK_R2, PRECISION)
    if LAYOUT1[2] > 0:
        w1, factor1 = to_operand(w1, dtype)
    if LAYOUT2[2] > 0:
        w2, factor2 = to_operand(w2, dtype)
    w1_t, w2_t = tl.trans(w1), tl.trans(w2)
    at_g = g + (offs_a[:, None] * C + offs_c[None, :])
    mask_g = mask_a[:, None] & mask_c[None, :]
    at_x = offs_b[:, None] * D + offs_d[None, :]
    mask_x = mask_b[:, None] & mask_d[None, :]
    # The transpose of w1's gradient, so that Z is a left operand.
    acc1 = tl.zeros((BLOCK_B, BLOCK_A), tl.float32)
    acc2 = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    for t in tl.range(pid, n_t, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(t, tl.int64)
        grad = tl.load(at_g + token * STRIDE_G, mask=mask_g, other=0.0)
        if NEED1 or NEED2:
            tile = tl.load(x + token * STRIDE_X + at_x, mask=mask_x, other=0.0)
        if NEED_X or NEED2:
            p, factor = to_operand(tl.dot(w1_t, grad, input_precision=PRECISION), dtype)
            factor *= factor1
        if NEED_X:
            value = tl.dot(p, w2, input_precision=PRECISION) * (scale * factor2 * factor)
            tl.store(grad_x + token * (B * D) + at_x, value.to(dtype), mask=mask_x)
        if NEED2:
            acc2 += tl.dot(tl.trans(p), tile, input_precision=PRECISION) * factor
        if NEED1:
            z, factor = to_operand(tl.dot(tile, w2_t, input_precision=PRECISION), dtype)
            acc1 += tl.dot(z, tl.trans(grad), input_precision=PRECISION) * (factor * factor2)
    if NEED1:
        at = parts1 + pid.to(tl.int64) * (A * B) + (offs_a[:, None] * B + offs_b[None, :])
        mask = mask_a[:, None] & mask_b[None, :]
        tl.store(at, (tl.trans(acc1) * scale1).to(parts1.dtype.element_ty), mask=mask)
    if NEED2:
        at = parts2 + pid.to(tl.int64) * (C * D) + (offs_c[:, None] * D + offs_d[None, :])
        mask = mask_c[:, None] & mask_d[None, :]
        tl.store(at, (acc2 * scale2).to(parts2.dtype.element_ty), mask=mask)


def _block(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def _resident(side1: Side, side2: Side) -> tuple[int, int, int, int] | None:
    """Block sizes of a, b, c, d, or None where a token or a factor is too large to be one tile in registers.

    Nor do full float32 products come in such tiles: without tensor cores Triton unrolls a whole product into registers.
    """
    dtype = side1.wa.dtype
    a, b, c, d = (_block(n) for n in (*side1.layout[:2], *side2.layout[:2]))
    if precision(dtype) != "tf32" and dtype is torch.float32:
        return None
    return (a, b, c, d) if max(a * b, c * d, b * d, a * c, b * c) * dtype.itemsize <= 32768 else None


def _pair_elements(*sides: Side) -> int:
    """Elements in flight while a pair is multiplied out: two steps of its rank."""
    return max(2 * side.block_r * sum(map(_block, side.layout[:2])) if side.layout[2] else 0 for side in sides)


def forward_config(side1: Side, side2: Side, tokens: int, sms: int, shared: int) -> Forward | None:
    """The forward's launch with `shared` bytes a program, or None where it has to go tile by tile."""
    blocks = _resident(side1, side2)
    if blocks is None:
        return None
    a, b, c, d = blocks
    if (a * b + c * d + max(b * d, a * c) + _pair_elements(side1, side2)) * side1.wa.itemsize > shared:
        return None
    large = max(b * d, a * d, a * c) > 4096
    if large:
        return Forward(2, 8)
    # What is loaded at once, two tokens a program, should be all of a short x.
    return Forward(4 if tokens <= 8 * sms else 5, 4)


def backward_config(side1: Side, side2: Side, shared: int) -> Backward | None:
    """The backward's launch, or None where it has to go tile by tile, or the gradients don't fit in registers."""
    blocks = _resident(side1, side2)
    if blocks is None:
        return None
    a, b, c, d = blocks
    itemsize = side1.wa.itemsize
    if (a * b + c * d) * itemsize > 32768:
        return None
    held = a * b + c * d + b * c + _pair_elements(side1, side2)
    stages = min(3, (shared // itemsize - held) // (b * d + a * c))
    if stages < 1:
        return None
    large = max(a * b + c * d, 2 * b * c, 2 * a * c, 2 * b * d) > 8192
    return Backward(1 if large else 2, 8 if large else 4, stages)


def bypass_forward(
    x: Tensor,
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Forward | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y[..., a·c]; saves nothing."""
    side1, side2 = side(w1, w1_b), side(w2, w2_b)
    flat = rows(x)
    out = torch.empty((*x.shape[:-1], side1.layout[0] * side2.layout[0]), dtype=out_dtype, device=x.device)
    bias = None if base is None else rows(base)
    sms = sm_count(x.device)
    config = config or forward_config(side1, side2, flat.shape[0], sms, shared_bytes(x.device))
    if config is None:
        triton_tiled.apply(flat, side1, side2, scale, bias, out.view(flat.shape[0], -1))
        return out, ()
    stride_base = 0 if bias is None else bias.stride(0)
    _forward_kernel[(min(flat.shape[0], config.per_sm * sms),)](
        flat, *side1[:2], *side2[:2], bias, out, flat.shape[0], scale,
        side1.layout, side1.block_r, side2.layout, side2.block_r, flat.stride(0), stride_base,
        *map(_block, (*side1.layout[:2], *side2.layout[:2])), bias is not None, precision(x.dtype),
        num_warps=config.num_warps,
    )  # fmt: skip
    return out, ()


def bypass_backward(
    grad: Tensor,
    x: Tensor,
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: Backward | None = None,
    finish_config: Finish | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, w1, w1_b, w2, w2_b)."""
    side1, side2 = side(w1, w1_b), side(w2, w2_b)
    g, flat = rows(grad), rows(x)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    config = config or backward_config(side1, side2, shared_bytes(x.device))
    if config is None:
        out = None if grad_x is None else grad_x.view(flat.shape)
        return grad_x, *triton_tiled.gradients(g, flat, side1, side2, scale, needs, out, finish_config)
    programs = min(flat.shape[0], config.per_sm * sm_count(x.device))
    plan = GradPlan(scale)
    parts1, scale1 = plan.add(side1, programs, needs[1], needs[2])
    parts2, scale2 = plan.add(side2, programs, needs[3], needs[4])
    _backward_kernel[(programs,)](
        g, flat, *side1[:2], *side2[:2], grad_x, parts1, parts2, flat.shape[0], scale, scale1, scale2,
        side1.layout, side1.block_r, side2.layout, side2.block_r, g.stride(0), flat.stride(0),
        *map(_block, (*side1.layout[:2], *side2.layout[:2])),
        grad_x is not None, parts1 is not None, parts2 is not None, config.num_stages, precision(x.dtype),
        num_warps=config.num_warps,
    )  # fmt: skip
    return grad_x, *plan.finish(finish_config)
