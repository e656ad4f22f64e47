"""LoRA in Triton.

    merge     ΔW[O, I] = scale · up[O, R] @ down[R, I]                  one launch, a tile of ΔW a program
      backward  grad_up = scale · G @ downᵀ, grad_down = scale · upᵀ @ G    G read once (`dual`), then one reduction
    bypass    z[T, R] = x @ downᵀ, y[T, O] = scale · z @ upᵀ            split (two launches) or fused by token block
      backward  h = G @ up, grad_upᵀ = zᵀ @ G       G read once (`dual`)
                grad_x = scale · h @ down, grad_down = scale · hᵀ @ x   x read once, then one reduction

Sums over more than one program go through float32 partials that a reduction adds in a fixed order: results are
deterministic. z and h stay float32; where they feed a 16-bit dot they are scaled by a power of two if need be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.errors import UnsupportedCase
from kernels.common.triton_ops import precision, reduce_partials, to_operand
from kernels.common.views import cdiv, rows, sm_count

MAX_RANK = 256
# From here on summing h's partials once costs less than each column strip of programs summing them again.
REDUCE_H_FROM = 2048


@dataclass(frozen=True)
class Merge:
    """Launch of the merge: a program writes `steps` tiles of ΔW, one below the other."""

    block_o: int
    block_i: int
    steps: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Pair:
    """Launch of the merge's backward on small G: row programs of `block_m`, column programs of `block_n`."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Dual:
    """Launch of `dual`: a program walks `span` rows of G, `block_m` at a time, over `block_n` columns."""

    block_m: int
    block_n: int
    span: int
    num_warps: int
    num_stages: int


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


