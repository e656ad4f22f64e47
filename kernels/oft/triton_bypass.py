"""Diag-OFT's bypass in Triton; formulas and design in kernels/oft/triton_impl.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.cayley import Gradients, check_size, shrink_factor
from kernels.common.cayley_triton import dot_right, finish, finish_tile, pad, rotation, solve, solve_lanes
from kernels.common.plans import planned
from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, rows, sm_count


@dataclass(frozen=True)
class Tokens:
    """Launch of a bypass kernel: a program takes the channels of `blocks` blocks, `block_t` tokens at a time.

    tiles: how many such tiles it loads before it works on the first. steps (backward): how many times it does that, 0
    meaning to the last token, with nothing left to sum. stages: loads in flight on that walk. lanes (backward): how many
    sums of P a block has, each over its share of a tile's tokens (at least 16).
    """

    block_t: int
    blocks: int
    num_warps: int
    tiles: int = 1
    steps: int = 1
    stages: int = 3
    lanes: int = 1


@triton.jit
def _tokens(x, t, offs_c, mask_c, stop, stride_xt, BLOCK_T: tl.constexpr):
    """Pointers to, and mask of, [BLOCK_T, channels] from token t on."""
    offs_t = t + tl.arange(0, BLOCK_T)[:, None]
    return x + offs_t.to(tl.int64) * stride_xt + offs_c, (offs_t < stop) & mask_c


@triton.jit
def _by_block(tile, BLOCK_T: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """[T, N · P] as [N, T, P]."""
    return tl.permute(tl.reshape(tile, (BLOCK_T, N, P)), (1, 0, 2))


@triton.jit
def _by_lane(tile, BLOCK_T: tl.constexpr, N: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr):
    """[T, N · P] as [LANES · N, T / LANES, P]."""
    tile = tl.permute(tl.reshape(tile, (LANES, BLOCK_T // LANES, N, P)), (0, 2, 1, 3))
    return tl.reshape(tile, (LANES * N, BLOCK_T // LANES, P))


@triton.jit
def _by_token(tile, BLOCK_T: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """[N, T, P] as [T, N · P]."""
    return tl.reshape(tl.permute(tile, (1, 0, 2)), (BLOCK_T, N * P))


@planned
@triton.jit
def _bypass_kernel(
    y, blocks, rescale, shrink, base, out, delta, n_t, n_k, stride_yt, stride_bt,
    S: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, HAS_SHRINK: tl.constexpr, HAS_BASE: tl.constexpr, INLINE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out of N blocks' channels over a span of tokens; tokens are on their way while D is solved."""
    pid_k, pid_t = tl.program_id(0), tl.program_id(1)
    first = pid_k * N
    lanes = tl.arange(0, N * P)[None, :]
    offs_c = (first + lanes // P) * S + lanes % P
    mask_c = (first + lanes // P < n_k) & (lanes % P < S)
    tiles = ()
    for t in tl.static_range(TILES):
        at, mask = _tokens(y, (pid_t * TILES + t) * BLOCK_T, offs_c, mask_c, n_t, stride_yt, BLOCK_T)
        tiles = tiles + (tl.load(at, mask=mask, other=0.0),)
    if INLINE:
        factor = 1.0
        if HAS_SHRINK:
            factor = tl.load(shrink)
        solve_lanes(blocks, delta, factor, first, n_k, S, N)
        tl.debug_barrier()
    high, low, factor = rotation(delta, rescale, first, n_k, y.dtype.element_ty, S, N, P, False, HAS_RESCALE)
    for t in tl.static_range(TILES):
        start = (pid_t * TILES + t) * BLOCK_T
        tile = _by_block(tiles[t], BLOCK_T, N, P)
        value = _by_token(dot_right(tile, high, low, PRECISION) * factor, BLOCK_T, N, P)
        if HAS_BASE:
            at, mask = _tokens(base, start, offs_c, mask_c, n_t, stride_bt, BLOCK_T)
            value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at, mask = _tokens(out, start, offs_c, mask_c, n_t, n_k * S, BLOCK_T)
        tl.store(at, value.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _bypass_backward_kernel(
    grad, y, rescale, delta, parts, grad_y, grad_blocks, grad_rescale, n_t, n_k, steps, stride_gt, stride_yt,
    S: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, NEED_Y: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_y = g Mᵀ and P = yᵀ g of N blocks over a span of tokens, y and g read once."""
    NEED_P: tl.constexpr = NEED_BLOCKS or NEED_RESCALE
    pid_k, pid_t = tl.program_id(0), tl.program_id(1)
    first = pid_k * N
    lanes = tl.arange(0, N * P)[None, :]
    offs_c = (first + lanes // P) * S + lanes % P
    mask_c = (first + lanes // P < n_k) & (lanes % P < S)
    if NEED_Y:
        high, low, factor = rotation(delta, rescale, first, n_k, grad.dtype.element_ty, S, N, P, True, HAS_RESCALE)
    # Tokens are shared out over LANES sums a block, so that no warp is without one; they meet at the end.
    product = tl.zeros((LANES * N, P, P), tl.float32)
    for step in range(steps):
        start = (pid_t * steps + step) * (TILES * BLOCK_T)
        grads, inputs = (), ()
        for t in tl.static_range(TILES):
            at, mask = _tokens(grad, start + t * BLOCK_T, offs_c, mask_c, n_t, stride_gt, BLOCK_T)
            grads = grads + (tl.load(at, mask=mask, other=0.0),)
            if NEED_P:
                at, mask = _tokens(y, start + t * BLOCK_T, offs_c, mask_c, n_t, stride_yt, BLOCK_T)
                inputs = inputs + (tl.load(at, mask=mask, other=0.0),)
        for t in tl.static_range(TILES):
            if NEED_P:
                left, right = _by_lane(inputs[t], BLOCK_T, N, P, LANES), _by_lane(grads[t], BLOCK_T, N, P, LANES)
                product = tl.dot(tl.permute(left, (0, 2, 1)), right, product, input_precision=PRECISION)
            if NEED_Y:
                value = dot_right(_by_block(grads[t], BLOCK_T, N, P), high, low, PRECISION) * factor
                value = _by_token(value, BLOCK_T, N, P).to(grad_y.dtype.element_ty)
                at, mask = _tokens(grad_y, start + t * BLOCK_T, offs_c, mask_c, n_t, n_k * S, BLOCK_T)
                tl.store(at, value, mask=mask)
    if NEED_P:
        product = tl.sum(tl.reshape(product, (LANES, N, P, P)), axis=0)
        if SPLIT:
            block = first + tl.arange(0, N)[:, None, None]
            offs_n, offs_m = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
            at = parts + ((pid_t.to(tl.int64) * n_k + block) * S + offs_n) * S + offs_m
            tl.store(at, product, mask=(block < n_k) & (offs_n < S) & (offs_m < S))
        else:
            finish_tile(
                product, grad_blocks, grad_rescale, delta, rescale, first, n_k, S, N, P,
                NEED_BLOCKS, NEED_RESCALE, HAS_RESCALE,
            )  # fmt: skip


def bypass_config(n_t: int, n_k: int, size: int, dtype: torch.dtype, sms: int, *, backward: bool) -> Tokens:
    """A bypass kernel's launch: rows of 64 channels, and a few programs for every SM, each with tokens enough to fill it."""
    width = pad(size)
    if backward and width <= 16 and n_t <= 128:
        # One program a block: nothing is left to sum, which saves the second launch.
        return Tokens(128, 1, 4, steps=0, lanes=4)
    blocks = max(1, 64 // width)
    block_t = 16 if n_t <= 256 else 64
    tiles = cdiv(n_t, block_t)
    if not backward:
        return Tokens(block_t, blocks, 4, tiles=1 if n_t <= 2048 else 2)
    pairs = cdiv(tiles, 2)
    if n_t > 2048 and width <= 16 and dtype is not torch.float32 and pairs * cdiv(n_k, blocks) <= 5 * sms:
        return Tokens(block_t, blocks, 4, tiles=2)
    spans = min(tiles, max(1, cdiv(3 * sms, cdiv(n_k, blocks))))
    return Tokens(block_t, blocks, 4, steps=cdiv(tiles, spans))


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
    check_size("oft_bypass", "triton", size)
    rescale = None if rescale is None else rescale.contiguous()
    blocks, flat, bias = blocks.contiguous(), rows(y), None if base is None else rows(base)
    n_t = flat.shape[0]
    config = config or bypass_config(n_t, n_k, size, y.dtype, sm_count(y.device), backward=False)
    shrink = shrink_factor(blocks, constraint)
    out = torch.empty(y.shape, dtype=out_dtype, device=y.device)
    delta = torch.empty(blocks.shape, dtype=torch.float32, device=y.device)
    grid = (cdiv(n_k, config.blocks), cdiv(n_t, config.block_t * config.tiles))
    inline = solve(blocks, delta, shrink, grid[0] * grid[1], sm_count(y.device))
    _bypass_kernel[grid](
        flat, blocks, rescale, shrink, bias, out, delta, n_t, n_k, flat.stride(0), 0 if bias is None else bias.stride(0),
        size, pad(size), config.blocks, config.block_t, config.tiles,
        rescale is not None, shrink is not None, bias is not None, inline, precision(y.dtype),
        num_warps=config.num_warps,
    )  # fmt: skip
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
    rescale = None if rescale is None else rescale.contiguous()
    g, flat = rows(grad), rows(y)
    n_t = flat.shape[0]
    config = config or bypass_config(n_t, n_k, size, y.dtype, sm_count(y.device), backward=True)
    grads = Gradients(blocks, rescale, constraint, need_blocks, need_rescale)
    grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device) if need_y else None
    span = config.block_t * config.tiles
    steps = config.steps or cdiv(n_t, span)
    splits = cdiv(n_t, span * steps)
    parts = grads.partials(splits)
    _bypass_backward_kernel[(cdiv(n_k, config.blocks), splits)](
        g, flat, rescale, saved[0], parts, grad_y, grads.blocks, grads.rescale, n_t, n_k, steps,
        g.stride(0), flat.stride(0), size, pad(size), config.blocks, config.block_t, config.tiles, config.lanes,
        rescale is not None, need_y, need_blocks, need_rescale, parts is not None, precision(y.dtype),
        num_warps=config.num_warps, num_stages=config.stages,
    )  # fmt: skip
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, saved[0], rescale)
    grad_blocks, grad_rescale = grads.result()
    return grad_y, grad_blocks, grad_rescale
