"""LoKr's bypass in TileLang for factors of any size, by the same steps as kernels.lokr.triton_tiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.tilelang_target import Target, build, dtype_name, target_of
from kernels.common.views import cdiv, power_of_two, sm_count
from kernels.lokr import tilelang_tiled_kernels as kernels
from kernels.lokr.tilelang_factors import Side, side_sizes
from kernels.lokr.tilelang_grads import GradPlan


@dataclass(frozen=True)
class Tiled:
    """Launch of both kernels: block sizes of tokens, a, b, c and d."""

    blocks: tuple[int, int, int, int, int]
    threads: int = 128
    passes: tuple[str, ...] = ("disable_warp_specialized",)


def tiled_config(side1: Side, side2: Side, dtype: torch.dtype, target: Target) -> Tiled:
    """Blocks of at most 64, and as many tokens at once as make tiles of about 4096 elements."""
    if target.cpu:
        return Tiled((2, 16, 16, 32, 32))
    a, b, c, d = (min(64, power_of_two(n, 32)) for n in (side1.rows, side1.cols, side2.rows, side2.cols))
    tokens = max(1, (4096 if dtype is not torch.float32 else 2048) // (max(a, b) * c))
    return Tiled((tokens, a, b, c, d), 128 if max(a, b) * tokens * c <= 4096 else 256)


def apply(
    x: Tensor,
    side1: Side,
    side2: Side,
    scale: float,
    base: Tensor | None,
    out: Tensor,
    transposed: bool = False,
    config: Tiled | None = None,
) -> None:
    """out[T, a, c] = scale · w1 @ x[T, b, d] @ w2ᵀ for each token, plus base; `transposed`: with both factors' transposes."""
    exchanged = side1.rows * side1.cols > side2.rows * side2.cols
    if exchanged:
        side1, side2 = side2, side1
    target = target_of(x)
    axes = side_sizes(target, side1, side2)
    if transposed:
        axes |= {"A": axes["B"], "B": axes["A"], "C": axes["D"], "D": axes["C"]}
    config = config or tiled_config(side1, side2, x.dtype, target)
    t, a, b, c, d = config.blocks
    run = build(
        kernels.apply,
        target,
        **axes,
        transposed=transposed,
        exchanged=exchanged,
        blocks=(t, b, a, d, c) if transposed else config.blocks,
        dtype=dtype_name(x.dtype),
        out_dtype=dtype_name(out.dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        config=config,
    )
    run(x, side1.wa, side1.wb, side2.wa, side2.wb, base, out, scale)


def gradients(
    g: Tensor,
    x: Tensor,
    side1: Side,
    side2: Side,
    scale: float,
    needs: tuple[bool, ...],
    grad_x: Tensor | None,
    config: Tiled | None = None,
) -> tuple[Tensor | None, ...]:
    """Fills grad_x[T, b, d] where given; returns the gradients of both sides' tensors (needs: of x and of these, in order)."""
    if grad_x is not None:
        apply(g, side1, side2, scale, None, grad_x, True, config)
    plan = GradPlan(scale)
    _gradient(plan, g, x, side2, side1, True, needs[1:3], config)
    _gradient(plan, g, x, side1, side2, False, needs[3:5], config)
    return plan.finish()


def _gradient(
    plan: GradPlan,
    g: Tensor,
    x: Tensor,
    side1: Side,
    side2: Side,
    exchanged: bool,
    needs: tuple[bool, ...],
    config: Tiled | None,
) -> None:
    """Adds side2's gradient to the plan; `exchanged`: side2 is w1."""
    target = target_of(x)
    config = config or tiled_config(side1, side2, x.dtype, target)
    tokens, (block_t, _, _, block_c, block_d) = x.shape[0], config.blocks
    steps = cdiv(tokens, block_t)
    tiles = cdiv(side2.rows, block_c) * cdiv(side2.cols, block_d)
    span = cdiv(steps, max(1, min(steps, cdiv(2 * sm_count(x.device), tiles)))) * block_t
    parts, scale = plan.add(side2, cdiv(tokens, span), *needs)
    if parts is None:
        return
    run = build(
        kernels.gradient,
        target,
        **side_sizes(target, side1, side2),
        exchanged=exchanged,
        blocks=config.blocks,
        dtype=dtype_name(x.dtype),
        out_dtype=dtype_name(parts.dtype),
        config=config,
    )
    run(g, x, side1.wa, side1.wb, parts, span, scale)
