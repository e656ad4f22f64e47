"""Triton pieces that several families share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.backends import allow_tf32
from kernels.common.plans import planned
from kernels.common.views import cdiv


@triton.jit
def to_operand(value, dtype: tl.constexpr, SCALED: tl.constexpr = False):
    """A float32 tile as a tensor-core operand of `dtype` and the factor that undoes its scaling.

    float16 tiles whose largest value passes 2^14 are scaled by a power of two, so that nothing finite
    becomes inf (cases where x @ downᵀ leaves float16's range but the result does not); others are just cast.
    SCALED treats bfloat16 in the same way: the change to an operand's layout, a trip through shared memory, then comes after
    the cast. Triton 3.6 moves it past a bare cast to the loads: in float32, and once for each of the tiles that were added.
    """
    if dtype == tl.float16 or (SCALED and dtype == tl.bfloat16):
        top = tl.minimum(tl.max(tl.max(tl.abs(value), axis=1), axis=0), 1e38)
        exponent = tl.where(top > 16384.0, top, 16384.0).to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * 16384.0
        factor = exponent.to(tl.float32, bitcast=True) * (1.0 / 16384.0)
        return (value * inverse).to(dtype), factor
    else:
        return value.to(dtype), 1.0


@triton.jit
def to_operand_by_row(value, dtype: tl.constexpr):
    """As `to_operand`, with a factor for each row, [rows, 1]: for a left operand, whose rows are the product's.

    A row lies in one warp, so that no barrier is needed to find its largest value.
    """
    if dtype == tl.float16:
        top = tl.minimum(tl.max(tl.abs(value), axis=1, keep_dims=True), 1e38)
        exponent = tl.where(top > 16384.0, top, 16384.0).to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * 16384.0
        factor = exponent.to(tl.float32, bitcast=True) * (1.0 / 16384.0)
        return (value * inverse).to(dtype), factor
    else:
        return value.to(dtype), 1.0


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr, factor=None):
    """acc + factor · a @ b (factor None: 1), for a step of a long contraction; PRECISION as `precision` gives it.

    Full float32 products are one chain of multiply-adds an element, whose error grows with its length. Each step gets a
    chain of its own here, as in PyTorch's products: Triton turns acc + dot(a, b) into dot(a, b, acc), but leaves an fma be.
    """
    if a.dtype == tl.float32 and PRECISION == "ieee":
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0 if factor is None else factor, acc)
    elif factor is None:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        return acc + tl.dot(a, b, input_precision=PRECISION) * factor


@planned
@triton.jit
def _reduce_kernel(
    a_parts, a_out, a_rows, a_cols, a_scale, b_parts, b_out, b_rows, b_cols, b_scale, a_programs,
    A_SPLITS: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_SPLITS: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < a_programs:
        _reduce(pid, a_parts, a_out, a_rows, a_cols, a_scale, A_SPLITS, A_TRANSPOSED, BLOCK, BLOCK_M, BLOCK_N)
    else:
        pid -= a_programs
        _reduce(pid, b_parts, b_out, b_rows, b_cols, b_scale, B_SPLITS, B_TRANSPOSED, BLOCK, BLOCK_M, BLOCK_N)


@triton.jit
def _reduce(
    pid, parts, out, n_rows, n_cols, scale,
    SPLITS: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[m, n] (out[n, m] where TRANSPOSED) = scale · Σ_s parts[s, m, n], in the order of s."""
    if TRANSPOSED:
        tiles_n = tl.cdiv(n_cols, BLOCK_N)
        offs_m = (pid // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (offs_m < n_rows)[:, None] & (offs_n < n_cols)[None, :]
        at = parts + offs_m[:, None] * n_cols + offs_n[None, :]
        total = tl.trans(_sum_splits(at, n_rows * n_cols, mask, SPLITS)) * scale
        to = offs_n[:, None] * n_rows + offs_m[None, :]
        tl.store(out + to, total.to(out.dtype.element_ty), mask=(offs_n < n_cols)[:, None] & (offs_m < n_rows)[None, :])
    else:
        size = n_rows * n_cols
        offs = pid * BLOCK + tl.arange(0, BLOCK)
        total = _sum_splits(parts + offs, size, offs < size, SPLITS) * scale
        tl.store(out + offs, total.to(out.dtype.element_ty), mask=offs < size)


@triton.jit
def _sum_splits(at, size, mask, SPLITS: tl.constexpr):
    """Σ_s at[s · size]: eight loads in flight at a time, added in the order of s."""
    acc = tl.load(at, mask=mask, other=0.0)
    for _ in tl.static_range((SPLITS - 1) % 8):
        at += size
        acc += tl.load(at, mask=mask, other=0.0)
    for _ in range((SPLITS - 1) // 8):
        for _ in tl.static_range(8):
            at += size
            acc += tl.load(at, mask=mask, other=0.0)
    return acc


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of a dot: full float32 products unless PyTorch's TF32 switch is on (16-bit types ignore it)."""
    return "tf32" if dtype is torch.float32 and allow_tf32() else "ieee"


def reduce_partials(
    parts: tuple[Tensor | None, ...],
    outs: tuple[Tensor | None, ...],
    scales: tuple[float, float],
    transposed: tuple[bool, bool],
) -> None:
    """outs[k] = scales[k] · Σ_s parts[k][s] for the one or two k that are not None, in one launch and a fixed order.

    parts[k]: float32 [S, M, N], contiguous, under 2^31 elements a split. outs[k]: contiguous, M · N elements, as
    [N, M] where transposed[k].
    """
    jobs = [job for job in zip(parts, outs, scales, transposed, strict=True) if job[0] is not None]
    if not jobs:
        return
    # A short launch has to be a wide one: up to a million sums a thread adds four numbers of each partial.
    small = sum(p.shape[1] * p.shape[2] for p, *_ in jobs if p is not None) <= 1 << 20
    block, block_m, block_n, warps = (256, 16, 16, 2) if small else (1024, 16, 64, 4)
    programs = [
        cdiv(p.shape[1], block_m) * cdiv(p.shape[2], block_n) if flip else cdiv(p.shape[1] * p.shape[2], block)
        for p, _, _, flip in jobs
        if p is not None
    ]
    total = sum(programs)
    (a, a_out, a_scale, a_flip), (b, b_out, b_scale, b_flip) = jobs[0], jobs[-1]
    assert a is not None and b is not None
    _reduce_kernel[(total,)](
        a, a_out, a.shape[1], a.shape[2], a_scale, b, b_out, b.shape[1], b.shape[2], b_scale, programs[0],
        a.shape[0], a_flip, b.shape[0], b_flip, block, block_m, block_n, num_warps=warps,
    )  # fmt: skip
