"""LoKr's bypass in TileLang, by the same steps as in Triton; kernels.lokr.tilelang_tiled has the factors that don't fit on an SM.

forward   Y = scale · (w1 X) w2ᵀ for each token, with X the token as [b, d] and Y as [a, c]
backward  P = w1ᵀ G,  grad_X = scale · P w2,  grad_w2 = scale · Σ_t Pᵀ X
          Z = X w2ᵀ,                          grad_w1 = scale · Σ_t G Zᵀ        X and G read once, then one reduction
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.common.tilelang_target import Target, build, dtype_name, folded, ready, ready_base, target_of
from kernels.common.views import cdiv, power_of_two, rounded_up, rows, sm_count
from kernels.lokr import tilelang_bypass_kernels as kernels
from kernels.lokr import tilelang_tiled
from kernels.lokr.tilelang_factors import Side, side, side_sizes
from kernels.lokr.tilelang_grads import GradPlan

Blocks = tuple[int, int, int, int]


@dataclass(frozen=True)
class Forward:
    """Launch of the forward: at most `per_sm` blocks an SM walk over tokens; where none `walks`, a block makes one."""

    per_sm: int
    walks: bool = True
    swizzled: bool = True
    threads: int = 128
    passes: tuple[str, ...] = ("disable_warp_specialized", "disable_tma_lower")


@dataclass(frozen=True)
class Backward:
    """Launch of the backward's walk over tokens: `span` of them a block."""

    span: int
    threads: int = 128
    stages: int = 2
    passes: tuple[str, ...] = ("disable_warp_specialized",)


def resident_blocks(side1: Side, side2: Side, itemsize: int, target: Target) -> Blocks | None:
    """Tiles that hold both factors (a, b, c, d), or None where a token or a factor is too large to be one tile."""
    sizes = (side1.rows, side1.cols, side2.rows, side2.cols)
    if target.cpu:
        return (64, 64, 64, 64) if max(sizes) <= 64 else None
    a, b, c, d = (power_of_two(n, 32) for n in sizes)
    return (a, b, c, d) if max(a * b, c * d, b * d, a * c, b * c) * itemsize <= 16384 else None


def _pair_elements(side: Side, rows: int, cols: int, target: Target) -> int:
    """Elements of the tiles that a pair is multiplied out from."""
    return side.block_r(target) * (rows + cols)


def forward_config(
    side1: Side, side2: Side, blocks: Blocks, itemsize: int, tokens: int, sms: int, target: Target
) -> Forward | None:
    """The forward's launch, or None where a block's shared memory can't hold its tiles."""
    a, b, c, d = blocks
    held = a * b + c * d + b * d + a * d + a * c
    held += _pair_elements(side1, a, b, target) + _pair_elements(side2, c, d, target)
    if not target.cpu and held * itemsize + 1024 > target.shared_bytes:
        return None
    return Forward(4, tokens > 4 * sms)


def backward_config(
    side1: Side, side2: Side, blocks: Blocks, itemsize: int, tokens: int, sms: int, target: Target
) -> Backward | None:
    """The backward's launch: two blocks an SM. None where a block's shared memory can't hold its tiles."""
    a, b, c, d = blocks
    span = _span(tokens, 2 * sms)
    held = a * b + c * d + 2 * b * c + b * d
    held += _pair_elements(side1, a, b, target) + _pair_elements(side2, c, d, target)
    return _fitting(Backward(span, 128, min(2, span)), held * itemsize, (a * c + b * d) * itemsize, target)


def _fitting(config: Backward, held: int, stage: int, target: Target) -> Backward | None:
    """`config` with as many stages of `stage` bytes as fit beside the `held` ones, or None where not even one does."""
    if target.cpu:
        return config
    stages = min(config.stages, (target.shared_bytes - held - 1024) // stage)
    return replace(config, stages=stages) if stages > 0 else None


def _span(tokens: int, blocks: int) -> int:
    """Tokens a block, so that there are at most `blocks`."""
    return rounded_up(cdiv(tokens, blocks))


def bypass_forward(
    x: Tensor,
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Forward | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y[..., a·c]; saves nothing."""
    side1, side2, target = _sides(x, w1, w1_b, w2, w2_b)
    flat = ready(rows(x))
    out = torch.empty((*x.shape[:-1], side1.rows * side2.rows), dtype=out_dtype, device=x.device)
    y = out.view(len(flat), -1)
    bias = None if base is None else ready_base(rows(base), target)
    blocks = resident_blocks(side1, side2, x.itemsize, target)
    if blocks is not None and config is None:
        config = forward_config(side1, side2, blocks, x.itemsize, len(flat), sm_count(x.device), target)
    x_shape, shape = (-1, side1.cols, side2.cols), (-1, side1.rows, side2.rows)
    if blocks is None or config is None:
        bias = None if bias is None else bias.view(shape)
        tilelang_tiled.apply(flat.view(x_shape), side1, side2, scale, bias, y.view(shape))
        return out, ()
    run = build(
        kernels.forward,
        target,
        **side_sizes(target, side1, side2),
        blocks=blocks,
        dtype=dtype_name(x.dtype),
        out_dtype=dtype_name(out_dtype),
        base_dtype=None if bias is None else dtype_name(bias.dtype),
        config=config,
    )
    programs = min(len(flat), config.per_sm * sm_count(x.device)) if config.walks else len(flat)
    given, added, written = folded(flat, x_shape, target), folded(bias, shape, target), folded(y, shape, target)
    run(given, side1.wa, side1.wb, side2.wa, side2.wb, added, written, scale, programs)
    return out, ()


def bypass_backward(
    grad: Tensor,
    x: Tensor,
    w1: Tensor,
    w1_b: Tensor | None,
    w2: Tensor,
    w2_b: Tensor | None,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: Backward | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of (x, w1, w1_b, w2, w2_b)."""
    side1, side2, target = _sides(x, w1, w1_b, w2, w2_b)
    flat = ready(rows(x)).view(-1, side1.cols, side2.cols)
    g = ready(rows(grad)).view(-1, side1.rows, side2.rows)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    gx = None if grad_x is None else grad_x.view(flat.shape)
    blocks = resident_blocks(side1, side2, x.itemsize, target)
    if blocks is not None and config is None:
        config = backward_config(side1, side2, blocks, x.itemsize, len(flat), sm_count(x.device), target)
    if blocks is None or config is None:
        return grad_x, *tilelang_tiled.gradients(g, flat, side1, side2, scale, needs, gx)
    programs = cdiv(flat.shape[0], config.span)
    plan = GradPlan(scale)
    parts1, scale1 = plan.add(side1, programs, needs[1], needs[2])
    parts2, scale2 = plan.add(side2, programs, needs[3], needs[4])
    run = build(
        kernels.backward,
        target,
        **side_sizes(target, side1, side2),
        blocks=blocks,
        dtype=dtype_name(x.dtype),
        need_x=gx is not None,
        out1=None if parts1 is None else dtype_name(parts1.dtype),
        out2=None if parts2 is None else dtype_name(parts2.dtype),
        config=config,
    )
    run(g, flat, side1.wa, side1.wb, side2.wa, side2.wb, gx, parts1, parts2, scale, scale1, scale2)
    return grad_x, *plan.finish()


def _sides(x: Tensor, w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None) -> tuple[Side, Side, Target]:
    return side("lokr_bypass", "w1", w1, w1_b), side("lokr_bypass", "w2", w2, w2_b), target_of(x)
