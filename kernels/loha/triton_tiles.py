"""LoHa's bypass in Triton through tiles of ΔW, for ranks whose pairs would cost more (see kernels/loha/pairs.py).

    forward   y[T, O] = x @ ΔWᵀ, grad_x[T, I] = G @ ΔW       ΔW's tile from the factors, cast, multiplied, dropped
    backward  ΔW's gradient Gᵀ @ x tile by tile into the factors' gradients   `factor_backward` in triton_merge.py

float16: a tile of ΔW that leaves float16's range is scaled by a power of two.
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
from kernels.loha.triton_loads import load_down, load_up, rank_block


@dataclass(frozen=True)
class Tiles:
    """Launch of the product: a program makes a tile of y from `span` columns of x, `block_k` at a time."""

    block_t: int
    block_n: int
    block_k: int
    span: int
    num_warps: int
    num_stages: int


@planned
@triton.jit
def _tiles_kernel(
    a, left1, right1, left2, right2, base, out, n_t, n_n, n_k, n_r, span, scale, stride_at,
    stride_l1n, stride_l1r, stride_r1r, stride_r1k, stride_l2n, stride_l2r, stride_r2r, stride_r2k, stride_bt,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[s, T, N] = scale · a @ Wᵀ + base over the s-th span of K, with W = (left1 @ right1) ∘ (left2 @ right2)."""
    pid_n, pid_t, pid_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    mask_t, mask_n = offs_t < n_t, offs_n < n_n
    rows_t = offs_t.to(tl.int64)[:, None]
    rows_n = offs_n.to(tl.int64)
    l1 = load_up(left1, rows_n, mask_n, offs_r, n_r, stride_l1n, stride_l1r)
    l2 = load_up(left2, rows_n, mask_n, offs_r, n_r, stride_l2n, stride_l2r)
    start = pid_s * span
    stop = tl.minimum(start + span, n_k)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k in range(start, stop, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask_k = offs_k < stop
        rows_k = offs_k.to(tl.int64)
        tile = tl.load(a + rows_t * stride_at + offs_k[None, :], mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        r1 = load_down(right1, rows_k, mask_k, offs_r, n_r, stride_r1r, stride_r1k)
        r2 = load_down(right2, rows_k, mask_k, offs_r, n_r, stride_r2r, stride_r2k)
        weight = tl.dot(l1, r1, input_precision=PRECISION) * tl.dot(l2, r2, input_precision=PRECISION)
        operand, factor = to_operand(weight, tile.dtype)
        acc = dot_add(tile, tl.trans(operand), acc, PRECISION, factor)
    value = acc * scale
    mask = mask_t[:, None] & mask_n[None, :]
    if HAS_BASE:
        value += tl.load(base + rows_t * stride_bt + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
    at = (pid_s.to(tl.int64) * n_t + rows_t) * n_n + offs_n[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _sum_kernel(
    parts, base, out, splits, n_t, n_n, stride_bt, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BASE: tl.constexpr
):
    """out[T, N] = Σ_s parts[s, T, N] + base, in the order of s."""
    offs_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_t < n_t)[:, None] & (offs_n < n_n)[None, :]
    rows_t = offs_t.to(tl.int64)[:, None]
    value = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for s in range(splits):
        value += tl.load(parts + (s * n_t + rows_t) * n_n + offs_n[None, :], mask=mask, other=0.0)
    if HAS_BASE:
        value += tl.load(base + rows_t * stride_bt + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows_t * n_n + offs_n[None, :], value.to(out.dtype.element_ty), mask=mask)


def tiles_config(n_t: int, n_n: int, n_k: int, n_r: int, dtype: torch.dtype, sms: int) -> Tiles:
    """The product's launch: wide in tokens, which share ΔW's tile; K is split where tiles are fewer than SMs."""
    if dtype is torch.float32:
        block_t, block_n, block_k, num_warps = 32, 32, 32, 4
    elif n_t <= 256:
        block_t, block_n, block_k, num_warps = 64, 64, 64, 4
    else:
        block_t, block_n, block_k, num_warps = 128, 128, 64, 8
    tiles = cdiv(n_t, block_t) * cdiv(n_n, block_n)
    splits = max(1, min(8, sms // tiles, cdiv(n_k, 2 * block_k)))
    span = cdiv(cdiv(n_k, splits), block_k) * block_k
    return Tiles(block_t, block_n, block_k, span, num_warps, 2)


def product(
    a: Tensor,
    left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    scale: float,
    base: Tensor | None,
    out: Tensor,
    config: Tiles | None,
) -> None:
    """out[T, N] = scale · a[T, K] @ Wᵀ + base, with W[N, K] = (left[0] @ right[0]) ∘ (left[1] @ right[1])."""
    (n_t, n_k), (n_n, n_r) = a.shape, left[0].shape
    config = config or tiles_config(n_t, n_n, n_k, n_r, a.dtype, sm_count(a.device))
    splits = cdiv(n_k, config.span)
    parts = out if splits == 1 else a.new_empty((splits, n_t, n_n), dtype=torch.float32)
    stride_b = 0 if base is None else base.stride(0)
    _tiles_kernel[(cdiv(n_n, config.block_n), cdiv(n_t, config.block_t), splits)](
        a, left[0], right[0], left[1], right[1], base, parts, n_t, n_n, n_k, n_r, config.span, scale, a.stride(0),
        *left[0].stride(), *right[0].stride(), *left[1].stride(), *right[1].stride(), stride_b,
        config.block_t, config.block_n, config.block_k, rank_block("loha_bypass", n_r),
        base is not None and splits == 1, precision(a.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        _sum_kernel[(cdiv(n_n, 128), cdiv(n_t, 8))](
            parts, base, out, splits, n_t, n_n, stride_b, 8, 128, base is not None, num_warps=4
        )
