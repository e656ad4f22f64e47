"""LoHa's four factor gradients in Triton from ΔW's gradient, which a program walks down in a strip of columns.

    G1 = G ∘ (up2 @ down2):  grad_up1 = scale · G1 @ down1ᵀ,  grad_down1 = scale · up1ᵀ @ G1;  2 likewise

G is read once and both products are made once a tile. A strip is SUBS tiles wide: what it sums for up is written once a
strip and step, what it sums for down stays in registers to the end of the walk. Both go to float32 partials, which a
reduction adds in a fixed order: results are deterministic.

G1 and G2 feed 16-bit dots; both are scaled by a power of two where one of them leaves float16's range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.plans import planned
from kernels.common.triton_ops import dot_add
from kernels.loha.triton_loads import load_down, load_up


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
        acc = dot_add(left, right, acc, PRECISION)
    return acc


@triton.jit
def _operands(value1, value2, dtype: tl.constexpr):
    """Both float32 tiles as operands of `dtype`, and the factor that undoes their scaling (see `to_operand`)."""
    if dtype == tl.float16:
        # One maximum for both: it is a wait for all warps.
        top = tl.minimum(tl.max(tl.maximum(tl.abs(value1), tl.abs(value2))), 1e38)
        exponent = tl.maximum(top, 16384.0).to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * 16384.0
        factor = exponent.to(tl.float32, bitcast=True) * (1.0 / 16384.0)
        return (value1 * inverse).to(dtype), (value2 * inverse).to(dtype), factor
    else:
        return value1.to(dtype), value2.to(dtype), 1.0


@triton.jit
def _add_dot(acc, left, right, factor, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + factor · left @ right."""
    if SCALED:
        return dot_add(left, right, acc, PRECISION, factor)
    else:
        return dot_add(left, right, acc, PRECISION)


