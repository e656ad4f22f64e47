"""LoRA's bypass in Triton.

    z[T, R] = x @ downᵀ, y[T, O] = scale · z @ upᵀ             two launches, or one by blocks of tokens
    h = G @ up, grad_upᵀ = scale · zᵀ @ G                      G read once (`dual`)
    grad_x = scale · h @ down, grad_down = scale · hᵀ @ x      x read once, then one reduction

z and h stay float32; where they feed a 16-bit dot they are scaled by a power of two if need be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import dot_add, precision, reduce_partials, to_operand
from kernels.common.views import cdiv, rows, sm_count
from kernels.lora.triton_merge import Dual, dual, dual_config, rank_block, rows_product

# From this many tokens on h's partials are summed once, and grad_x and grad_down are made in launches of their own,
# since nothing but h is common to them (rank 16, 16384 tokens: 69 µs in one launch). Fewer tokens save the launches.
APART_FROM = 512
# Fewer tokens sum up to this many partial values a row in registers, loaded ahead through shared memory.
MAX_SUMMED = 24 * 16


@dataclass(frozen=True)
class Down:
    """Launch of z = x @ downᵀ: a program makes `block_t` rows of z from `span` columns of x, `block_i` at a time."""

    block_t: int
    block_i: int
    span: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Up:
    """Launch of y = scale · z @ upᵀ: the tile of y that a program writes."""

    block_t: int
    block_o: int
    num_warps: int


@dataclass(frozen=True)
class Bypass:
    """Launch of the bypass: z then y, or where `fused` both in one launch of the blocks of z's."""

    down: Down
    up: Up
    fused: bool


