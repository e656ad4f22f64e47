"""What LoKr's Triton kernels share: tiles of a factor, full or made from its pair, and the sums of gradient partials.

A side is one factor as kernels take it: two tensors, wa and wb (wa twice where the factor is full), and a compile-time
`layout` (rows, cols, rank, strides of wa, strides of wb), whose rank is 0 where the factor is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import dot_add, precision
from kernels.common.views import cdiv

Layout = tuple[int, ...]


class Side(NamedTuple):
    """A factor [rows, cols]: wa itself, or wa[rows, R] @ wb[R, cols]."""

    wa: Tensor
    wb: Tensor
    layout: Layout

    @property
    def block_r(self) -> int:
        """Steps of a pair's rank: float32 products take short ones, which Triton unrolls into registers."""
        most = 64 if self.wa.itemsize == 2 else 16
        return max(16, min(most, triton.next_power_of_2(self.layout[2])))

    def transposed(self) -> Side:
        """The same factor transposed, as views."""
        rows, cols, rank, *strides = self.layout
        wa, wb = (self.wb, self.wa) if rank else (self.wa, self.wa)
        return Side(wa, wb, (cols, rows, rank, *reversed(strides)))


def side(wa: Tensor, wb: Tensor | None) -> Side:
    """The side of a full factor (wb None) or of a pair."""
    if wb is None:
        return Side(wa, wa, (wa.shape[0], wa.shape[1], 0, *wa.stride(), *wa.stride()))
    return Side(wa, wb, (wa.shape[0], wb.shape[1], wa.shape[1], *wa.stride(), *wb.stride()))


@triton.jit
def factor_tile(
    wa, wb, offs_m, offs_n, mask_m, mask_n, LAYOUT: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr
):
    """factor[offs_m, offs_n], zero where masked: in its own dtype where full, in float32 where made from a pair."""
    R: tl.constexpr = LAYOUT[2]
    rows, cols = offs_m.to(tl.int64), offs_n.to(tl.int64)
    if R == 0:
        at = wa + rows[:, None] * LAYOUT[3] + cols[None, :] * LAYOUT[4]
        return tl.load(at, mask=mask_m[:, None] & mask_n[None, :], other=0.0)
    else:
        acc = tl.zeros((offs_m.shape[0], offs_n.shape[0]), tl.float32)
        for start in range(0, R, BLOCK_R):
            offs_r = start + tl.arange(0, BLOCK_R)
            mask_r = offs_r < R
            left = wa + rows[:, None] * LAYOUT[3] + offs_r[None, :] * LAYOUT[4]
            right = wb + offs_r[:, None] * LAYOUT[5] + cols[None, :] * LAYOUT[6]
            left_tile = tl.load(left, mask=mask_m[:, None] & mask_r[None, :], other=0.0)
            right_tile = tl.load(right, mask=mask_r[:, None] & mask_n[None, :], other=0.0)
            acc = dot_add(left_tile, right_tile, acc, PRECISION)
        return acc


@dataclass(frozen=True)
class Finish:
    """Launch of the sums of partials: `tile` partials at a time, and pair gradients from `block_m` × `block_n` of a factor's."""

    tile: int = 4096
    block_m: int = 64
    block_n: int = 32
    num_warps: int = 8