@triton.jit
def _tile(
    g, x, rows_o, mask_o, rows_i, mask_i, n_t, stride_g, stride_xt,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, HAS_X: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of ΔW's gradient in float32: of g[O, I], or of gᵀ @ x."""
    if HAS_X:
        tile = _token_tile(
            g, x, rows_o, mask_o, rows_i, mask_i, n_t, stride_g, stride_xt, BLOCK_O, BLOCK_I, BLOCK_T, PRECISION
        )
    else:
        mask = mask_o[:, None] & mask_i[None, :]
        tile = tl.load(g + rows_o[:, None] * stride_g + rows_i[None, :], mask=mask, other=0.0).to(tl.float32)
    return tile


@triton.jit
def _store_downs(
    sums1, sums2, down_parts, part, first_i, n_i, n_r, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, SUBS: tl.constexpr,
    NEED_DOWN1: tl.constexpr, NEED_DOWN2: tl.constexpr,
):  # fmt: skip
    """Writes a strip's sums as down_parts[part, R, I] and, of both, the second one's after the first one's."""
    offs_r = tl.arange(0, BLOCK_R)
    for sub in tl.static_range(SUBS):
        rows_i = first_i + sub * BLOCK_I + tl.arange(0, BLOCK_I)
        mask = (offs_r < n_r)[None, :] & (rows_i < n_i)[:, None]
        if NEED_DOWN1:
            tl.store(down_parts + (part * n_r + offs_r[None, :]) * n_i + rows_i[:, None], sums1[sub], mask=mask)
        if NEED_DOWN2:
            at = down_parts + ((part + NEED_DOWN1) * n_r + offs_r[None, :]) * n_i + rows_i[:, None]
            tl.store(at, sums2[sub], mask=mask)


@planned
@triton.jit
def strips_kernel(
    g, x, up1, down1, up2, down2, up_parts, down_parts, n_t, n_o, n_i, n_r, span, stride_g, stride_xt,
    stride_u1o, stride_u1r, stride_d1r, stride_d1i, stride_u2o, stride_u2r, stride_d2r, stride_d2i,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, SUBS: tl.constexpr,
    HAS_X: tl.constexpr, NEED_UP1: tl.constexpr, NEED_DOWN1: tl.constexpr, NEED_UP2: tl.constexpr,
    NEED_DOWN2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """up_parts[strip, 1 and 2, O, R] and down_parts[span, 1 and 2, R, I], those that are needed.

    ΔW's gradient is g[O, I], read once, or, with x, g[T, O]ᵀ @ x[T, I], made tile by tile and not stored.
    """
    pid_i, pid_s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first_i = pid_i * (BLOCK_I * SUBS)
    offs_r = tl.arange(0, BLOCK_R)
    downs1 = ()
    downs2 = ()
    for sub in tl.static_range(SUBS):
        rows_i = first_i + sub * BLOCK_I + tl.arange(0, BLOCK_I)
        mask_i = rows_i < n_i
        downs1 = downs1 + (load_down(down1, rows_i, mask_i, offs_r, n_r, stride_d1r, stride_d1i),)
        downs2 = downs2 + (load_down(down2, rows_i, mask_i, offs_r, n_r, stride_d2r, stride_d2i),)
    sums1 = ()
    sums2 = ()
    for _ in tl.static_range(SUBS):
        sums1 = sums1 + (tl.zeros((BLOCK_I, BLOCK_R), tl.float32),)
        sums2 = sums2 + (tl.zeros((BLOCK_I, BLOCK_R), tl.float32),)
    up_part = pid_i * (NEED_UP1 + NEED_UP2)
    dtype: tl.constexpr = g.dtype.element_ty
    SCALED: tl.constexpr = dtype == tl.float16
    start = tl.program_id(1) * span
    stop = tl.minimum(start + span, n_o)
    for o in range(start, stop, BLOCK_O):
        offs_o = o + tl.arange(0, BLOCK_O)
        mask_o = offs_o < stop
        rows_o = offs_o.to(tl.int64)
        u1 = load_up(up1, rows_o, mask_o, offs_r, n_r, stride_u1o, stride_u1r)
        u2 = load_up(up2, rows_o, mask_o, offs_r, n_r, stride_u2o, stride_u2r)
        up_sum1 = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
        up_sum2 = tl.zeros((BLOCK_O, BLOCK_R), tl.float32)
        next1 = ()
        next2 = ()
        for sub in tl.static_range(SUBS):
            rows_i = first_i + sub * BLOCK_I + tl.arange(0, BLOCK_I)
            tile = _tile(
                g, x, rows_o, mask_o, rows_i, rows_i < n_i, n_t, stride_g, stride_xt,
                BLOCK_O, BLOCK_I, BLOCK_T, HAS_X, PRECISION,
            )  # fmt: skip
            d1 = downs1[sub]
            d2 = downs2[sub]
            if NEED_UP1 or NEED_DOWN1:
                value1 = tile * tl.dot(u2, d2, input_precision=PRECISION)
            if NEED_UP2 or NEED_DOWN2:
                value2 = tile * tl.dot(u1, d1, input_precision=PRECISION)
            else:
                value2 = value1
            if not (NEED_UP1 or NEED_DOWN1):
                value1 = value2
            grad1, grad2, factor = _operands(value1, value2, dtype)
            if NEED_UP1:
                up_sum1 = _add_dot(up_sum1, grad1, tl.trans(d1), factor, SCALED, PRECISION)
            if NEED_UP2:
                up_sum2 = _add_dot(up_sum2, grad2, tl.trans(d2), factor, SCALED, PRECISION)
            sum1 = sums1[sub]
            sum2 = sums2[sub]
            if NEED_DOWN1:
                sum1 = _add_dot(sum1, tl.trans(grad1), u1, factor, SCALED, PRECISION)
            if NEED_DOWN2:
                sum2 = _add_dot(sum2, tl.trans(grad2), u2, factor, SCALED, PRECISION)
            next1 = next1 + (sum1,)
            next2 = next2 + (sum2,)
        sums1 = next1
        sums2 = next2
        mask = mask_o[:, None] & (offs_r < n_r)[None, :]
        if NEED_UP1:
            tl.store(up_parts + (up_part * n_o + rows_o[:, None]) * n_r + offs_r[None, :], up_sum1, mask=mask)
        if NEED_UP2:
            at = up_parts + ((up_part + NEED_UP1) * n_o + rows_o[:, None]) * n_r + offs_r[None, :]
            tl.store(at, up_sum2, mask=mask)
    part = pid_s * (NEED_DOWN1 + NEED_DOWN2)
    _store_downs(sums1, sums2, down_parts, part, first_i, n_i, n_r, BLOCK_I, BLOCK_R, SUBS, NEED_DOWN1, NEED_DOWN2)
