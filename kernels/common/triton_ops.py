"""Triton pieces that several families share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.backends import allow_tf32
from kernels.common.views import cdiv


@triton.jit
def to_operand(value, dtype: tl.constexpr):
    """A float32 tile as a tensor-core operand of `dtype` and the factor that undoes its scaling.

    float16 tiles whose largest value passes 2^14 are scaled by a power of two, so that nothing finite
    becomes inf (cases where x @ downᵀ leaves float16's range but the result does not); others are just cast.
    """
    if dtype == tl.float16:
        top = tl.minimum(tl.max(tl.max(tl.abs(value), axis=1), axis=0), 1e38)
        exponent = tl.where(top > 16384.0, top, 16384.0).to(tl.int32, bitcast=True) & 0x7F800000
        inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * 16384.0
        factor = exponent.to(tl.float32, bitcast=True) * (1.0 / 16384.0)
        return (value * inverse).to(dtype), factor
    else:
        return value.to(dtype), 1.0


@triton.jit
def _reduce_kernel(
    a_parts, a_out, a_splits, a_rows, a_cols, b_parts, b_out, b_splits, b_rows, b_cols, a_programs, scale,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < a_programs:
        _reduce_tile(pid, a_parts, a_out, a_splits, a_rows, a_cols, scale, A_TRANSPOSED, BLOCK_M, BLOCK_N)
    else:
        _reduce_tile(pid - a_programs, b_parts, b_out, b_splits, b_rows, b_cols, scale, B_TRANSPOSED, BLOCK_M, BLOCK_N)


@triton.jit
def _reduce_tile(
    pid, parts, out, splits, n_rows, n_cols, scale,
    TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[m, n] (or out[n, m]) = scale · Σ_s parts[s, m, n], in the order of s."""
    tiles_n = tl.cdiv(n_cols, BLOCK_N)
    offs_m = (pid // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < n_rows)[:, None] & (offs_n < n_cols)[None, :]
    at = offs_m[:, None].to(tl.int64) * n_cols + offs_n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(splits):
        acc += tl.load(parts + at, mask=mask, other=0.0)
        parts += n_rows * n_cols
    acc = acc * scale
    if TRANSPOSED:
        at = offs_n[:, None].to(tl.int64) * n_rows + offs_m[None, :]
        mask = (offs_n < n_cols)[:, None] & (offs_m < n_rows)[None, :]
        acc = tl.trans(acc)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of a dot: full float32 products unless PyTorch's TF32 switch is on (16-bit types ignore it)."""
    return "tf32" if dtype is torch.float32 and allow_tf32() else "ieee"


def reduce_partials(
    parts: tuple[Tensor | None, ...], outs: tuple[Tensor | None, ...], scale: float, transposed: tuple[bool, bool]
) -> None:
    """outs[k] = scale · Σ_s parts[k][s] for the one or two k that are not None, in one launch and in a fixed order.

    parts[k]: float32 [S, M, N], contiguous. outs[k]: contiguous, [M, N], or [N, M] where transposed[k].
    """
    jobs = [(p, o, t) for p, o, t in zip(parts, outs, transposed, strict=True) if p is not None and o is not None]
    if not jobs:
        return
    # One program per few thousand sums: these arrays are small, and the launch has to be wide to be short.
    widest = max(p.shape[1] * p.shape[2] for p, _, _ in jobs)
    block_m, block_n = (16, 64) if widest >= 1 << 17 else (8, 32)
    programs = [cdiv(p.shape[1], block_m) * cdiv(p.shape[2], block_n) for p, _, _ in jobs]
    if len(jobs) == 1:
        jobs, programs = jobs * 2, [*programs, 0]
    (a, a_out, a_t), (b, b_out, b_t) = jobs
    _reduce_kernel[(sum(programs),)](
        a, a_out, *a.shape, b, b_out, *b.shape, programs[0], scale, a_t, b_t, block_m, block_n, num_warps=2
    )
