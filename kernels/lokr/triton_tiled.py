"""LoKr's bypass in Triton for factors of any size, tile by tile.

    apply      Y[t, a, c] = scale · Σ_b w1[a, b] Z[t, b, c] (+ base),  Z[t, b, c] = Σ_d x[t, b, d] w2[c, d]
    gradient   grad_w2[c, d] = Σ_{t,b} P[t, b, c] x[t, b, d],          P[t, b, c] = Σ_a w1[a, b] G[t, a, c]

Z and P live in registers, a tile of them at a time, for several tokens at once. grad_x is `apply` on G with both factors
transposed. Both computations have the two factors in different roles; `_exchanged` swaps the roles by strides alone.
Tiles of w1's rows past the first compute Z again: w1 should be the smaller factor, and `apply` sees to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import dot_add, precision, to_operand
from kernels.common.views import cdiv, sm_count
from kernels.lokr.triton_factors import Finish, GradPlan, Layout, Side, factor_tile

Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Tiled:
    """Launch of both kernels: block sizes of the five axes."""

    block_t: int
    block_a: int
    block_b: int
    block_c: int
    block_d: int
    num_warps: int
    num_stages: int


@triton.jit
def _operand(
    wa, wb, offs_m, offs_n, LAYOUT: tl.constexpr, BLOCK_R: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr
):
    """A factor's tile as an operand of a dot, and the factor that undoes its scaling."""
    tile = factor_tile(wa, wb, offs_m, offs_n, offs_m < LAYOUT[0], offs_n < LAYOUT[1], LAYOUT, BLOCK_R, PRECISION)
    if LAYOUT[2] == 0:
        return tile, 1.0
    else:
        return to_operand(tile, dtype)


