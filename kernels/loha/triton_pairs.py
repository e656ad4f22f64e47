"""The kernels of LoHa's bypass through pairs of ranks: p = (r, s), P of them (see kernels/loha/pairs.py).

    expand    D[p, i] = down1[r, i] · down2[s, i] and U[p, o] = up1[o, r] · up2[o, s]              one launch
    forward   z[T, P] = x @ Dᵀ (`project`, `combine`),  y = scale · z @ U (`apply`)
    backward  h[T, P] = G @ Uᵀ (`project`, `combine`),  grad_x = scale · h @ D (`apply`)
              grad_U = zᵀ @ G and grad_D = hᵀ @ x, while a tile of them is in registers contracted to
              grad_up1[o, r] = scale · Σ_s grad_U[p, o] · up2[o, s] and likewise (`contract`), then one reduction

float16: D and U are scaled row by row, z and h as a whole, by powers of two that are divided out in float32, so that
nothing finite leaves float16's range. z and h feed `apply` as a sum of two 16-bit numbers, which rounds once less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.plans import planned
from kernels.common.triton_ops import dot_add


@triton.jit
def _power_of_two(top, LOG: tl.constexpr):
    """(1 / f, f) with f the power of two for which `top` / f lies in [2^LOG, 2^(LOG+1)); f = 1 for a top of 0."""
    top = tl.where(top > 0.0, tl.minimum(tl.maximum(top, 1e-30), 1e30), 2.0**LOG)
    exponent = top.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * 2.0**LOG
    return inverse, exponent.to(tl.float32, bitcast=True) * 2.0**-LOG


@triton.jit
def _finite(value):
    """|value| where it is finite, else 0."""
    value = tl.abs(value)
    return tl.where(value < float("inf"), value, 0.0)


@triton.jit
def _load_factor(f, rows_n, mask_n, offs_r, n_r, stride_r, stride_n):
    mask = (offs_r < n_r)[:, None] & mask_n[None, :]
    at = f + offs_r.to(tl.int64)[:, None] * stride_r + rows_n[None, :] * stride_n
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _expand_tile(
    pid, f1, f2, out, factors, n_n, n_r, stride_1r, stride_1n, stride_2r, stride_2n,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out[p, n] = f1[r, n] · f2[s, n] / factors[p]."""
    offs_r = tl.arange(0, RANK)
    factor1 = tl.full((RANK,), 1.0, tl.float32)
    factor2 = tl.full((RANK,), 1.0, tl.float32)
    rows_n = pid.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = rows_n < n_n
    value1 = _load_factor(f1, rows_n, mask_n, offs_r, n_r, stride_1r, stride_1n)
    value2 = _load_factor(f2, rows_n, mask_n, offs_r, n_r, stride_2r, stride_2n)
    if SCALED:
        top1 = tl.zeros((RANK, CHUNK), tl.float32)
        top2 = tl.zeros((RANK, CHUNK), tl.float32)
        for n in range(0, n_n, CHUNK):
            chunk = n + tl.arange(0, CHUNK).to(tl.int64)
            top1 = tl.maximum(top1, _finite(_load_factor(f1, chunk, chunk < n_n, offs_r, n_r, stride_1r, stride_1n)))
            top2 = tl.maximum(top2, _finite(_load_factor(f2, chunk, chunk < n_n, offs_r, n_r, stride_2r, stride_2n)))
        inverse1, factor1 = _power_of_two(tl.max(top1, axis=1), 6)
        inverse2, factor2 = _power_of_two(tl.max(top2, axis=1), 7)
        value1 *= inverse1[:, None]
        value2 *= inverse2[:, None]
    offs_p = tl.arange(0, RANK * RANK)
    pairs = tl.reshape(value1[:, None, :] * value2[None, :, :], (RANK * RANK, BLOCK_N))
    at = offs_p.to(tl.int64)[:, None] * n_n + rows_n[None, :]
    tl.store(out + at, pairs.to(out.dtype.element_ty), mask=mask_n[None, :])
    if pid == 0:
        tl.store(factors + offs_p, tl.reshape(factor1[:, None] * factor2[None, :], (RANK * RANK,)))


