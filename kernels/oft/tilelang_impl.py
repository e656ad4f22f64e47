"""Diag-OFT in TileLang, by the same steps as in Triton; D = R - I, M = D diag(r) + diag(r - 1), or D without rescale.

    merge     ΔW[O, I]: per block Mᵀ W_k                       one launch: a program solves its block and streams its rows
      backward  grad_W: per block M G_k, P_k = W_k G_kᵀ          one launch, W and G read once, and a second that sums P
    bypass    out[T, O]: per block y_k M                       the same over tokens, several blocks a program
      backward  grad_y: per block g_k Mᵀ, P_k = y_kᵀ g_k
                grad_blocks, grad_rescale from P_k: kernels/common/cayley.py

D is solved in float32, kept as [k, s, s] float32 for the backward, and meets 16-bit tensor cores as a sum of two 16-bit
parts: it is never rounded. Sums over more than one program go through float32 partials added in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.cayley import MAX_SCALARS, Gradients, check_size, pad, shrink_factor
from kernels.common.cayley_solve_tilelang import solve
from kernels.common.cayley_tilelang import finish
from kernels.common.tilelang_target import Target, build, dtype_name, ready, ready_base, sizes, target_of
from kernels.common.views import cdiv, rounded_up, rows, sm_count
from kernels.oft import tilelang_bypass, tilelang_merge

# wgmma wants 64 rows a product, and a block has fewer.
_PLAIN = ("disable_warp_specialized", "disable_wgmma")
# A few tiles are stored sooner by their threads than by a TMA copy.
_NO_TMA = (*_PLAIN, "disable_tma_lower")


@dataclass(frozen=True)
class Columns:
    """Launch of a merge kernel: a program takes one block's rows, `block_i` columns at a time.

    tiles: how many such tiles it loads before it works on the first. steps (backward): how many times it does that, 0
    meaning to the last column, with nothing left to sum. stages: tiles in flight where the loop is pipelined instead.
    inline (forward): does each program solve its block itself, which saves a launch but pays only up to a program an SM?
    """

    block_i: int
    threads: int
    tiles: int = 1
    steps: int = 1
    stages: int = 3
    inline: bool = True
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Tokens:
    """Launch of a bypass kernel: a program takes the channels of `blocks` blocks, `block_t` tokens at a time.

    tiles (forward): how many such tiles it loads before it works on the first. steps: how many times it does that, for the
    backward 0 meaning to the last token, with nothing left to sum. stages (backward): tiles in flight on that walk.
    inline (forward): does each program solve its blocks itself, as for a merge? lanes (backward, of one block): how many
    sums of P it has, each over its share of a tile's tokens. swizzled: is the result's tile in shared memory laid out for
    stores by threads? tall: do the warps share out a product's tokens, at least 16 each?
    """

    block_t: int
    blocks: int
    threads: int
    tiles: int = 1
    steps: int = 1
    stages: int = 3
    inline: bool = True
    lanes: int = 1
    swizzled: bool = False
    tall: bool = False
    passes: tuple[str, ...] = _PLAIN


def merge_config(
    n_k: int, size: int, n_i: int, dtype: torch.dtype, target: Target, sms: int, *, backward: bool
) -> Columns:
    """A merge kernel's launch: a few programs for every SM, as long as each has a few tiles of columns."""
    if size <= MAX_SCALARS:
        return Columns(256, 32, tiles=2, steps=0 if backward and n_i <= 2048 else 1)
    width = pad(size)
    if target.cpu:
        return Columns(64, 32, steps=2)
    block_i = 256 if width <= 16 and dtype is not torch.float32 else 64
    if backward:
        # One warp a row of 16 x 16 products: P has no more for others to do.
        block_i, threads = min(block_i, 128), 2 * width
    else:
        threads = 128
    tiles = cdiv(n_i, block_i)
    spans = min(tiles, max(1, cdiv((3 if not backward else 12 * 16 // width) * sms, n_k)))
    if backward:
        return Columns(block_i, threads, steps=cdiv(tiles, spans))
    ahead = min(cdiv(tiles, spans), 5)
    return Columns(block_i, threads, tiles=ahead, inline=n_k * cdiv(tiles, ahead) <= sms)


def bypass_config(
    n_t: int, n_k: int, size: int, dtype: torch.dtype, target: Target, sms: int, *, backward: bool
) -> Tokens:
    """A bypass kernel's launch: rows of 64 channels, and a few programs for every SM, each with tokens enough to fill it."""
    if target.cpu:
        return Tokens(16, max(1, 32 // pad(size)), 32, steps=2 if backward else 1)
    blocks = max(1, 64 // pad(size))
    # A warp's share of a product is at least 16 tokens.
    if not backward and pad(size) == 16 and dtype is not torch.float32:
        few = Tokens(32, 2, 64, swizzled=True, tall=True, passes=_NO_TMA)
        if cdiv(n_k, few.blocks) * cdiv(n_t, few.block_t) <= sms:
            return few
        # One program an SM solves its blocks while up to three tiles are on their way (1024 tokens of 1280 channels on an
        # H200: 5.8 µs, and 6.7 with a launch for the solve).
        spans = sms // cdiv(n_k, blocks)
        tiles = cdiv(n_t, 64 * spans) if spans else 4
        if tiles <= 3:
            return Tokens(64, blocks, 128, tiles=tiles, swizzled=True, tall=True, passes=_NO_TMA)
        return Tokens(64, blocks, 128, tiles=2, inline=False, tall=True)
    if not backward:
        block_t, threads = (32, 64) if n_t <= 256 else (64, 128)
        return Tokens(block_t, blocks, threads, inline=cdiv(n_k, blocks) * cdiv(n_t, block_t) <= sms)
    block_t, threads = (16, 32) if n_t <= 256 else (64, 128)
    tiles = cdiv(n_t, block_t)
    spans = min(tiles, max(1, cdiv(3 * sms, cdiv(n_k, blocks))))
    return Tokens(block_t, blocks, threads, steps=rounded_up(cdiv(tiles, spans)))


def merge_forward(
    blocks: Tensor,
    weight: Tensor,
    rescale: Tensor | None,
    constraint: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Columns | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[O, I]; saves D[k, s, s] in float32 where any gradient will be asked for."""
    (n_k, size, _), (n_o, n_i) = blocks.shape, weight.shape
    check_size("oft", "tilelang", size)
    target = target_of(weight)
    config = config or merge_config(n_k, size, n_i, weight.dtype, target, sm_count(weight.device), backward=False)
    blocks, weight, base = ready(blocks), ready(weight), ready_base(base, target)
    rescale = None if rescale is None else ready(rescale)
    shrink = shrink_factor(blocks, constraint)
    out = torch.empty(weight.shape, dtype=out_dtype, device=weight.device)
    delta, inline = torch.empty(blocks.shape, dtype=torch.float32, device=weight.device), True
    constants = {
        "S": size,
        "dtype": dtype_name(weight.dtype),
        "out_dtype": dtype_name(out_dtype),
        "base_dtype": None if base is None else dtype_name(base.dtype),
        "has_rescale": rescale is not None,
        "has_shrink": shrink is not None,
        "save": any(needs),
        "config": config,
    }
    if size <= MAX_SCALARS:
        width = _width(n_i)
        shape: tuple[int, ...] = (n_o, n_i // width, width)
        run = build(tilelang_merge.scalars, target, **sizes(target, I=n_i // width), WIDTH=width, **constants)
    else:
        shape = (n_k, size, n_i) if target.cpu else (n_o, n_i)
        inline = solve(blocks, delta, shrink, config.inline)
        run = build(tilelang_merge.dots, target, **sizes(target, I=n_i), P=pad(size), inline=inline, **constants)
    shrink = None if shrink is None else shrink.view(1)
    # What nothing writes or reads is given to no kernel, which spares the host its allocation.
    kept = delta if any(needs) or not inline else None
    run(blocks, weight.view(shape), rescale, shrink, None if base is None else base.view(shape), out.view(shape), kept)
    return out, (delta,) if any(needs) else ()


def merge_backward(
    grad: Tensor,
    blocks: Tensor,
    weight: Tensor,
    rescale: Tensor | None,
    constraint: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: Columns | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_blocks[k, s, s], grad_weight[O, I], grad_rescale[O])."""
    need_blocks, need_weight, need_rescale = needs
    (n_k, size, _), (n_o, n_i) = blocks.shape, weight.shape
    target, delta = target_of(weight), ready(saved[0])
    config = config or merge_config(n_k, size, n_i, weight.dtype, target, sm_count(weight.device), backward=True)
    g, weight = ready(grad), ready(weight)
    rescale = None if rescale is None else ready(rescale)
    grads = Gradients(blocks, rescale, constraint, need_blocks, need_rescale)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if need_weight else None
    span = config.block_i * config.tiles
    steps = config.steps or cdiv(n_i, span)
    parts = grads.partials(cdiv(n_i, span * steps))
    constants = {
        "S": size,
        "dtype": dtype_name(weight.dtype),
        "blocks_dtype": dtype_name(blocks.dtype if grads.blocks is None else grads.blocks.dtype),
        "has_rescale": rescale is not None,
        "need_blocks": need_blocks,
        "need_weight": need_weight,
        "need_rescale": need_rescale,
        "split": parts is not None,
        "config": config,
    }
    if size <= MAX_SCALARS:
        width = _width(n_i)
        shape = (n_o, n_i // width, width)
        run = build(tilelang_merge.scalars_backward, target, **sizes(target, I=shape[1]), WIDTH=width, **constants)
    else:
        shape = (n_k, size, n_i)
        run = build(tilelang_merge.dots_backward, target, **sizes(target, I=n_i), P=pad(size), STEPS=steps, **constants)
    view = None if grad_weight is None else grad_weight.view(shape)
    last = (steps,) if size <= MAX_SCALARS else ()
    run(g.view(shape), weight.view(shape), rescale, delta, parts, grads.blocks, view, grads.rescale, *last)
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, delta, rescale)
    grad_blocks, grad_rescale = grads.result()
    return grad_blocks, grad_weight, grad_rescale


def bypass_forward(
    y: Tensor,
    blocks: Tensor,
    rescale: Tensor | None,
    constraint: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Tokens | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """out[..., O]; saves D[k, s, s] in float32 where any gradient will be asked for."""
    n_k, size, _ = blocks.shape
    check_size("oft_bypass", "tilelang", size)
    target = target_of(y)
    blocks, flat = ready(blocks), ready(rows(y))
    base = None if base is None else ready_base(rows(base), target)
    rescale = None if rescale is None else ready(rescale)
    config = config or bypass_config(len(flat), n_k, size, y.dtype, target, sm_count(y.device), backward=False)
    shrink = shrink_factor(blocks, constraint)
    out = torch.empty(y.shape, dtype=out_dtype, device=y.device)
    delta = torch.empty(blocks.shape, dtype=torch.float32, device=y.device)
    inline = solve(blocks, delta, shrink, config.inline)
    kept = delta if any(needs) or not inline else None
    run = build(
        tilelang_bypass.forward,
        target,
        **sizes(target, K=n_k),
        S=size,
        P=pad(size),
        dtype=dtype_name(y.dtype),
        out_dtype=dtype_name(out_dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        has_rescale=rescale is not None,
        has_shrink=shrink is not None,
        inline=inline,
        save=any(needs),
        config=config,
    )
    run(flat, blocks, rescale, None if shrink is None else shrink.view(1), base, out.view(flat.shape), kept)
    return out, (delta,) if any(needs) else ()


def bypass_backward(
    grad: Tensor,
    y: Tensor,
    blocks: Tensor,
    rescale: Tensor | None,
    constraint: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: Tokens | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_y[..., O], grad_blocks[k, s, s], grad_rescale[O])."""
    need_y, need_blocks, need_rescale = needs
    n_k, size, _ = blocks.shape
    target, delta = target_of(y), ready(saved[0])
    g, flat = ready(rows(grad)), ready(rows(y))
    rescale = None if rescale is None else ready(rescale)
    config = config or bypass_config(len(flat), n_k, size, y.dtype, target, sm_count(y.device), backward=True)
    grads = Gradients(blocks, rescale, constraint, need_blocks, need_rescale)
    grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device) if need_y else None
    steps = config.steps or cdiv(len(flat), config.block_t)
    parts = grads.partials(cdiv(len(flat), config.block_t * steps))
    run = build(
        tilelang_bypass.backward,
        target,
        **sizes(target, K=n_k),
        S=size,
        P=pad(size),
        dtype=dtype_name(y.dtype),
        blocks_dtype=dtype_name(blocks.dtype if grads.blocks is None else grads.blocks.dtype),
        has_rescale=rescale is not None,
        need_y=need_y,
        need_blocks=need_blocks,
        need_rescale=need_rescale,
        split=parts is not None,
        STEPS=steps,
        config=config,
    )
    view = None if grad_y is None else grad_y.view(flat.shape)
    run(g, flat, rescale, delta, parts, view, grads.blocks, grads.rescale)
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, delta, rescale)
    grad_blocks, grad_rescale = grads.result()
    return grad_y, grad_blocks, grad_rescale


def _width(n_i: int) -> int:
    """Columns of one access: the widest that divides a row."""
    return next(width for width in (8, 4, 2, 1) if n_i % width == 0)
