"""The harness's own Triton kernels: the profiler's delimiters, and streams that measure the memory's ceilings.

Their names are what profile.py looks for, so they are unlike any other kernel's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
# Of short writes: small, so that they begin and end soon, and two stores a thread (with one, programs don't start fast enough).
SHORT = 1024


@triton.jit
def harness_flush_l2(buffer_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(buffer_ptr + offs, mask=offs < n, other=0))
    # The buffer holds zeros, so nothing is stored, but the loads can't be left out.
    if total != 0:
        tl.store(buffer_ptr, total)


@triton.jit
def harness_mark_arm(out_ptr):
    tl.store(out_ptr, 1)


@triton.jit
def _fill(out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.full([BLOCK], 1.0, tl.float32), mask=offs < n)


@triton.jit
def _fill_loaded(a_ptr, out_ptr, n, n_a, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(a_ptr + offs % n_a), mask=offs < n)


@triton.jit
def _read(a_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + pid, tl.sum(tl.load(a_ptr + offs, mask=offs < n, other=0.0)))


@triton.jit
def _copy(a_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(a_ptr + offs, mask=offs < n), mask=offs < n)


@triton.jit
def _triad(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + offs, mask=offs < n)
    b = tl.load(b_ptr + offs, mask=offs < n)
    tl.store(out_ptr + offs, a + 2.0 * b, mask=offs < n)


def _grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, BLOCK),)


def flush(buffer: Tensor) -> None:
    """Reads the int32 buffer of zeros: a flush that wrote would leave an L2 full of lines to write back."""
    harness_flush_l2[_grid(buffer.numel())](buffer, buffer.numel(), BLOCK=BLOCK, num_warps=8)


def mark(buffer: Tensor) -> None:
    """Writes the buffer's first element."""
    harness_mark_arm[(1,)](buffer)


def fill(out: Tensor) -> None:
    """out = 1, float32."""
    _fill[_grid(out.numel())](out, out.numel(), BLOCK=BLOCK, num_warps=8)


def fill_short(out: Tensor, a: Tensor | None = None) -> None:
    """out = 1, float32, in small programs; given `a`, out = a over and over, of which a program first loads what it writes."""
    grid, n = (triton.cdiv(out.numel(), SHORT),), out.numel()
    if a is None:
        _fill[grid](out, n, BLOCK=SHORT, num_warps=4)
    else:
        _fill_loaded[grid](a, out, n, a.numel(), BLOCK=SHORT, num_warps=4)


def read(a: Tensor, partial: Tensor) -> None:
    """partial[i] = sum of the i-th block of a, float32."""
    _read[_grid(a.numel())](a, partial, a.numel(), BLOCK=BLOCK, num_warps=8)


def partials(a: Tensor) -> Tensor:
    """The buffer that `read` wants."""
    return torch.empty(_grid(a.numel()), device=a.device)


def copy(out: Tensor, a: Tensor) -> None:
    """out = a, float32."""
    _copy[_grid(a.numel())](a, out, a.numel(), BLOCK=BLOCK, num_warps=8)


def triad(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a + 2 b, float32."""
    _triad[_grid(a.numel())](a, b, out, a.numel(), BLOCK=BLOCK, num_warps=8)