@triton.jit
def _sum_side(pid, parts, out, splits, scale, LAYOUT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr):
    """out[m, n] = scale · Σ_s parts[s, m, n] for BLOCK elements."""
    SIZE: tl.constexpr = LAYOUT[0] * LAYOUT[1]
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    acc = tl.zeros((BLOCK_S, BLOCK), tl.float32)
    for start in range(0, splits, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        at = parts + offs_s.to(tl.int64)[:, None] * SIZE + offs[None, :]
        acc += tl.load(at, mask=(offs_s < splits)[:, None] & mask[None, :], other=0.0)
    tl.store(out + offs, (tl.sum(acc, axis=0) * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_tile(parts, splits, offs_m, offs_n, LAYOUT: tl.constexpr, BLOCK_S: tl.constexpr):
    """Σ_s parts[s, offs_m, offs_n] as a [BLOCK_M, BLOCK_N] tile."""
    M: tl.constexpr = LAYOUT[0]
    N: tl.constexpr = LAYOUT[1]
    at = parts + offs_m.to(tl.int64)[None, :, None] * N + offs_n[None, None, :]
    mask = (offs_m < M)[None, :, None] & (offs_n < N)[None, None, :]
    acc = tl.zeros((offs_m.shape[0], offs_n.shape[0]), tl.float32)
    # Sums of sums: thousands of partials, two or so at a time, would be a chain whose error shows in float32.
    for first in range(0, splits, 32 * BLOCK_S):
        part = tl.zeros((offs_m.shape[0], offs_n.shape[0]), tl.float32)
        for start in range(first, tl.minimum(first + 32 * BLOCK_S, splits), BLOCK_S):
            offs_s = (start + tl.arange(0, BLOCK_S))[:, None, None]
            terms = tl.load(at + offs_s.to(tl.int64) * (M * N), mask=mask & (offs_s < splits), other=0.0)
            part += tl.sum(terms, axis=0)
        acc += part
    return acc


@triton.jit
def _pair_a(
    pid, parts, wb, out, splits, scale,
    LAYOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[M, R] = scale · (Σ_s parts[s]) @ wbᵀ for a tile of BLOCK_M × BLOCK_R."""
    M: tl.constexpr = LAYOUT[0]
    N: tl.constexpr = LAYOUT[1]
    R: tl.constexpr = LAYOUT[2]
    TILES_R: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    offs_m = pid // TILES_R * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = pid % TILES_R * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        tile = _sum_tile(parts, splits, offs_m, offs_n, LAYOUT, BLOCK_S)
        at = wb + offs_n.to(tl.int64)[:, None] * LAYOUT[6] + offs_r[None, :] * LAYOUT[5]
        w = tl.load(at, mask=(offs_n < N)[:, None] & (offs_r < R)[None, :], other=0.0)
        acc = dot_add(tile, w.to(tl.float32), acc, PRECISION)
    at = out + offs_m.to(tl.int64)[:, None] * R + offs_r[None, :]
    tl.store(at, (acc * scale).to(out.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_r < R)[None, :])


@triton.jit
def _pair_b(
    pid, parts, wa, out, splits, scale,
    LAYOUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[R, N] = scale · waᵀ @ Σ_s parts[s] for a tile of BLOCK_R × BLOCK_N."""
    M: tl.constexpr = LAYOUT[0]
    N: tl.constexpr = LAYOUT[1]
    R: tl.constexpr = LAYOUT[2]
    TILES_R: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    offs_n = pid // TILES_R * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_r = pid % TILES_R * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        tile = _sum_tile(parts, splits, offs_m, offs_n, LAYOUT, BLOCK_S)
        at = wa + offs_m.to(tl.int64)[None, :] * LAYOUT[3] + offs_r[:, None] * LAYOUT[4]
        w = tl.load(at, mask=(offs_m < M)[None, :] & (offs_r < R)[:, None], other=0.0)
        acc = dot_add(w.to(tl.float32), tile, acc, PRECISION)
    at = out + offs_r.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(at, (acc * scale).to(out.dtype.element_ty), mask=(offs_r < R)[:, None] & (offs_n < N)[None, :])


@triton.jit
def _finish_side(
    pid, parts, wa, wb, out_a, out_b, splits, scale, a_programs,
    LAYOUT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if LAYOUT[2] == 0:
        _sum_side(pid, parts, out_a, splits, scale, LAYOUT, BLOCK, BLOCK_S)
    else:
        # A factor whose partner's gradient nobody wants is not read, and None.
        if pid < a_programs:
            if wb is not None:
                _pair_a(pid, parts, wb, out_a, splits, scale, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_S, BLOCK_R, PRECISION)
        else:
            if wa is not None:
                pid_b = pid - a_programs
                _pair_b(pid_b, parts, wa, out_b, splits, scale, LAYOUT, BLOCK_M, BLOCK_N, BLOCK_S, BLOCK_R, PRECISION)


@planned
@triton.jit
def _finish_kernel(
    parts1, wa1, wb1, out1_a, out1_b, splits1, a_programs1, programs1,
    parts2, wa2, wb2, out2_a, out2_b, splits2, a_programs2, scale,
    LAYOUT1: tl.constexpr, BLOCK1: tl.constexpr, BLOCK_S1: tl.constexpr, BLOCK_R1: tl.constexpr,
    LAYOUT2: tl.constexpr, BLOCK2: tl.constexpr, BLOCK_S2: tl.constexpr, BLOCK_R2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both sides' gradients from their partials, in a fixed order; the first programs1 programs do side 1."""
    pid = tl.program_id(0)
    if pid < programs1:
        _finish_side(
            pid, parts1, wa1, wb1, out1_a, out1_b, splits1, scale, a_programs1,
            LAYOUT1, BLOCK1, BLOCK_S1, BLOCK_M, BLOCK_N, BLOCK_R1, PRECISION,
        )  # fmt: skip
    else:
        _finish_side(
            pid - programs1, parts2, wa2, wb2, out2_a, out2_b, splits2, scale, a_programs2,
            LAYOUT2, BLOCK2, BLOCK_S2, BLOCK_M, BLOCK_N, BLOCK_R2, PRECISION,
        )  # fmt: skip


class Partials(NamedTuple):
    """A side's gradient as float32 partials [S, rows, cols], and the gradients to make of them (None: not wanted)."""

    side: Side
    parts: Tensor
    grad_a: Tensor | None
    grad_b: Tensor | None


def finish(jobs: list[Partials], scale: float, config: Finish | None = None) -> None:
    """Fills every job's grad_a and grad_b with scale times the sums of its partials, in one launch."""
    if not jobs:
        return
    config = config or Finish()
    programs = [_programs(job, config) for job in jobs]
    if len(jobs) == 1:
        jobs, programs = jobs * 2, [*programs, (0, 0)]
    first, second = (_arguments(job, a) for job, (a, _) in zip(jobs, programs, strict=True))
    blocks = [(job.side.layout, *_sum_blocks(job, config), job.side.block_r) for job in jobs]
    dtype = jobs[0].side.wa.dtype
    _finish_kernel[(sum(map(sum, programs)),)](
        *first, sum(programs[0]), *second, scale, *blocks[0], *blocks[1], config.block_m, config.block_n,
        # TF32 keeps as many bits of a factor's gradient as float16 would, and all of a 16-bit operand.
        precision(dtype) if dtype is torch.float32 else "tf32",
        num_warps=config.num_warps,
    )  # fmt: skip


def _sum_blocks(job: Partials, config: Finish) -> tuple[int, int]:
    """(BLOCK, BLOCK_S): elements a program sums and partials it takes at once; many partials, few elements."""
    if job.side.layout[2]:
        return config.block_m, max(1, config.tile // (config.block_m * config.block_n))
    splits = triton.next_power_of_2(job.parts.shape[0])
    block = max(8, min(64, config.tile // splits))
    return block, min(splits, config.tile // block)


def _programs(job: Partials, config: Finish) -> tuple[int, int]:
    """Programs for grad_a and for grad_b."""
    rows, cols, rank = job.side.layout[:3]
    if not rank:
        return cdiv(rows * cols, _sum_blocks(job, config)[0]), 0
    tiles_r = cdiv(rank, job.side.block_r)
    return (
        0 if job.grad_a is None else cdiv(rows, config.block_m) * tiles_r,
        0 if job.grad_b is None else cdiv(cols, config.block_n) * tiles_r,
    )


def _arguments(job: Partials, a_programs: int) -> tuple[Tensor | int, ...]:
    grad_a = job.grad_b if job.grad_a is None else job.grad_a
    grad_b = job.grad_a if job.grad_b is None else job.grad_b
    assert grad_a is not None and grad_b is not None
    return job.parts, job.side.wa, job.side.wb, grad_a, grad_b, job.parts.shape[0], a_programs


class GradPlan:
    """The gradients of both sides of a call: where kernels write their partials, and the one reduction that ends it."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.jobs: list[Partials] = []
        self.grads: list[Tensor | None] = []

    def add(self, side: Side, splits: int, need_a: bool, need_b: bool) -> tuple[Tensor | None, float]:
        """Where a kernel writes `splits` partials of this side's gradient, and what it multiplies them by; None: not needed.

        A single partial of a full factor is the gradient itself.
        """
        rows, cols, rank = side.layout[:3]
        grad_a = torch.empty(side.wa.shape, dtype=side.wa.dtype, device=side.wa.device) if need_a else None
        grad_b = torch.empty(side.wb.shape, dtype=side.wb.dtype, device=side.wb.device) if need_b and rank else None
        self.grads += [grad_a, grad_b]
        if grad_a is None and grad_b is None:
            return None, 1.0
        if splits == 1 and not rank:
            return grad_a, self.scale
        parts = torch.empty((splits, rows, cols), dtype=torch.float32, device=side.wa.device)
        self.jobs.append(Partials(side, parts, grad_a, grad_b))
        return parts, 1.0

    def finish(self, config: Finish | None = None) -> tuple[Tensor | None, ...]:
        """Reduces what is left to reduce; the gradients in the order of `add`, two a side."""
        finish(self.jobs, self.scale, config)
        return tuple(self.grads)
