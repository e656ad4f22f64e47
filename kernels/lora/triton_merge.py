"""LoRA's merge in Triton, and the pass over a matrix that its backward and the bypass share.

    ΔW[O, I] = scale · up[O, R] @ down[R, I]                      one launch, a strip of tiles a program
    grad_up = scale · G @ downᵀ, grad_down = scale · upᵀ @ G       G read once (`dual`, then one reduction), or twice
                                                                  in one launch, the second time from L2 (`Pair`)

Sums over more than one program go through float32 partials that a reduction adds in a fixed order: deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.errors import UnsupportedCase
from kernels.common.plans import planned
from kernels.common.triton_ops import dot_add, precision, reduce_partials, to_operand
from kernels.common.views import cdiv, rows, sm_count

MAX_RANK = 256


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


@planned
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


@planned
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
        sums = rows_product(
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
        acc = dot_add(l, tile, acc, PRECISION)
    at = out + offs_r.to(tl.int64)[:, None] * n_n + offs_n[None, :]
    tl.store(at, (acc * scale).to(out.dtype.element_ty), mask=mask_r[:, None] & mask_n[None, :])


@triton.jit
def rows_product(
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
        acc = dot_add(a, b, acc, PRECISION)
    return acc


@planned
@triton.jit
def _dual_kernel(
    g, right, left, right_parts, left_parts, n_m, n_n, n_r, span, left_scale,
    stride_gm, stride_rn, stride_rr, stride_lm, stride_lr, stride_pr, stride_pn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    NEED_RIGHT: tl.constexpr, NEED_LEFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """right_parts[n, M, R] = G[:, n] @ right[n], left_parts[m, R, N] = left_scale · left[m]ᵀ @ G[m]; G[M, N] read once."""
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
                acc = dot_add(tl.trans(l), tile, acc, PRECISION)
            else:
                operand, factor = to_operand(l, dtype, True)
                acc = dot_add(tl.trans(operand), tile, acc, PRECISION, factor)
    if NEED_LEFT:
        part = left_parts + pid_m.to(tl.int64) * n_r * n_n
        at = part + offs_r.to(tl.int64)[:, None] * stride_pr + offs_n.to(tl.int64)[None, :] * stride_pn
        tl.store(at, (acc * left_scale).to(left_parts.dtype.element_ty), mask=mask_r[:, None] & mask_n[None, :])


def merge_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, sms: int) -> Merge:
    """The merge's tiles, as measured on an H200.

    Up to rank 16 the write is all that counts. Above, tiles read as many bytes of the factors as they write: programs
    keep their `down` and walk (12288×3072, rank 64: 23.9 µs with 4 steps, 30.3 with 1).
    """
    size = n_o * n_i
    if dtype is torch.float32 or n_r > 64:
        return Merge(32, 64, 1, 4, 2)
    if n_r <= 16:
        if size >= 1 << 24 and n_r > 8:
            return Merge(64, 128, 4 if size < 1 << 25 else 1, 4, 2)
        return Merge(32, 128, 1, 8 if size <= 1 << 20 or (n_r > 8 and 1 << 21 < size <= 1 << 23) else 4, 2)
    if size <= 1 << 21:
        return Merge(64, 64, 1, 8, 2)
    if size <= 1 << 23:
        return Merge(128, 128, 2, 8, 3)
    if size < 1 << 24:
        return Merge(64, 64, 4, 4, 3)
    return Merge(64, 128, 8 if size < 1 << 25 else 4 if n_i < 4096 else 16, 8, 3)


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


def rank_block(op: str, n_r: int) -> int:
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
        config.block_o, config.block_i, rank_block("lora", n_r), config.steps, bias is not None, precision(up.dtype),
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
            config.block_m, config.block_n, config.block_k, rank_block("lora", n_r), precision(up.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return grad_up, grad_down
    right_parts, left_parts = dual("lora", g, down.T, up, need_up, need_down, config)
    reduce_partials((right_parts, left_parts), (grad_up, grad_down), (scale, scale), (False, False))
    return grad_up, grad_down


def dual(
    op: str,
    g: Tensor,
    right: Tensor,
    left: Tensor,
    need_right: bool,
    need_left: bool,
    config: Dual | None,
    whole: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Partials of g[M, N] @ right[N, R] as float32 [S, M, R], and of left[M, R]ᵀ @ g as float32 [S', R, N].

    Where one span takes all of M, scale times the second is written to `whole`[R, N] instead, and is no partial.
    """
    (n_m, n_n), n_r = g.shape, left.shape[1]
    config = config or dual_config(n_m, n_n, n_r, g.dtype, sm_count(g.device))
    strips, spans = cdiv(n_n, config.block_n), cdiv(n_m, config.span)
    right_parts = g.new_empty((strips, n_m, n_r), dtype=torch.float32) if need_right else None
    whole = whole if spans == 1 else None
    left_parts = g.new_empty((spans, n_r, n_n), dtype=torch.float32) if need_left and whole is None else None
    _dual_kernel[(strips, spans)](
        g, right, left, right_parts, left_parts if whole is None else whole, n_m, n_n, n_r, config.span,
        1.0 if whole is None else scale,
        g.stride(0), *right.stride(), *left.stride(), *((n_n, 1) if whole is None else whole.stride()),
        config.block_m, config.block_n, rank_block(op, n_r), need_right, need_left, precision(g.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return right_parts, left_parts
