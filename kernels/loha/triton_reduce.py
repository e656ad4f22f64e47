"""The last step of LoHa's backward in Triton: the four factor gradients from their partials, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.common.plans import planned
from kernels.common.triton_ops import _sum_splits
from kernels.common.views import cdiv
from kernels.loha.grads import Grads


@triton.jit
def _reduce(pid, parts, first, second, n_first, size, scale, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """first and, from n_first on, second = scale · Σ_s parts[s], in the order of s."""
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    total = _sum_splits(parts + offs, size, offs < size, SPLITS) * scale
    if first is not None:
        tl.store(first + offs, total.to(first.dtype.element_ty), mask=offs < n_first)
    if second is not None:
        mask = (offs >= n_first) & (offs < size)
        tl.store(second + (offs - n_first), total.to(second.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _reduce_kernel(
    a_parts, a_first, a_second, n_a_first, a_size, b_parts, b_first, b_second, n_b_first, b_size, a_programs, scale,
    A_SPLITS: tl.constexpr, B_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < a_programs:
        _reduce(pid, a_parts, a_first, a_second, n_a_first, a_size, scale, A_SPLITS, BLOCK)
    else:
        _reduce(pid - a_programs, b_parts, b_first, b_second, n_b_first, b_size, scale, B_SPLITS, BLOCK)


def reduce_grads(parts: tuple[Tensor | None, Tensor | None], grads: tuple[Grads, Grads], scale: float) -> None:
    """The gradients of grads[k], where not None, = scale · Σ_s parts[k][s], for ups and downs as `new_grads` makes them."""
    jobs = []
    for part, (first, second) in zip(parts, grads, strict=True):
        if part is not None:
            jobs.append((part, first, second, 0 if first is None else first.numel(), part[0].numel()))
    if not jobs:
        return
    a, b = jobs[0], jobs[-1]
    # A short launch has to be a wide one.
    block, num_warps = (256, 2) if a[4] + b[4] <= 1 << 20 else (1024, 4)
    programs = [cdiv(job[4], block) for job in jobs]
    _reduce_kernel[(sum(programs),)](
        *a, *b, programs[0], scale, a[0].shape[0], b[0].shape[0], block, num_warps=num_warps
    )