@planned
@triton.jit
def expand_kernel(
    down1, down2, up1, up2, d, u, factors, n_i, n_o, n_r, programs,
    stride_d1r, stride_d1i, stride_d2r, stride_d2i, stride_u1o, stride_u1r, stride_u2o, stride_u2r,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, RANK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < programs:
        _expand_tile(
            pid, down1, down2, d, factors, n_i, n_r, stride_d1r, stride_d1i, stride_d2r, stride_d2i,
            BLOCK_N, CHUNK, RANK, SCALED,
        )  # fmt: skip
    else:
        _expand_tile(
            pid - programs, up1, up2, u, factors + RANK * RANK, n_o, n_r,
            stride_u1r, stride_u1o, stride_u2r, stride_u2o, BLOCK_N, CHUNK, RANK, SCALED,
        )  # fmt: skip


@planned
@triton.jit
def project_kernel(
    a, pairs, factors, parts, tops, n_t, n_n, n_p, span, stride_at,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[s, T, P] = (a[:, s] @ pairs[:, s]ᵀ) · both factors[p], and each tile's largest finite |value| in tops."""
    pid_p, pid_t, pid_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_t = offs_t < n_t
    rows_t = offs_t.to(tl.int64)
    rows_p = offs_p.to(tl.int64)
    start = pid_s * span
    stop = tl.minimum(start + span, n_n)
    acc = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    for n in range(start, stop, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < stop
        left = tl.load(
            a + rows_t[:, None] * stride_at + offs_n[None, :], mask=mask_t[:, None] & mask_n[None, :], other=0.0
        )
        right = tl.load(pairs + rows_p[None, :] * n_n + offs_n[:, None], mask=mask_n[:, None], other=0.0)
        acc = dot_add(left, right, acc, PRECISION)
    if SCALED:
        acc *= (tl.load(factors + offs_p) * tl.load(factors + n_p + offs_p))[None, :]
        tile = (pid_s * tl.num_programs(1) + pid_t) * tl.num_programs(0) + pid_p
        tl.store(tops + tile, tl.max(tl.max(_finite(acc), axis=1), axis=0))
    at = (pid_s.to(tl.int64) * n_t + rows_t[:, None]) * n_p + offs_p[None, :]
    tl.store(parts + at, acc, mask=mask_t[:, None])


@planned
@triton.jit
def combine_kernel(
    parts, tops, high, low, factor, splits, tiles, size,
    BLOCK: tl.constexpr, BLOCK_TOPS: tl.constexpr, SCALED: tl.constexpr, NEED_LOW: tl.constexpr,
):  # fmt: skip
    """high + low = Σ_s parts[s] / factor to twice the precision of their dtype, in the order of s."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    value = tl.zeros((BLOCK,), tl.float32)
    for _ in range(splits):
        value += tl.load(parts + at, mask=mask, other=0.0)
        parts += size
    scale = 1.0
    if SCALED:
        top = tl.zeros((BLOCK_TOPS,), tl.float32)
        for k in range(0, tiles, BLOCK_TOPS):
            offs = k + tl.arange(0, BLOCK_TOPS)
            top = tl.maximum(top, tl.load(tops + offs, mask=offs < tiles, other=0.0))
        # No sum of `splits` terms is above their number times the largest.
        inverse, scale = _power_of_two(tl.max(top, axis=0) * splits, 14)
        value *= inverse
    rounded = value.to(high.dtype.element_ty)
    tl.store(high + at, rounded, mask=mask)
    if NEED_LOW:
        rest = value - rounded.to(tl.float32)
        tl.store(low + at, rest.to(low.dtype.element_ty), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(factor, scale)


@planned
@triton.jit
def apply_kernel(
    high, low, factor, pairs, base, out, n_t, n_n, n_p, scale, stride_bt,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_BASE: tl.constexpr, HAS_LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[T, N] = scale · factor · (high + low) @ pairs + base."""
    pid_n, pid_t = tl.program_id(0), tl.program_id(1)
    offs_t = pid_t * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_t, mask_n = offs_t < n_t, offs_n < n_n
    rows_t = offs_t.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for p in range(0, n_p, BLOCK_P):
        offs_p = p + tl.arange(0, BLOCK_P)
        right = tl.load(pairs + offs_p.to(tl.int64)[:, None] * n_n + offs_n[None, :], mask=mask_n[None, :], other=0.0)
        acc = tl.dot(
            tl.load(high + rows_t * n_p + offs_p[None, :], mask=mask_t[:, None], other=0.0), right, acc,
            input_precision=PRECISION,
        )  # fmt: skip
        if HAS_LOW:
            acc = tl.dot(tl.load(low + rows_t * n_p + offs_p[None, :], mask=mask_t[:, None], other=0.0), right, acc)
    value = acc * (scale * tl.load(factor))
    mask = mask_t[:, None] & mask_n[None, :]
    if HAS_BASE:
        value += tl.load(base + rows_t * stride_bt + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows_t * n_n + offs_n[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _contract_tile(
    tile, part, a, z, factor, factors, f1, f2, parts, n_t, n_n, n_r, span, stride_at,
    stride_1r, stride_1n, stride_2r, stride_2n, stride_pr, stride_pn,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr,
    NEED1: tl.constexpr, NEED2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From a tile aᵀ @ z of the pairs' gradient: parts[part, 1] = Σ_s tile · f2 and parts[part, 2] = Σ_r tile · f1."""
    n_p: tl.constexpr = RANK * RANK
    rows_n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = rows_n < n_n
    offs_p = tl.arange(0, n_p)
    start = part * span
    stop = tl.minimum(start + span, n_t)
    acc = tl.zeros((BLOCK_N, n_p), tl.float32)
    for t in range(start, stop, BLOCK_T):
        offs_t = t + tl.arange(0, BLOCK_T)
        mask_t = offs_t < stop
        rows_t = offs_t.to(tl.int64)
        left = tl.load(
            a + rows_t[None, :] * stride_at + rows_n[:, None], mask=mask_n[:, None] & mask_t[None, :], other=0.0
        )
        right = tl.load(z + rows_t[:, None] * n_p + offs_p[None, :], mask=mask_t[:, None], other=0.0)
        acc = dot_add(left, right, acc, PRECISION)
    acc *= (tl.load(factor) / tl.load(factors + offs_p))[None, :]
    grad = tl.reshape(acc, (BLOCK_N, RANK, RANK))
    offs_r = tl.arange(0, RANK)
    at = parts + part.to(tl.int64) * (NEED1 + NEED2) * n_r * n_n
    at += rows_n[:, None] * stride_pn + offs_r.to(tl.int64)[None, :] * stride_pr
    mask = mask_n[:, None] & (offs_r < n_r)[None, :]
    if NEED1:
        value2 = tl.trans(_load_factor(f2, rows_n, mask_n, offs_r, n_r, stride_2r, stride_2n))
        tl.store(at, tl.sum(grad * value2[:, None, :], axis=2), mask=mask)
    if NEED2:
        value1 = tl.trans(_load_factor(f1, rows_n, mask_n, offs_r, n_r, stride_1r, stride_1n))
        at += NEED1 * n_r * n_n
        tl.store(at, tl.sum(grad * value1[:, :, None], axis=1), mask=mask)


@planned
@triton.jit
def contract_kernel(
    g, z, z_factor, x, h, h_factor, factors, up1, up2, down1, down2, up_parts, down_parts,
    n_t, n_o, n_i, n_r, span, up_programs, stride_gt, stride_xt,
    stride_u1o, stride_u1r, stride_d1r, stride_d1i, stride_u2o, stride_u2r, stride_d2r, stride_d2i,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, RANK: tl.constexpr,
    NEED_UP1: tl.constexpr, NEED_DOWN1: tl.constexpr, NEED_UP2: tl.constexpr, NEED_DOWN2: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of up from (g, z) in the first programs of each part, those of down from (x, h) in the others."""
    pid, part = tl.program_id(0), tl.program_id(1)
    if NEED_UP1 or NEED_UP2:
        if pid < up_programs:
            _contract_tile(
                pid, part, g, z, z_factor, factors + RANK * RANK, up1, up2, up_parts, n_t, n_o, n_r, span, stride_gt,
                stride_u1r, stride_u1o, stride_u2r, stride_u2o, 1, n_r,
                BLOCK_T, BLOCK_N, RANK, NEED_UP1, NEED_UP2, PRECISION,
            )  # fmt: skip
    if NEED_DOWN1 or NEED_DOWN2:
        if pid >= up_programs:
            _contract_tile(
                pid - up_programs, part, x, h, h_factor, factors, down1, down2, down_parts, n_t, n_i, n_r, span,
                stride_xt, stride_d1r, stride_d1i, stride_d2r, stride_d2i, n_i, 1,
                BLOCK_T, BLOCK_N, RANK, NEED_DOWN1, NEED_DOWN2, PRECISION,
            )  # fmt: skip
