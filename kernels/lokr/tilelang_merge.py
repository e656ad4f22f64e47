"""LoKr's merge in TileLang, by the same steps as in Triton.

forward   ΔW[a·c, b·d] = scale · w1[a, b] · w2[c, d] (+ base)        one launch; ΔW is written once, in order
backward  grad_w1[a, b] = scale · Σ_{c,d} G[a, c, b, d] · w2[c, d]
          grad_w2[c, d] = scale · Σ_{a,b} G[a, c, b, d] · w1[a, b]   G read once, then the sums of partials
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from kernels.common.tilelang_target import Target, build, dtype_name, folded, ready, ready_base, target_of
from kernels.common.views import cdiv, power_of_two, sm_count
from kernels.lokr import tilelang_merge_kernels as kernels
from kernels.lokr.tilelang_factors import Side, side, side_sizes
from kernels.lokr.tilelang_grads import GradPlan

_PLAIN = ("disable_warp_specialized",)


@dataclass(frozen=True)
class Merge:
    """Launch of the forward: a block writes `block_a` × `block_c` rows of ΔW, `block_k` runs of `vec` columns each."""

    block_a: int
    block_c: int
    block_k: int
    vec: int
    threads: int = 128
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class MergeGrad:
    """Launch of the backward: a block's tile of w2 is `block_c` × `block_d`; it walks `span` a's over `block_b` b's."""

    block_c: int
    block_b: int
    block_d: int
    span: int
    threads: int = 128
    stages: int = 2
    passes: tuple[str, ...] = _PLAIN


def merge_config(side1: Side, side2: Side, itemsize: int, target: Target) -> Merge:
    """The forward's launch for an output of `itemsize` bytes an element."""
    if target.cpu:
        return Merge(4, 4, 32, 1)
    vec = gcd(side2.cols, max(1, 16 // itemsize))
    runs = side1.cols * side2.cols // vec
    if side1.rank or side2.rank:
        return Merge(8 if side1.rank else 1, 16, 16, vec)
    # Two stores of `vec` a thread: with one, the SMs start blocks no faster than they write 3.3 TB/s.
    block_k = min(256, power_of_two(runs))
    return Merge(1, 512 // block_k, block_k, vec, 256)


def merge_grad_config(side1: Side, side2: Side, target: Target, sms: int) -> MergeGrad:
    """The backward's launch: about 4096 elements of G a step, and enough blocks for every SM."""
    if target.cpu:
        return MergeGrad(4, 4, 8, 4)
    block_d = min((128, 64), key=lambda k: cdiv(side2.cols, k) * k) if side2.cols > 64 else 8
    while block_d < min(side2.cols, 64):
        block_d *= 2
    block_b, block_c = 8, 512 // block_d
    blocks = cdiv(side2.rows, block_c) * cdiv(side2.cols, block_d) * cdiv(side1.cols, block_b)
    spans = max(1, min(side1.rows, cdiv(4 * sms, blocks)))
    return MergeGrad(block_c, block_b, block_d, cdiv(side1.rows, spans))


def merge_forward(
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Merge | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[a·c, b·d]; saves nothing."""
    side1, side2 = side("lokr", "w1", w1, w1_b), side("lokr", "w2", w2, w2_b)
    target = target_of(w1)
    out = torch.empty((side1.rows * side2.rows, side1.cols * side2.cols), dtype=out_dtype, device=w1.device)
    shape = (side1.rows, side2.rows, out.shape[1])
    bias = ready_base(base, target)
    run = build(
        kernels.merge,
        target,
        **side_sizes(target, side1, side2),
        dtype=dtype_name(w1.dtype),
        out_dtype=dtype_name(out_dtype),
        base_dtype=None if bias is None else dtype_name(bias.dtype),
        config=config or merge_config(side1, side2, out.itemsize, target),
    )
    run(side1.wa, side1.wb, side2.wa, side2.wb, folded(bias, shape, target), folded(out, shape, target), scale)
    return out, ()


def merge_backward(
    grad: Tensor,
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: MergeGrad | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (w1, w1_b, w2, w2_b)."""
    side1, side2 = side("lokr", "w1", w1, w1_b), side("lokr", "w2", w2, w2_b)
    target = target_of(w1)
    config = config or merge_grad_config(side1, side2, target, sm_count(w1.device))
    plan = GradPlan(scale)
    tiles = cdiv(side2.rows, config.block_c) * cdiv(side2.cols, config.block_d)
    parts1, scale1 = plan.add(side1, tiles, needs[0], needs[1])
    splits = cdiv(side1.rows, config.span) * cdiv(side1.cols, config.block_b)
    parts2, scale2 = plan.add(side2, splits, needs[2], needs[3])
    run = build(
        kernels.merge_grad,
        target,
        **side_sizes(target, side1, side2),
        dtype=dtype_name(w1.dtype),
        out1=None if parts1 is None else dtype_name(parts1.dtype),
        out2=None if parts2 is None else dtype_name(parts2.dtype),
        config=config,
    )
    g = ready(grad).view(side1.rows, side2.rows, side1.cols, side2.cols)
    first = (None, None) if parts2 is None else (side1.wa, side1.wb)
    second = (None, None) if parts1 is None else (side2.wa, side2.wb)
    run(g, *first, *second, parts1, parts2, scale1, scale2)
    return plan.finish()
