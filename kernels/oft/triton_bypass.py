"""Diag-OFT's bypass in Triton; formulas and design in kernels/oft/triton_impl.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.cayley import Gradients, check_size, shrink_factor
from kernels.common.cayley_triton import (
    dot_right,
    finish,
    finish_tile,
    pad,
    rotation,
    shares,
    solve,
    solve_lanes,
    tile_entries,
)
from kernels.common.plans import planned
from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, rows, sm_count


@dataclass(frozen=True)
class Tokens:
    """Launch of a bypass kernel: a program takes the channels of `blocks` blocks, `block_t` tokens at a time.

    lanes: how many warps share a block's tokens in a tile, of which each has at least 16; blocks times lanes is the number
    of warps. tiles (forward): how many tiles are on their way at once. steps: how many such tiles (forward: times `tiles`)
    a program takes, for the backward 0 meaning to the last token, with nothing left to sum. inline (forward): does each
    program solve its blocks itself, which saves a launch? wide: how is a tile laid out?
    """

    block_t: int
    blocks: int
    lanes: int = 1
    tiles: int = 1
    steps: int = 1
    inline: bool = True
    wide: bool = False

    @property
    def num_warps(self) -> int:
        return self.blocks * self.lanes


# A tile comes in one of two layouts.
#
# WIDE: [tokens, channels], loaded in 16-byte accesses of whole rows; it passes through shared memory on its way to the tensor
# cores and back. For long streams, which wait for memory.
#
# Otherwise its tokens and channels are laid out over the threads as the tensor cores want them, and nothing passes through
# shared memory: Triton gives lanes, then warps, to a load's axes in their order, the innermost apart, which is a thread's.
# A warp has a block (or its share of the tokens), a thread of a quad four neighbouring channels of it as the four slots of
# each 16 (`slot_channel`). For P the contraction is over tokens: there a quad has four tokens, each of eight threads two
# neighbouring channels. For short calls, which wait for one step after another.


@triton.jit
def _tokens(
    x, start, first, stop, n_k, stride_xt, S: tl.constexpr, P: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
    BLOCK_T: tl.constexpr, WIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Pointers to, and mask of, the tokens from `start` on; with WIDE [BLOCK_T, N * P], else by CHANNELS = 4 or 2.

    4: [4, 8, LANES * N, T / 8, P / 16, 4] = (channels // 4 % 4, token % 8, block, token // 8, channel // 16, channel % 4).
    2: [4, 8, LANES * N, T / 4, P / 16, 2] = (token % 4, channel // 2 % 8, block, token // 4, channel // 16, channel % 2).
    T is BLOCK_T / LANES.
    """
    if WIDE:
        lanes = tl.arange(0, N * P)[None, :]
        offs_t = start + tl.arange(0, BLOCK_T)[:, None]
        block, offs_c = first + lanes // P, lanes % P
        at = first * S + lanes if S == P else block * S + offs_c
    else:
        four, eight = tl.arange(0, 4)[:, None, None, None, None, None], tl.arange(0, 8)[None, :, None, None, None, None]
        lane = tl.arange(0, LANES * N)[None, None, :, None, None, None]
        chunk = tl.arange(0, P // 16)[None, None, None, None, :, None] * 16
        last = tl.arange(0, CHANNELS)[None, None, None, None, None, :]
        if CHANNELS == 4:
            offs_t = tl.arange(0, BLOCK_T // LANES // 8)[None, None, None, :, None, None] * 8 + eight
            offs_c = chunk + four * 4 + last
        else:
            offs_t = tl.arange(0, BLOCK_T // LANES // 4)[None, None, None, :, None, None] * 4 + four
            offs_c = chunk + eight * 2 + last
        offs_t += start + lane // N * (BLOCK_T // LANES)
        block = first + lane % N
        at = block * S + offs_c
    mask = (offs_t < stop) & (block < n_k)
    if S != P:
        mask = mask & (offs_c < S)
    return x + offs_t.to(tl.int64) * stride_xt + at, mask


@triton.jit
def _rows(tile, LANES: tl.constexpr, N: tl.constexpr, T: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):
    """A tile of `_tokens` (CHANNELS = 4) as [LANES * N, T, P], unless WIDE its channels in slots."""
    if WIDE:
        tile = tl.permute(tl.reshape(tile, (LANES, T, N, P)), (0, 2, 1, 3))
    else:
        tile = tl.reshape(tile, (4, 8, LANES * N, T // 8, P // 16, 2, 2))
        tile = tl.permute(tile, (2, 3, 1, 4, 5, 0, 6))
    return tl.reshape(tile, (LANES * N, T, P))


@triton.jit
def _from_rows(tile, LANES: tl.constexpr, N: tl.constexpr, T: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):
    """The reverse of `_rows`."""
    if WIDE:
        tile = tl.permute(tl.reshape(tile, (LANES, N, T, P)), (0, 2, 1, 3))
        return tl.reshape(tile, (LANES * T, N * P))
    else:
        tile = tl.reshape(tile, (LANES * N, T // 8, 8, P // 16, 2, 4, 2))
        return tl.reshape(tl.permute(tile, (5, 2, 0, 1, 3, 4, 6)), (4, 8, LANES * N, T // 8, P // 16, 4))


@triton.jit
def _columns(tile, LANES: tl.constexpr, N: tl.constexpr, T: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):
    """A tile of `_tokens` (CHANNELS = 2) as [LANES * N, P, T], unless WIDE 16 channels as the even ones, then the odd ones."""
    if WIDE:
        return tl.permute(_rows(tile, LANES, N, T, P, True), (0, 2, 1))
    else:
        tile = tl.reshape(tile, (4, 8, LANES * N, T // 16, 2, 2, P // 16, 2))
        return tl.reshape(tl.permute(tile, (2, 6, 7, 1, 3, 4, 0, 5)), (LANES * N, P, T))


@triton.jit
def _products(sums, LANES: tl.constexpr, N: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):
    """[N, P, P] from what the lanes of each block have summed, in the channels' own order."""
    total = tl.sum(tl.reshape(sums, (LANES, N, P, P)), axis=0)
    if WIDE:
        return total
    else:
        total = tl.reshape(total, (N, P // 16, 2, 8, P // 16, 2, 8))
        return tl.reshape(tl.permute(total, (0, 1, 3, 2, 4, 6, 5)), (N, P, P))


@planned
@triton.jit
def _bypass_kernel(
    y, blocks, rescale, shrink, base, out, delta, n_t, n_k, steps, stride_yt, stride_bt,
    S: tl.constexpr, P: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr,
    WIDE: tl.constexpr, HAS_RESCALE: tl.constexpr, HAS_SHRINK: tl.constexpr, HAS_BASE: tl.constexpr, INLINE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out of N blocks' channels over a span of tokens; tokens are on their way while D is solved."""
    first, start = tl.program_id(0) * N, tl.program_id(1) * steps * (TILES * BLOCK_T)
    stop = tl.minimum(n_t, start + steps * (TILES * BLOCK_T))
    T: tl.constexpr = BLOCK_T // LANES
    tiles = ()
    for t in tl.static_range(TILES):
        # Not `at`, which a loop carries on, and which the last step leaves as a pointer of the output's dtype.
        at_first, mask_first = _tokens(
            y, start + t * BLOCK_T, first, stop, n_k, stride_yt, S, P, N, LANES, BLOCK_T, WIDE, 4
        )
        tiles = tiles + (tl.load(at_first, mask=mask_first, other=0.0),)
    if INLINE:
        factor = 1.0
        if HAS_SHRINK:
            factor = tl.load(shrink)
        solve_lanes(blocks, delta, factor, first, n_k, S, N, LANES)
        tl.debug_barrier()
    high, low, factor = rotation(
        delta, rescale, first, n_k, y.dtype.element_ty, S, N, P, False, HAS_RESCALE, LANES, not WIDE
    )
    for _ in range(steps):
        coming = ()
        for t in tl.static_range(TILES):
            now = start + t * BLOCK_T
            value = dot_right(_rows(tiles[t], LANES, N, T, P, WIDE), high, low, PRECISION) * factor
            # A tile's successor is on its way once it is used up.
            ahead = now + TILES * BLOCK_T
            at, mask = _tokens(y, ahead, first, stop, n_k, stride_yt, S, P, N, LANES, BLOCK_T, WIDE, 4)
            coming = coming + (tl.load(at, mask=mask, other=0.0),)
            if HAS_BASE:
                at, mask = _tokens(base, now, first, stop, n_k, stride_bt, S, P, N, LANES, BLOCK_T, WIDE, 4)
                value = _from_rows(value, LANES, N, T, P, WIDE) + tl.load(at, mask=mask, other=0.0).to(tl.float32)
                value = value.to(out.dtype.element_ty)
            else:
                value = _from_rows(value.to(out.dtype.element_ty), LANES, N, T, P, WIDE)
            at, mask = _tokens(out, now, first, stop, n_k, n_k * S, S, P, N, LANES, BLOCK_T, WIDE, 4)
            tl.store(at, value, mask=mask)
        tiles = coming
        start += TILES * BLOCK_T


@planned
@triton.jit
def _bypass_backward_kernel(
    grad, y, rescale, delta, parts, grad_y, grad_blocks, grad_rescale, n_t, n_k, steps, stride_gt, stride_yt,
    S: tl.constexpr, P: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr, HAS_RESCALE: tl.constexpr, NEED_Y: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_y = g Mᵀ and P = yᵀ g of N blocks over a span of tokens, y and g read once.

    Unless WIDE, g is loaded in two layouts, the second time from the cache nearest to the SM's.
    """
    NEED_P: tl.constexpr = NEED_BLOCKS or NEED_RESCALE
    first, start = tl.program_id(0) * N, tl.program_id(1) * steps * BLOCK_T
    stop = tl.minimum(n_t, start + steps * BLOCK_T)
    T: tl.constexpr = BLOCK_T // LANES
    left, right, rows = _loads(
        grad, y, start, first, stop, n_k, stride_gt, stride_yt, S, P, N, LANES, BLOCK_T, WIDE, NEED_P, NEED_Y
    )
    if NEED_Y:
        high, low, factor = rotation(
            delta, rescale, first, n_k, grad.dtype.element_ty, S, N, P, True, HAS_RESCALE, LANES, not WIDE
        )
    sums = tl.zeros((LANES * N, P, P), tl.float32)
    for _ in range(steps):
        if NEED_P:
            turned = tl.permute(_columns(right, LANES, N, T, P, WIDE), (0, 2, 1))
            sums = tl.dot(_columns(left, LANES, N, T, P, WIDE), turned, sums, input_precision=PRECISION)
        if NEED_Y:
            value = dot_right(_rows(rows, LANES, N, T, P, WIDE), high, low, PRECISION) * factor
            value = _from_rows(value.to(grad_y.dtype.element_ty), LANES, N, T, P, WIDE)
            at, mask = _tokens(grad_y, start, first, stop, n_k, n_k * S, S, P, N, LANES, BLOCK_T, WIDE, 4)
            tl.store(at, value, mask=mask)
        start += BLOCK_T
        left, right, rows = _loads(
            grad, y, start, first, stop, n_k, stride_gt, stride_yt, S, P, N, LANES, BLOCK_T, WIDE, NEED_P, NEED_Y
        )
    if NEED_P:
        product = _products(sums, LANES, N, P, WIDE)
        if SPLIT:
            _, _, offs, exists = tile_entries(first, n_k, S, N, P, False)
            tl.store(parts + tl.program_id(1).to(tl.int64) * n_k * (S * S) + offs, product, mask=exists)
        else:
            finish_tile(
                product, grad_blocks, grad_rescale, delta, rescale, first, n_k, S, N, P,
                NEED_BLOCKS, NEED_RESCALE, HAS_RESCALE,
            )  # fmt: skip


@triton.jit
def _loads(
    grad, y, start, first, stop, n_k, stride_gt, stride_yt, S: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    LANES: tl.constexpr, BLOCK_T: tl.constexpr, WIDE: tl.constexpr, NEED_P: tl.constexpr, NEED_Y: tl.constexpr,
):  # fmt: skip
    """Tiles of y and of g for P, and of g for grad_y: all three alike where WIDE. What nothing needs is 0."""
    left, right, rows = 0, 0, 0
    if WIDE or NEED_Y:
        at, mask = _tokens(grad, start, first, stop, n_k, stride_gt, S, P, N, LANES, BLOCK_T, WIDE, 4)
        rows = tl.load(at, mask=mask, other=0.0)
    if NEED_P:
        at, mask = _tokens(y, start, first, stop, n_k, stride_yt, S, P, N, LANES, BLOCK_T, WIDE, 2)
        left = tl.load(at, mask=mask, other=0.0)
        if WIDE:
            right = rows
        else:
            at, mask = _tokens(grad, start, first, stop, n_k, stride_gt, S, P, N, LANES, BLOCK_T, WIDE, 2)
            right = tl.load(at, mask=mask, other=0.0)
    return left, right, rows


def bypass_config(n_t: int, n_k: int, size: int, dtype: torch.dtype, sms: int, *, backward: bool) -> Tokens:
    """A bypass kernel's launch; times are of 1280 channels in blocks of 16 on an H200."""
    width = pad(size)
    if backward and width <= 16 and n_t <= 128:
        # One program a block: nothing is left to sum, which saves the second launch.
        return Tokens(128, 1, lanes=4, steps=0)
    blocks = max(1, 64 // width)
    lanes, groups, tiles = max(1, 4 // blocks), cdiv(n_k, blocks), cdiv(n_t, 64)
    if backward and width <= 16:
        # Many small programs: 4096 tokens take 10.0 µs, 10.9 by four blocks a program, and 13.4 in the other layout.
        spans = max(1, 10 * sms // cdiv(n_k, 2))
        return Tokens(64, 2, steps=cdiv(tiles, spans), wide=True)
    if backward:
        return Tokens(64, blocks, lanes, steps=cdiv(tiles, max(1, 3 * sms // groups)))
    few = Tokens(32, max(1, 32 // width), lanes=2)
    if cdiv(n_k, few.blocks) * cdiv(n_t, few.block_t) <= sms:
        return few
    # One program an SM solves its blocks while up to three tiles are on their way (1024 tokens: 4.7 µs, and 6.0 with a launch
    # for the solve); longer streams are better off in many short programs, which find D solved (4096: 9.3 and 10.9 µs).
    each = cdiv(tiles, max(1, sms // groups))
    if groups <= sms and each <= 3:
        return Tokens(64, blocks, lanes, tiles=each)
    return Tokens(64, blocks, lanes, steps=2, inline=False, wide=True)


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
    grid = (cdiv(n_k, config.blocks), cdiv(n_t, config.block_t * config.tiles * config.steps))
    inline = solve(blocks, delta, shrink, config.inline)
    lanes = shares(config.lanes, y.dtype)
    _bypass_kernel[grid](
        flat, blocks, rescale, shrink, bias, out, delta, n_t, n_k, config.steps, flat.stride(0),
        0 if bias is None else bias.stride(0), size, pad(size), config.blocks, lanes, config.block_t, config.tiles,
        config.wide, rescale is not None, shrink is not None, bias is not None, inline, precision(y.dtype),
        num_warps=config.num_warps, num_stages=1,
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
    steps = config.steps or cdiv(n_t, config.block_t)
    splits = cdiv(n_t, config.block_t * steps)
    lanes = shares(config.lanes, y.dtype)
    parts = grads.partials(splits)
    _bypass_backward_kernel[(cdiv(n_k, config.blocks), splits)](
        g, flat, rescale, saved[0], parts, grad_y, grads.blocks, grads.rescale, n_t, n_k, steps,
        g.stride(0), flat.stride(0), size, pad(size), config.blocks, lanes, config.block_t, config.wide,
        rescale is not None, need_y, need_blocks, need_rescale, parts is not None, precision(y.dtype),
        num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, saved[0], rescale)
    grad_blocks, grad_rescale = grads.result()
    return grad_y, grad_blocks, grad_rescale