@planned
@triton.jit
def _apply_kernel(
    x, wa1, wb1, wa2, wb2, base, out, n_t, scale,
    LAYOUT1: tl.constexpr, BLOCK_R1: tl.constexpr, LAYOUT2: tl.constexpr, BLOCK_R2: tl.constexpr,
    STRIDES_X: tl.constexpr, STRIDES_BASE: tl.constexpr, STRIDES_Y: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    A: tl.constexpr = LAYOUT1[0]
    B: tl.constexpr = LAYOUT1[1]
    C: tl.constexpr = LAYOUT2[0]
    D: tl.constexpr = LAYOUT2[1]
    dtype = x.dtype.element_ty
    TILES_A: tl.constexpr = (A + BLOCK_A - 1) // BLOCK_A
    TILES_C: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    start_t = pid // (TILES_A * TILES_C) * BLOCK_T
    offs_a = pid // TILES_C % TILES_A * BLOCK_A + tl.arange(0, BLOCK_A)
    offs_c = pid % TILES_C * BLOCK_C + tl.arange(0, BLOCK_C)
    # Rows of x's tile are pairs (t, b), columns of Y's are pairs (t, c).
    rows = tl.arange(0, BLOCK_T * BLOCK_B)
    offs_tb = (start_t + rows // BLOCK_B).to(tl.int64)
    acc = tl.zeros((BLOCK_A, BLOCK_T * BLOCK_C), tl.float32)
    for start_b in range(0, B, BLOCK_B):
        offs_b = start_b + rows % BLOCK_B
        mask_tb = (offs_tb < n_t) & (offs_b < B)
        at_tb = x + offs_tb * STRIDES_X[0] + offs_b * STRIDES_X[1]
        z = tl.zeros((BLOCK_T * BLOCK_B, BLOCK_C), tl.float32)
        for start_d in range(0, D, BLOCK_D):
            offs_d = start_d + tl.arange(0, BLOCK_D)
            at = at_tb[:, None] + offs_d[None, :] * STRIDES_X[2]
            tile = tl.load(at, mask=mask_tb[:, None] & (offs_d < D)[None, :], other=0.0)
            w2, factor = _operand(wa2, wb2, offs_c, offs_d, LAYOUT2, BLOCK_R2, dtype, PRECISION)
            z = dot_add(tile, tl.trans(w2), z, PRECISION, factor)
        z_operand, factor = to_operand(z, dtype)
        by_b = tl.permute(tl.reshape(z_operand, (BLOCK_T, BLOCK_B, BLOCK_C)), (1, 0, 2))
        offs_k = start_b + tl.arange(0, BLOCK_B)
        w1, factor1 = _operand(wa1, wb1, offs_a, offs_k, LAYOUT1, BLOCK_R1, dtype, PRECISION)
        right = tl.reshape(by_b, (BLOCK_B, BLOCK_T * BLOCK_C))
        acc = dot_add(w1, right, acc, PRECISION, factor * factor1)
    acc *= scale
    columns = tl.arange(0, BLOCK_T * BLOCK_C)
    offs_tc = (start_t + columns // BLOCK_C).to(tl.int64)
    offs_y = pid % TILES_C * BLOCK_C + columns % BLOCK_C
    mask = (offs_a < A)[:, None] & ((offs_tc < n_t) & (offs_y < C))[None, :]
    if HAS_BASE:
        at = base + offs_a[:, None] * STRIDES_BASE[1] + (offs_tc * STRIDES_BASE[0] + offs_y * STRIDES_BASE[2])[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = out + offs_a[:, None] * STRIDES_Y[1] + (offs_tc * STRIDES_Y[0] + offs_y * STRIDES_Y[2])[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _gradient_kernel(
    g, x, wa1, wb1, parts, n_t, span, scale,
    LAYOUT1: tl.constexpr, BLOCK_R1: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    STRIDES_G: tl.constexpr, STRIDES_X: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[s, c, d] = scale · grad_w2 over the s-th span of tokens."""
    A: tl.constexpr = LAYOUT1[0]
    B: tl.constexpr = LAYOUT1[1]
    dtype = x.dtype.element_ty
    TILES_D: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tile, pid_s = tl.program_id(0), tl.program_id(1)
    start_c = tile // TILES_D * BLOCK_C
    offs_d = tile % TILES_D * BLOCK_D + tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_T * BLOCK_B)
    columns = tl.arange(0, BLOCK_T * BLOCK_C)
    offs_gc = start_c + columns % BLOCK_C
    acc = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
    stop = tl.minimum(pid_s * span + span, n_t)
    for start_t in range(pid_s * span, stop, BLOCK_T):
        offs_tc = (start_t + columns // BLOCK_C).to(tl.int64)
        mask_tc = (offs_tc < stop) & (offs_gc < C)
        at_tc = g + offs_tc * STRIDES_G[0] + offs_gc * STRIDES_G[2]
        offs_tb = (start_t + rows // BLOCK_B).to(tl.int64)
        for start_b in range(0, B, BLOCK_B):
            p = tl.zeros((BLOCK_B, BLOCK_T * BLOCK_C), tl.float32)
            for start_a in range(0, A, BLOCK_A):
                offs_a = start_a + tl.arange(0, BLOCK_A)
                at = at_tc[None, :] + offs_a[:, None] * STRIDES_G[1]
                grad = tl.load(at, mask=(offs_a < A)[:, None] & mask_tc[None, :], other=0.0)
                offs_k = start_b + tl.arange(0, BLOCK_B)
                w1, factor = _operand(wa1, wb1, offs_a, offs_k, LAYOUT1, BLOCK_R1, dtype, PRECISION)
                p = dot_add(tl.trans(w1), grad, p, PRECISION, factor)
            operand, factor = to_operand(p, dtype)
            by_t = tl.permute(tl.reshape(operand, (BLOCK_B, BLOCK_T, BLOCK_C)), (1, 0, 2))
            offs_b = start_b + rows % BLOCK_B
            mask_tb = (offs_tb < stop) & (offs_b < B)
            at = x + (offs_tb * STRIDES_X[0] + offs_b * STRIDES_X[1])[:, None] + offs_d[None, :] * STRIDES_X[2]
            right = tl.load(at, mask=mask_tb[:, None] & (offs_d < D)[None, :], other=0.0)
            left = tl.trans(tl.reshape(by_t, (BLOCK_T * BLOCK_B, BLOCK_C)))
            acc = dot_add(left, right, acc, PRECISION, factor)
    offs_c = start_c + tl.arange(0, BLOCK_C)
    at = parts + (pid_s.to(tl.int64) * C + offs_c[:, None]) * D + offs_d[None, :]
    tl.store(at, (acc * scale).to(parts.dtype.element_ty), mask=(offs_c < C)[:, None] & (offs_d < D)[None, :])


def tiled_config(layout1: Layout, layout2: Layout, dtype: torch.dtype) -> Tiled:
    """Blocks of at most 64, for as many tokens at once as make tiles of about 8192 elements.

    Full float32 products are unrolled into registers: their contractions, over all axes but c, are kept short.
    """
    exact = dtype is torch.float32 and precision(dtype) != "tf32"
    most = (32, 32, 64, 32) if exact else (64, 64, 64, 64)
    sizes = (*layout1[:2], *layout2[:2])
    a, b, c, d = (min(m, max(16, triton.next_power_of_2(n))) for n, m in zip(sizes, most, strict=True))
    tokens = max(1, min(8, (2048 if exact else 8192) // (max(a, b) * c)))
    return Tiled(tokens, a, b, c, d, 8, 2)


def _strides(tensor: Tensor, inner: int) -> Strides:
    """Strides of rows [T, n · inner] seen as [T, n, inner]."""
    return tensor.stride(0), inner, 1


def _exchanged(strides: Strides) -> Strides:
    return strides[0], strides[2], strides[1]


def apply(
    x: Tensor, side1: Side, side2: Side, scale: float, base: Tensor | None, out: Tensor, config: Tiled | None = None
) -> None:
    """out[T, a·c] = scale · x[T, b·d] @ (w1 ⊗ w2)ᵀ, plus base."""
    c, d = side2.layout[:2]
    strides = [_strides(x, d), (0, 0, 0) if base is None else _strides(base, c), _strides(out, c)]
    if side1.layout[0] * side1.layout[1] > c * d:
        side1, side2, strides = side2, side1, [_exchanged(s) for s in strides]
    config = config or tiled_config(side1.layout, side2.layout, x.dtype)
    tiles = cdiv(side1.layout[0], config.block_a) * cdiv(side2.layout[0], config.block_c)
    _apply_kernel[(tiles * cdiv(x.shape[0], config.block_t),)](
        x, *side1[:2], *side2[:2], base, out, x.shape[0], scale,
        side1.layout, side1.block_r, side2.layout, side2.block_r, *strides,
        config.block_t, config.block_a, config.block_b, config.block_c, config.block_d,
        base is not None, precision(x.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def gradients(
    g: Tensor,
    x: Tensor,
    side1: Side,
    side2: Side,
    scale: float,
    needs: tuple[bool, ...],
    grad_x: Tensor | None,
    finish_config: Finish | None = None,
    config: Tiled | None = None,
) -> tuple[Tensor | None, ...]:
    """Fills grad_x where given; returns the gradients of both sides' tensors (needs: of x and of these, in order)."""
    if grad_x is not None:
        apply(g, side1.transposed(), side2.transposed(), scale, None, grad_x, config)
    strides = _strides(g, side2.layout[0]), _strides(x, side2.layout[1])
    plan = GradPlan(scale)
    _gradient(plan, g, x, side2, side1, tuple(map(_exchanged, strides)), needs[1:3], config)
    _gradient(plan, g, x, side1, side2, strides, needs[3:5], config)
    return plan.finish(finish_config)


def _gradient(
    plan: GradPlan,
    g: Tensor,
    x: Tensor,
    side1: Side,
    side2: Side,
    strides: tuple[Strides, ...],
    needs: tuple[bool, ...],
    config: Tiled | None,
) -> None:
    """Adds side2's gradient to the plan."""
    config = config or tiled_config(side1.layout, side2.layout, x.dtype)
    n_t, (c, d) = x.shape[0], side2.layout[:2]
    tiles = cdiv(c, config.block_c) * cdiv(d, config.block_d)
    steps = cdiv(n_t, config.block_t)
    span = cdiv(steps, max(1, min(steps, cdiv(2 * sm_count(x.device), tiles)))) * config.block_t
    splits = cdiv(n_t, span)
    parts, scale = plan.add(side2, splits, *needs)
    if parts is None:
        return
    _gradient_kernel[(tiles, splits)](
        g, x, *side1[:2], parts, n_t, span, scale,
        side1.layout, side1.block_r, c, d, *strides,
        config.block_t, config.block_a, config.block_b, config.block_c, config.block_d,
        precision(x.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