@planned
@triton.jit
def _down_kernel(
    x, down, parts, n_t, n_i, n_r, span, stride_xt, stride_dr, stride_di,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[s, T, R] = x[:, s] @ down[:, s]ᵀ over the s-th span of I."""
    pid_t, pid_s = tl.program_id(0), tl.program_id(1)
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = tl.arange(0, BLOCK_R)
    mask_t, mask_r = offs_t < n_t, offs_r < n_r
    rows_t = offs_t.to(tl.int64)[:, None]
    start = pid_s * span
    acc = rows_product(
        x, down, rows_t, mask_t, offs_r, mask_r, start, tl.minimum(start + span, n_i), stride_xt, stride_dr, stride_di,
        BLOCK_T, BLOCK_I, BLOCK_R, PRECISION,
    )  # fmt: skip
    tl.store(parts + (pid_s * n_t + rows_t) * n_r + offs_r[None, :], acc, mask=mask_t[:, None] & mask_r[None, :])


@triton.jit
def _sum_parts(parts, n_t, n_r, rows_t, offs_r, mask, SPLITS: tl.constexpr):
    """Σ_s parts[s, rows, :] in the order of s; unrolled, so that all loads are in flight at once."""
    at = parts + rows_t * n_r + offs_r[None, :]
    acc = tl.load(at, mask=mask, other=0.0)
    for _ in tl.static_range(SPLITS - 1):
        at += n_t * n_r
        acc += tl.load(at, mask=mask, other=0.0)
    return acc


@triton.jit
def _up_tile(
    operand, factor, up, base, out, rows_t, mask_t, offs_o, n_o, offs_r, mask_r, stride_uo, stride_ur, stride_bt,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes out[rows, offs_o] = factor · operand @ up[offs_o]ᵀ + base."""
    mask_o = offs_o < n_o
    u = tl.load(
        up + offs_o.to(tl.int64)[None, :] * stride_uo + offs_r.to(tl.int64)[:, None] * stride_ur,
        mask=mask_r[:, None] & mask_o[None, :],
        other=0.0,
    )
    value = tl.dot(operand, u, input_precision=PRECISION) * factor
    mask = mask_t[:, None] & mask_o[None, :]
    if HAS_BASE:
        value += tl.load(base + rows_t * stride_bt + offs_o[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows_t * n_o + offs_o[None, :], value.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _up_kernel(
    parts, up, base, out, z, n_t, n_o, n_r, scale, stride_uo, stride_ur, stride_bt,
    SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_BASE: tl.constexpr, SAVE_Z: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = scale · (Σ_s parts[s]) @ upᵀ + base; the first column of programs also writes z = Σ_s parts[s]."""
    pid_o, pid_t = tl.program_id(0), tl.program_id(1)
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_o = pid_o * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_r = tl.arange(0, BLOCK_R)
    mask_t, mask_r = offs_t < n_t, offs_r < n_r
    rows_t = offs_t.to(tl.int64)[:, None]
    mask_tr = mask_t[:, None] & mask_r[None, :]
    acc = _sum_parts(parts, n_t, n_r, rows_t, offs_r, mask_tr, SPLITS)
    if SAVE_Z:
        if pid_o == 0:
            tl.store(z + rows_t * n_r + offs_r[None, :], acc, mask=mask_tr)
    operand, factor = to_operand(acc, up.dtype.element_ty, True)
    _up_tile(
        operand, factor * scale, up, base, out, rows_t, mask_t, offs_o, n_o, offs_r, mask_r,
        stride_uo, stride_ur, stride_bt, HAS_BASE, PRECISION,
    )  # fmt: skip


@planned
@triton.jit
def _fused_kernel(
    x, down, up, base, out, z, n_t, n_i, n_o, n_r, scale,
    stride_xt, stride_dr, stride_di, stride_uo, stride_ur, stride_bt,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr,
    HAS_BASE: tl.constexpr, SAVE_Z: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The whole bypass for one block of tokens: z in registers, then every column of y."""
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = tl.arange(0, BLOCK_R)
    mask_t, mask_r = offs_t < n_t, offs_r < n_r
    rows_t = offs_t.to(tl.int64)[:, None]
    acc = rows_product(
        x, down, rows_t, mask_t, offs_r, mask_r, 0, n_i, stride_xt, stride_dr, stride_di,
        BLOCK_T, BLOCK_I, BLOCK_R, PRECISION,
    )  # fmt: skip
    if SAVE_Z:
        tl.store(z + rows_t * n_r + offs_r[None, :], acc, mask=mask_t[:, None] & mask_r[None, :])
    operand, factor = to_operand(acc, up.dtype.element_ty)
    for o in range(0, n_o, BLOCK_O):
        _up_tile(
            operand, factor * scale, up, base, out, rows_t, mask_t, o + tl.arange(0, BLOCK_O), n_o, offs_r, mask_r,
            stride_uo, stride_ur, stride_bt, HAS_BASE, PRECISION,
        )  # fmt: skip


@planned
@triton.jit
def _down_backward_kernel(
    h_parts, x, down, grad_x, down_parts, n_t, n_i, n_r, span, scale, down_scale, stride_xt, stride_dr, stride_di,
    SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    NEED_X: tl.constexpr, NEED_DOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x = scale · h @ down, down_parts[t, R, I] = down_scale · h[t]ᵀ @ x[t]; h = Σ_s h_parts[s], and x read once."""
    pid_i, pid_t = tl.program_id(0), tl.program_id(1)
    offs_i = pid_i * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_r = tl.arange(0, BLOCK_R)
    mask_i, mask_r = offs_i < n_i, offs_r < n_r
    dtype = down.dtype.element_ty if NEED_X else x.dtype.element_ty
    start = pid_t * span
    stop = tl.minimum(start + span, n_t)
    if NEED_X:
        d = tl.load(
            down + offs_r.to(tl.int64)[:, None] * stride_dr + offs_i.to(tl.int64)[None, :] * stride_di,
            mask=mask_r[:, None] & mask_i[None, :],
            other=0.0,
        )
    acc = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
    for t in range(start, stop, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask_t = offs_t < stop
        rows_t = offs_t.to(tl.int64)[:, None]
        mask = mask_t[:, None] & mask_i[None, :]
        if NEED_DOWN:
            tile = tl.load(x + rows_t * stride_xt + offs_i[None, :], mask=mask, other=0.0)
        h = _sum_parts(h_parts, n_t, n_r, rows_t, offs_r, mask_t[:, None] & mask_r[None, :], SPLITS)
        operand, factor = to_operand(h, dtype, True)
        if NEED_X:
            value = tl.dot(operand, d, input_precision=PRECISION) * (factor * scale)
            tl.store(grad_x + rows_t * n_i + offs_i[None, :], value.to(grad_x.dtype.element_ty), mask=mask)
        if NEED_DOWN:
            acc = dot_add(tl.trans(operand), tile, acc, PRECISION, factor)
    if NEED_DOWN:
        at = (pid_t * n_r + offs_r.to(tl.int64)[:, None]) * n_i + offs_i[None, :]
        tl.store(
            down_parts + at, (acc * down_scale).to(down_parts.dtype.element_ty), mask=mask_r[:, None] & mask_i[None, :]
        )


def bypass_config(n_t: int, n_i: int, n_o: int, n_r: int, dtype: torch.dtype, sms: int) -> Bypass:
    """Two launches that split I while tokens alone don't fill the SMs, one fused launch once they do."""
    if dtype is torch.float32 or n_r > 64:
        span = cdiv(cdiv(n_i, max(1, min(16, cdiv(n_i, 32), sms // cdiv(n_t, 16)))), 32) * 32
        return Bypass(Down(16, 32, span, 4, 3), Up(16, 64, 4), False)
    if n_t >= 24 * sms:
        wide = n_t < 64 * sms
        return Bypass(
            Down(32 if wide else 64, 256 if wide else 128, n_i, 4, 4 if wide else 3),
            Up(32, 256 if wide else 128, 4),
            True,
        )
    if n_t <= 256:
        return Bypass(Down(16, 128, max(256, cdiv(n_i, 16 * 128) * 128), 4, 4), Up(16, 128, 4), False)
    return Bypass(Down(64, 128, max(512, cdiv(n_i, 16 * 128) * 128), 4, 4), Up(32, 128, 4), False)


def bypass_backward_config(n_t: int, n_i: int, n_o: int, n_r: int, dtype: torch.dtype, sms: int) -> tuple[Dual, Dual]:
    """The passes over G and over x: narrow strips for few tokens, `dual`'s own shapes for many."""
    if dtype is torch.float32 or n_r > 16:
        return dual_config(n_t, n_o, n_r, dtype, sms), dual_config(n_t, n_i, n_r, dtype, sms)
    if n_t <= 128:
        rows = max(16, triton.next_power_of_2(n_t))
        return Dual(rows, 256, rows, 8, 1), Dual(rows, 128, rows, 8, 1)
    if n_t <= 256:
        return Dual(32, 128, 32, 4, 3), Dual(32, 128, 32, 4, 3)
    if n_t <= 2048:
        return Dual(64, 128, 64, 4, 2), Dual(64, 128, 64, 4, 2)
    return dual_config(n_t, n_o, n_r, dtype, sms), dual_config(n_t, n_i, n_r, dtype, sms)


def bypass_forward(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Bypass | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y[..., O]; saves z[T, R] in float32 where up's gradient will be asked for."""
    flat = rows(x)
    (n_t, n_i), (n_o, n_r) = flat.shape, up.shape
    config = config or bypass_config(n_t, n_i, n_o, n_r, x.dtype, sm_count(x.device))
    first, second = config.down, config.up
    block_r, dot = rank_block("lora_bypass", n_r), precision(x.dtype)
    out = torch.empty((*x.shape[:-1], n_o), dtype=out_dtype, device=x.device)
    z = torch.empty((n_t, n_r), dtype=torch.float32, device=x.device) if needs[1] else None
    bias = None if base is None else rows(base)
    stride_b = 0 if bias is None else bias.stride(0)
    if config.fused:
        _fused_kernel[(cdiv(n_t, first.block_t),)](
            flat, down, up, bias, out, z, n_t, n_i, n_o, n_r, scale,
            flat.stride(0), *down.stride(), *up.stride(), stride_b,
            first.block_t, first.block_i, second.block_o, block_r, bias is not None, z is not None, dot,
            num_warps=first.num_warps, num_stages=first.num_stages,
        )  # fmt: skip
        return out, () if z is None else (z,)
    splits = cdiv(n_i, first.span)
    single = splits == 1 and z is not None
    parts = z if single else x.new_empty((splits, n_t, n_r), dtype=torch.float32)
    _down_kernel[(cdiv(n_t, first.block_t), splits)](
        flat, down, parts, n_t, n_i, n_r, first.span, flat.stride(0), *down.stride(),
        first.block_t, first.block_i, block_r, dot, num_warps=first.num_warps, num_stages=first.num_stages,
    )  # fmt: skip
    _up_kernel[(cdiv(n_o, second.block_o), cdiv(n_t, second.block_t))](
        parts, up, bias, out, z, n_t, n_o, n_r, scale, *up.stride(), stride_b,
        splits, second.block_t, second.block_o, block_r, bias is not None, z is not None and not single, dot,
        num_warps=second.num_warps,
    )  # fmt: skip
    return out, () if z is None else (z,)


def bypass_backward(
    grad: Tensor,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: tuple[Dual, Dual] | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_x[..., I], grad_up[O, R], grad_down[R, I])."""
    need_x, need_up, need_down = needs
    g, flat = rows(grad), rows(x)
    (n_t, n_i), (n_o, n_r) = flat.shape, up.shape
    block_r, dot, sms = rank_block("lora_bypass", n_r), precision(x.dtype), sm_count(x.device)
    up_launch, down_launch = config or bypass_backward_config(n_t, n_i, n_o, n_r, x.dtype, sms)
    need_h = need_x or need_down
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device) if need_up else None
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device) if need_down else None
    # Without up's gradient nothing reads `left`; `up` stands in for the z that was not saved.
    whole = None if grad_up is None else grad_up.T
    left = saved[0] if need_up else up
    h_parts, up_parts = dual("lora_bypass", g, up, left, need_h, need_up, up_launch, whole, scale)
    down_parts = grad_x = None
    splits = 0 if h_parts is None else h_parts.shape[0]
    if h_parts is not None and (n_t >= APART_FROM or splits * block_r > MAX_SUMMED):
        if splits > 1:
            h = h_parts.new_empty((1, n_t, n_r))
            reduce_partials((h_parts, up_parts), (h, grad_up), (1.0, scale), (False, True))
            h_parts, up_parts = h, None
        if need_down:
            _, down_parts = dual("lora_bypass", flat, down, h_parts[0], False, True, down_launch, grad_down, scale)
        reduce_partials((up_parts, down_parts), (grad_up, grad_down), (scale, scale), (True, False))
        up_parts = down_parts = None
        # Last, so that no partials are held beside it.
        if need_x:
            grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            tile = bypass_config(n_t, n_o, n_i, n_r, x.dtype, sms).up
            _up_kernel[(cdiv(n_i, tile.block_o), cdiv(n_t, tile.block_t))](
                h_parts, down, None, grad_x, None, n_t, n_i, n_r, scale, down.stride(1), down.stride(0), 0,
                1, tile.block_t, tile.block_o, block_r, False, False, dot, num_warps=tile.num_warps,
            )  # fmt: skip
        return grad_x, grad_up, grad_down
    if h_parts is not None:
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
        spans = cdiv(n_t, down_launch.span)
        down_parts = x.new_empty((spans, n_r, n_i), dtype=torch.float32) if need_down and spans > 1 else None
        _down_backward_kernel[(cdiv(n_i, down_launch.block_n), spans)](
            h_parts, flat, down, grad_x, grad_down if spans == 1 else down_parts, n_t, n_i, n_r, down_launch.span,
            scale, scale if spans == 1 else 1.0, flat.stride(0), *down.stride(),
            splits, down_launch.block_m, down_launch.block_n, block_r, need_x, need_down, dot,
            num_warps=down_launch.num_warps, num_stages=down_launch.num_stages,
        )  # fmt: skip
    reduce_partials((up_parts, down_parts), (grad_up, grad_down), (scale, scale), (True, False))
    return grad_x, grad_up, grad_down