@triton.jit
def _merge_kernel(
    up, down, base, out, n_o, n_i, n_r, scale,
    stride_uo, stride_ur, stride_dr, stride_di, stride_bo,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, STEPS: tl.constexpr,
    HAS_BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program keeps its tile of `down` and walks STEPS tiles down a strip of ΔW."""
    pid = tl.program_id(0)
    tiles_i = tl.cdiv(n_i, BLOCK_I)
    offs_i = (pid % tiles_i) * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_r = tl.arange(0, BLOCK_R)
    mask_i, mask_r = offs_i < n_i, offs_r < n_r
    d = tl.load(
        down + offs_r.to(tl.int64)[:, None] * stride_dr + offs_i[None, :] * stride_di,
        mask=mask_r[:, None] & mask_i[None, :],
        other=0.0,
    )
    start = (pid // tiles_i) * BLOCK_O * STEPS
    for step in range(STEPS):
        offs_o = start + step * BLOCK_O + tl.arange(0, BLOCK_O)
        mask_o = offs_o < n_o
        rows_o = offs_o.to(tl.int64)[:, None]
        u = tl.load(
            up + rows_o * stride_uo + offs_r[None, :] * stride_ur, mask=mask_o[:, None] & mask_r[None, :], other=0.0
        )
        mask = mask_o[:, None] & mask_i[None, :]
        value = tl.dot(u, d, input_precision=PRECISION) * scale
        if HAS_BASE:
            value += tl.load(base + rows_o * stride_bo + offs_i[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + rows_o * n_i + offs_i[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _pair_kernel(
    g, right, left, out_right, out_left, n_m, n_n, n_r, scale, programs_right,
    stride_gm, stride_rn, stride_rr, stride_lm, stride_lr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_right[M, R] = scale · G @ right and out_left[R, N] = scale · leftᵀ @ G, whole sums in one launch.

    The first programs walk rows of G and the others columns, so G is read twice, the second time from L2.
    """
    pid = tl.program_id(0)
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < n_r
    if pid < programs_right:
        offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < n_m
        rows_m = offs_m.to(tl.int64)[:, None]
        sums = _down_rows(
            g, right, rows_m, mask_m, offs_r, mask_r, 0, n_n, stride_gm, stride_rr, stride_rn,
            BLOCK_M, BLOCK_K, BLOCK_R, PRECISION,
        )  # fmt: skip
        at = out_right + rows_m * n_r + offs_r[None, :]
        tl.store(at, (sums * scale).to(out_right.dtype.element_ty), mask=mask_m[:, None] & mask_r[None, :])
    else:
        offs_n = (pid - programs_right) * BLOCK_N + tl.arange(0, BLOCK_N)
        _pair_columns(
            g, left, out_left, offs_n, offs_r, mask_r, n_m, n_n, scale, stride_gm, stride_lm, stride_lr,
            BLOCK_N, BLOCK_K, BLOCK_R, PRECISION,
        )  # fmt: skip


@triton.jit
def _pair_columns(
    g, left, out, offs_n, offs_r, mask_r, n_m, n_n, scale, stride_gm, stride_lm, stride_lr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[:, offs_n] = scale · leftᵀ @ G[:, offs_n]."""
    mask_n = offs_n < n_n
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for m in range(0, n_m, BLOCK_K):
        offs_m = m + tl.arange(0, BLOCK_K)
        mask_m = offs_m < n_m
        rows_m = offs_m.to(tl.int64)
        l = tl.load(
            left + rows_m[None, :] * stride_lm + offs_r[:, None] * stride_lr,
            mask=mask_r[:, None] & mask_m[None, :],
            other=0.0,
        )
        tile = tl.load(
            g + rows_m[:, None] * stride_gm + offs_n[None, :], mask=mask_m[:, None] & mask_n[None, :], other=0.0
        )
        acc = tl.dot(l, tile, acc, input_precision=PRECISION)
    at = out + offs_r.to(tl.int64)[:, None] * n_n + offs_n[None, :]
    tl.store(at, (acc * scale).to(out.dtype.element_ty), mask=mask_r[:, None] & mask_n[None, :])


@triton.jit
def _dual_kernel(
    g, right, left, right_parts, left_parts, n_m, n_n, n_r, span,
    stride_gm, stride_rn, stride_rr, stride_lm, stride_lr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    NEED_RIGHT: tl.constexpr, NEED_LEFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """right_parts[n, M, R] = G[:, n] @ right[n] and left_parts[m, R, N] = left[m]ᵀ @ G[m], with G[M, N] read once."""
    pid_n, pid_m = tl.program_id(0), tl.program_id(1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    mask_n, mask_r = offs_n < n_n, offs_r < n_r
    dtype = g.dtype.element_ty
    start = pid_m * span
    stop = tl.minimum(start + span, n_m)
    if NEED_RIGHT:
        r = tl.load(
            right + offs_n.to(tl.int64)[:, None] * stride_rn + offs_r[None, :] * stride_rr,
            mask=mask_n[:, None] & mask_r[None, :],
            other=0.0,
        )
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for m in range(start, stop, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < stop
        rows_m = offs_m.to(tl.int64)
        tile = tl.load(
            g + rows_m[:, None] * stride_gm + offs_n[None, :], mask=mask_m[:, None] & mask_n[None, :], other=0.0
        )
        mask_mr = mask_m[:, None] & mask_r[None, :]
        if NEED_RIGHT:
            at = (pid_n * n_m + rows_m[:, None]) * n_r + offs_r[None, :]
            tl.store(right_parts + at, tl.dot(tile, r, input_precision=PRECISION), mask=mask_mr)
        if NEED_LEFT:
            l = tl.load(left + rows_m[:, None] * stride_lm + offs_r[None, :] * stride_lr, mask=mask_mr, other=0.0)
            if l.dtype == dtype:
                acc = tl.dot(tl.trans(l), tile, acc, input_precision=PRECISION)
            else:
                operand, factor = to_operand(l, dtype)
                acc += tl.dot(tl.trans(operand), tile, input_precision=PRECISION) * factor
    if NEED_LEFT:
        at = (pid_m * n_r + offs_r.to(tl.int64)[:, None]) * n_n + offs_n[None, :]
        tl.store(left_parts + at, acc, mask=mask_r[:, None] & mask_n[None, :])


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
    acc = _down_rows(
        x, down, rows_t, mask_t, offs_r, mask_r, start, tl.minimum(start + span, n_i), stride_xt, stride_dr, stride_di,
        BLOCK_T, BLOCK_I, BLOCK_R, PRECISION,
    )  # fmt: skip
    tl.store(parts + (pid_s * n_t + rows_t) * n_r + offs_r[None, :], acc, mask=mask_t[:, None] & mask_r[None, :])


@triton.jit
def _down_rows(
    x, down, rows_t, mask_t, offs_r, mask_r, start, stop, stride_xt, stride_dr, stride_di,
    BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x[rows, start:stop] @ down[:, start:stop]ᵀ in float32."""
    acc = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for i in range(start, stop, BLOCK_I):
        offs_i = i + tl.arange(0, BLOCK_I)
        mask_i = offs_i < stop
        a = tl.load(x + rows_t * stride_xt + offs_i[None, :], mask=mask_t[:, None] & mask_i[None, :], other=0.0)
        b = tl.load(
            down + offs_r.to(tl.int64)[None, :] * stride_dr + offs_i.to(tl.int64)[:, None] * stride_di,
            mask=mask_i[:, None] & mask_r[None, :],
            other=0.0,
        )
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


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
    operand, factor = to_operand(acc, up.dtype.element_ty)
    _up_tile(
        operand, factor * scale, up, base, out, rows_t, mask_t, offs_o, n_o, offs_r, mask_r,
        stride_uo, stride_ur, stride_bt, HAS_BASE, PRECISION,
    )  # fmt: skip


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
    acc = _down_rows(
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


@triton.jit
def _down_backward_kernel(
    h_parts, x, down, grad_x, down_parts, n_t, n_i, n_r, span, scale, stride_xt, stride_dr, stride_di,
    SPLITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr,
    NEED_X: tl.constexpr, NEED_DOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x = scale · h @ down and down_parts[t, R, I] = h[t]ᵀ @ x[t], with h = Σ_s h_parts[s] and x read once."""
    pid_i, pid_t = tl.program_id(0), tl.program_id(1)
    offs_i = pid_i * BLOCK_I + tl.arange(0, BLOCK_I)
    offs_r = tl.arange(0, BLOCK_R)
    mask_i, mask_r = offs_i < n_i, offs_r < n_r
    dtype = down.dtype.element_ty
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
        operand, factor = to_operand(h, dtype)
        if NEED_X:
            value = tl.dot(operand, d, input_precision=PRECISION) * (factor * scale)
            tl.store(grad_x + rows_t * n_i + offs_i[None, :], value.to(grad_x.dtype.element_ty), mask=mask)
        if NEED_DOWN:
            acc += tl.dot(tl.trans(operand), tile, input_precision=PRECISION) * factor
    if NEED_DOWN:
        at = (pid_t * n_r + offs_r.to(tl.int64)[:, None]) * n_i + offs_i[None, :]
        tl.store(down_parts + at, acc, mask=mask_r[:, None] & mask_i[None, :])


def merge_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> Merge:
    """The merge's tiles, as measured on an H200.

    Up to rank 16 the write is all that counts. Above, tiles read as many bytes of the factors as they write: programs
    keep their `down` and walk (12288×3072, rank 64: 23.9 µs with 4 steps, 30.3 with 1).
    """
    size = n_o * n_i
    if dtype is torch.float32 or n_r > 64:
        return Merge(32, 64, 1, 4, 2)
    if n_r <= 16:
        return Merge(32, 128, 1, 4 if size > 1 << 20 else 8, 2)
    if size <= 1 << 21:
        return Merge(64, 64, 1, 8, 2)
    return Merge(64, 128, 2 if size < 1 << 24 else 4, 8, 3)


def merge_backward_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> Dual | Pair:
    """One launch that reads G twice where the second read comes from L2, one pass and a reduction elsewhere.

    Measured on an H200 (rank 64): 640×640 3.7 µs against 5.4, 4096×4096 17.3 against 24.3. Ranks under 8 load `down`
    too narrowly for it (3072×3072, rank 4: 20.6 µs against 11.8), and on a tall G its few columns of programs are late.
    """
    size = n_o * n_i
    if dtype is torch.float32 or n_r > 64 or n_r < 8 or size > 1 << 24 or n_o > 2 * n_i:
        return dual_config(n_o, n_i, n_r, dtype, sms)
    if n_r <= 16:
        if size <= 1 << 19:
            return Pair(32, 16, 128, 2, 4)
        return Pair(32, 16, 256, 4, 4) if size <= 1 << 21 else Pair(64, 64, 256, 4, 4)
    if size <= 1 << 19:
        return Pair(16, 32, 128, 4, 4)
    return Pair(64, 32, 128, 4, 4) if size <= 1 << 23 else Pair(64, 64, 128, 4, 4)


def dual_config(n_m: int, n_n: int, n_r: int, dtype: torch.dtype, sms: int) -> Dual:
    """`dual`'s strip: wide and long enough to keep the partials small against G, while every SM has a program."""
    rank = triton.next_power_of_2(max(n_r, 16))
    if dtype is torch.float32 or rank > 64:
        block_m, block_n, warps, waves = 16, 64 if rank <= 32 else 32, 4, 2
    elif n_m * n_n <= 1 << 19:
        block_m, block_n, warps, waves = 64, 64, 8, 1
    elif n_m * n_n <= 1 << 23 and n_n < 4096:
        block_m, block_n, warps, waves = 64, 128, 4, 2 if rank <= 16 else 1
    else:
        block_m, block_n, warps, waves = 64, 256, 4 if rank <= 16 else 8, 2 if rank <= 16 else 1
    spans = max(1, waves * sms // cdiv(n_n, block_n))
    span = cdiv(cdiv(n_m, spans), block_m) * block_m
    return Dual(block_m, block_n, span, warps, 3)


def bypass_config(n_t: int, n_i: int, n_o: int, n_r: int, dtype: torch.dtype, sms: int) -> Bypass:
    """Two launches that split I while tokens alone don't fill the SMs, one fused launch once they do."""
    if dtype is torch.float32 or n_r > 64:
        span = cdiv(cdiv(n_i, max(1, min(cdiv(n_i, 32), sms // cdiv(n_t, 16)))), 32) * 32
        return Bypass(Down(16, 32, span, 4, 3), Up(16, 64, 4), False)
    if n_t >= 24 * sms:
        wide = n_t < 64 * sms
        return Bypass(Down(32 if wide else 64, 256 if wide else 128, n_i, 4, 4 if wide else 3), Up(32, 256 if wide else 128, 4), True)
    if n_t <= 256:
        return Bypass(Down(16, 128, 256, 4, 4), Up(16, 128, 4), False)
    return Bypass(Down(64, 128, 384, 4, 4), Up(32, 128, 4), False)


def _rank_block(op: str, n_r: int) -> int:
    if n_r > MAX_RANK:
        raise UnsupportedCase(f"{op}: rank {n_r} is above {MAX_RANK}, the most that the Triton kernels hold in a tile")
    return max(16, triton.next_power_of_2(n_r))


def merge_forward(
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Merge | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[O, I]; saves nothing."""
    (n_o, n_r), n_i = up.shape, down.shape[1]
    config = config or merge_config(n_o, n_i, n_r, up.dtype, sm_count(up.device))
    out = torch.empty((n_o, n_i), dtype=out_dtype, device=up.device)
    bias = None if base is None else rows(base)
    _merge_kernel[(cdiv(n_o, config.block_o * config.steps) * cdiv(n_i, config.block_i),)](
        up, down, bias, out, n_o, n_i, n_r, scale, *up.stride(), *down.stride(), 0 if bias is None else bias.stride(0),
        config.block_o, config.block_i, _rank_block("lora", n_r), config.steps, bias is not None, precision(up.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, ()


def merge_backward(
    grad: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: Dual | Pair | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_up[O, R], grad_down[R, I])."""
    need_up, need_down = needs
    g = rows(grad)
    (n_o, n_i), n_r = g.shape, up.shape[1]
    config = config or merge_backward_config(n_o, n_i, n_r, up.dtype, sm_count(up.device))
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device) if need_up else None
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device) if need_down else None
    if isinstance(config, Pair):
        programs = cdiv(n_o, config.block_m) if need_up else 0
        total = programs + (cdiv(n_i, config.block_n) if need_down else 0)
        _pair_kernel[(total,)](
            g, down, up, grad_up, grad_down, n_o, n_i, n_r, scale, programs,
            g.stride(0), down.stride(1), down.stride(0), *up.stride(),
            config.block_m, config.block_n, config.block_k, _rank_block("lora", n_r), precision(up.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return grad_up, grad_down
    right_parts, left_parts = dual("lora", g, down.T, up, need_up, need_down, config)
    reduce_partials((right_parts, left_parts), (grad_up, grad_down), (scale, scale), (False, False))
    return grad_up, grad_down


def dual(
    op: str, g: Tensor, right: Tensor, left: Tensor, need_right: bool, need_left: bool, config: Dual | None
) -> tuple[Tensor | None, Tensor | None]:
    """Partials of g[M, N] @ right[N, R] as float32 [S, M, R], and of left[M, R]ᵀ @ g as float32 [S', R, N]."""
    (n_m, n_n), n_r = g.shape, right.shape[1]
    config = config or dual_config(n_m, n_n, n_r, g.dtype, sm_count(g.device))
    strips, spans = cdiv(n_n, config.block_n), cdiv(n_m, config.span)
    right_parts = g.new_empty((strips, n_m, n_r), dtype=torch.float32) if need_right else None
    left_parts = g.new_empty((spans, n_r, n_n), dtype=torch.float32) if need_left else None
    _dual_kernel[(strips, spans)](
        g, right, left, right_parts, left_parts, n_m, n_n, n_r, config.span,
        g.stride(0), *right.stride(), *left.stride(),
        config.block_m, config.block_n, _rank_block(op, n_r), need_right, need_left, precision(g.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return right_parts, left_parts


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
    block_r, dot = _rank_block("lora_bypass", n_r), precision(x.dtype)
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
    config: tuple[Dual | None, Dual | None] = (None, None),
) -> tuple[Tensor | None, ...]:
    """(grad_x[..., I], grad_up[O, R], grad_down[R, I])."""
    need_x, need_up, need_down = needs
    g, flat = rows(grad), rows(x)
    (n_t, n_i), n_r = flat.shape, down.shape[0]
    need_h = need_x or need_down
    # Without up's gradient nothing reads `left`; `up` stands in for the z that was not saved.
    h_parts, up_parts = dual("lora_bypass", g, up, saved[0] if need_up else up, need_h, need_up, config[0])
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device) if need_up else None
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device) if need_down else None
    down_parts = None
    if h_parts is not None and h_parts.shape[0] > 1 and (n_t >= REDUCE_H_FROM or h_parts.shape[0] > 32):
        h = h_parts.new_empty((1, n_t, n_r))
        reduce_partials((h_parts, up_parts), (h, grad_up), (1.0, scale), (False, True))
        h_parts, up_parts = h, None
    if h_parts is not None:
        launch = config[1] or dual_config(n_t, n_i, n_r, x.dtype, sm_count(x.device))
        spans = cdiv(n_t, launch.span)
        down_parts = x.new_empty((spans, n_r, n_i), dtype=torch.float32) if need_down else None
        _down_backward_kernel[(cdiv(n_i, launch.block_n), spans)](
            h_parts, flat, down, grad_x, down_parts, n_t, n_i, n_r, launch.span, scale,
            flat.stride(0), *down.stride(),
            h_parts.shape[0], launch.block_m, launch.block_n, _rank_block("lora_bypass", n_r), need_x, need_down, precision(x.dtype),
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    reduce_partials((up_parts, down_parts), (grad_up, grad_down), (scale, scale), (True, False))
    return grad_x, grad_up, grad_down
