"""Diag-OFT's merge in Triton; formulas and design in kernels/oft/triton_impl.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.cayley import MAX_SCALARS, Gradients, check_size, shrink_factor
from kernels.common.cayley_triton import (
    dot_left,
    finish,
    finish_scalars,
    finish_tile,
    pad,
    rotation,
    shares,
    solve,
    solve_lanes,
    solve_scalars,
    tile_entries,
)
from kernels.common.plans import planned
from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, rows, sm_count


@dataclass(frozen=True)
class Columns:
    """Launch of a merge kernel: a program takes one block's rows, `block_i` columns at a time.

    tiles: how many such tiles it loads before it works on the first. steps (backward): how many times it does that, 0
    meaning to the last column, with nothing left to sum. inline (forward): does each program solve its block itself,
    which saves a launch?
    """

    block_i: int
    num_warps: int
    tiles: int = 1
    steps: int = 1
    inline: bool = True


@planned
@triton.jit
def _scalars_kernel(
    blocks, weight, rescale, shrink, base, out, delta, n_k, n_i, stride_wo, stride_bo,
    S: tl.constexpr, BLOCK_I: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, HAS_SHRINK: tl.constexpr, HAS_BASE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """ΔW of one block of up to 4 rows: D in scalars, rows as vectors, no tensor core and no shared memory."""
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    offs_i = pid_i * (TILES * BLOCK_I) + tl.arange(0, BLOCK_I)
    row = pid_k.to(tl.int64) * S
    tiles = ()
    for t in tl.static_range(TILES):
        for n in tl.static_range(S):
            at = weight + (row + n) * stride_wo + offs_i + t * BLOCK_I
            tiles = tiles + (tl.load(at, mask=offs_i + t * BLOCK_I < n_i, other=0.0),)
    factor = 1.0
    if HAS_SHRINK:
        factor = tl.load(shrink)
    d = solve_scalars(blocks + row * S, factor, S)
    if SAVE:
        if pid_i == 0:
            for i in tl.static_range(S * S):
                tl.store(delta + row * S + i, d[i])
    for t in tl.static_range(TILES):
        mask = offs_i + t * BLOCK_I < n_i
        for m in tl.static_range(S):
            value = d[m] * tiles[t * S].to(tl.float32)
            for n in tl.static_range(1, S):
                value += d[n * S + m] * tiles[t * S + n].to(tl.float32)
            if HAS_RESCALE:
                r = tl.load(rescale + row + m).to(tl.float32)
                value = r * value + (r - 1.0) * tiles[t * S + m].to(tl.float32)
            if HAS_BASE:
                value += tl.load(base + (row + m) * stride_bo + offs_i + t * BLOCK_I, mask=mask, other=0.0).to(
                    tl.float32
                )
            tl.store(out + (row + m) * n_i + offs_i + t * BLOCK_I, value.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _scalars_backward_kernel(
    grad, weight, rescale, delta, parts, grad_blocks, grad_weight, grad_rescale, n_k, n_i, steps, stride_go, stride_wo,
    S: tl.constexpr, BLOCK_I: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """grad_W and P of one block of up to 4 rows over a span of columns; the gradients themselves where that is all of them."""
    NEED_P: tl.constexpr = NEED_BLOCKS or NEED_RESCALE
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    # Eight columns a thread: their part of each sum stays in the thread until the end.
    inner = tl.arange(0, BLOCK_I // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    row = pid_k.to(tl.int64) * S
    d, r, sums = (), (), ()
    for i in tl.static_range(S * S):
        d = d + (tl.load(delta + row * S + i),)
        sums = sums + (tl.zeros((BLOCK_I // 8,), tl.float32),)
    for m in tl.static_range(S):
        r = r + ((tl.load(rescale + row + m).to(tl.float32) if HAS_RESCALE else 1.0),)
    for step in range(steps):
        w, g = (), ()
        for t in tl.static_range(TILES):
            offs_i = ((pid_i * steps + step) * TILES + t) * BLOCK_I + inner
            for n in tl.static_range(S):
                g = g + (tl.load(grad + (row + n) * stride_go + offs_i, mask=offs_i < n_i, other=0.0),)
                if NEED_P:
                    w = w + (tl.load(weight + (row + n) * stride_wo + offs_i, mask=offs_i < n_i, other=0.0),)
        for t in tl.static_range(TILES):
            if NEED_P:
                added = ()
                for n in tl.static_range(S):
                    for m in tl.static_range(S):
                        product = w[t * S + n].to(tl.float32) * g[t * S + m].to(tl.float32)
                        added = added + (sums[n * S + m] + tl.sum(product, axis=1),)
                sums = added
            if NEED_WEIGHT:
                offs_i = ((pid_i * steps + step) * TILES + t) * BLOCK_I + inner
                for n in tl.static_range(S):
                    value = (r[n] - 1.0) * g[t * S + n].to(tl.float32)
                    for m in tl.static_range(S):
                        value += d[n * S + m] * r[m] * g[t * S + m].to(tl.float32)
                    at = grad_weight + (row + n) * n_i + offs_i
                    tl.store(at, value.to(grad_weight.dtype.element_ty), mask=offs_i < n_i)
    if NEED_P:
        product = ()
        for i in tl.static_range(S * S):
            product = product + (tl.sum(sums[i], axis=0),)
        if SPLIT:
            at = parts + (pid_i.to(tl.int64) * n_k * S + row) * S
            for i in tl.static_range(S * S):
                tl.store(at + i, product[i])
        else:
            _finish_scalars(product, d, r, grad_blocks, grad_rescale, row, S, NEED_BLOCKS, NEED_RESCALE)


@triton.jit
def _finish_scalars(
    product, d, r, grad_blocks, grad_rescale, row, S: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_RESCALE: tl.constexpr
):  # fmt: skip
    """Writes the gradients of one block and its rescale from P."""
    if NEED_RESCALE:
        for m in tl.static_range(S):
            value = product[m * S + m]
            for n in tl.static_range(S):
                value += d[n * S + m] * product[n * S + m]
            tl.store(grad_rescale + row + m, value.to(grad_rescale.dtype.element_ty))
    if NEED_BLOCKS:
        scaled = ()
        for n in tl.static_range(S):
            for m in tl.static_range(S):
                scaled = scaled + (r[m] * product[n * S + m],)
        grad = finish_scalars(scaled, d, S)
        for i in tl.static_range(S * S):
            tl.store(grad_blocks + row * S + i, grad[i].to(grad_blocks.dtype.element_ty))


# A tile of a block's rows is laid out over the threads as the tensor cores want it, so that nothing passes through shared
# memory: Triton gives lanes, then warps, to a load's axes in their order, the innermost apart, which is a thread's. A warp
# has its share of the columns, a thread E neighbouring ones as one slot of E products. Where the contraction is over rows,
# a quad has their pairs, and eight threads have eight times E columns; where it is over columns, and in the output, a quad
# has four times E columns, and eight threads have eight rows.


@triton.jit
def _columns(
    x, row, start, stop, stride_xo, S: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, BLOCK_I: tl.constexpr,
    OVER_ROWS: tl.constexpr,
):  # fmt: skip
    """Pointers to, and mask of, a block's rows from `row` and column `start` on, for a contraction OVER_ROWS or not.

    True: [4, 8, LANES, P / 4, I / (8 E), E] = (row // 2 % 4, columns // E % 8, share, the rest of the row, ..., column % E).
    False: [4, 8, LANES, P / 8, I / (4 E), E] = (columns // E % 4, row % 8, share, row // 8, columns // (4 E), column % E).
    I is BLOCK_I / LANES.
    """
    E: tl.constexpr = 128 // P
    I: tl.constexpr = BLOCK_I // LANES
    four, eight = tl.arange(0, 4)[:, None, None, None, None, None], tl.arange(0, 8)[None, :, None, None, None, None]
    share = tl.arange(0, LANES)[None, None, :, None, None, None] * I
    last = tl.arange(0, E)[None, None, None, None, None, :]
    if OVER_ROWS:
        other = tl.arange(0, P // 4)[None, None, None, :, None, None]
        rows = other // 2 * 8 + four * 2 + other % 2
        # Pairs of eights, so that a quad of the product has neighbours.
        cols = tl.arange(0, I // (8 * E))[None, None, None, None, :, None] * (8 * E) + (eight // 2 + eight % 2 * 4) * E
    else:
        rows = tl.arange(0, P // 8)[None, None, None, :, None, None] * 8 + eight
        cols = tl.arange(0, I // (4 * E))[None, None, None, None, :, None] * (4 * E) + four * E
    cols += start + share + last
    mask = cols < stop
    if S != P:
        mask = mask & (rows < S)
    return x + (row + rows) * stride_xo + cols, mask


@triton.jit
def _over_rows(tile, B: tl.constexpr, I: tl.constexpr, P: tl.constexpr):
    """A tile of `_columns` OVER_ROWS as [B, P, I]."""
    E: tl.constexpr = tile.shape[5]
    tile = tl.reshape(tile, (4, 8, B, P // 8, 2, I // (8 * E), E))
    return tl.reshape(tl.permute(tile, (2, 3, 0, 4, 5, 6, 1)), (B, P, I))


@triton.jit
def _from_product(tile, B: tl.constexpr, I: tl.constexpr, P: tl.constexpr, E: tl.constexpr):
    """What a product with `_over_rows` gives, [B, P, I], as a tile of `_columns` not OVER_ROWS."""
    tile = tl.reshape(tile, (B, P // 8, 8, I // (8 * E), E, 4, 2))
    return tl.reshape(tl.permute(tile, (5, 2, 0, 1, 3, 6, 4)), (4, 8, B, P // 8, I // (4 * E), E))


@triton.jit
def _over_columns(tile, B: tl.constexpr, I: tl.constexpr, P: tl.constexpr):
    """A tile of `_columns` not OVER_ROWS as [B, P, I], its columns in an order of their own."""
    tile = tl.reshape(tile, (4, 8, B, P // 8, I // 16, 2, 2))
    return tl.reshape(tl.permute(tile, (2, 3, 1, 4, 5, 0, 6)), (B, P, I))


@planned
@triton.jit
def _dots_kernel(
    blocks, weight, rescale, shrink, base, out, delta, n_k, n_i, stride_wo, stride_bo,
    S: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, BLOCK_I: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, HAS_SHRINK: tl.constexpr, HAS_BASE: tl.constexpr, INLINE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """ΔW of one block: its columns are on their way while D is solved, then Mᵀ @ tile by tensor cores."""
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    start, row = pid_i * (TILES * BLOCK_I), pid_k.to(tl.int64) * S
    tiles = ()
    for t in tl.static_range(TILES):
        at, mask = _columns(weight, row, start + t * BLOCK_I, n_i, stride_wo, S, P, LANES, BLOCK_I, True)
        tiles = tiles + (tl.load(at, mask=mask, other=0.0),)
    if INLINE:
        factor = 1.0
        if HAS_SHRINK:
            factor = tl.load(shrink)
        solve_lanes(blocks, delta, factor, pid_k, n_k, S, 1, LANES)
        tl.debug_barrier()
    high, low, factor = rotation(delta, rescale, pid_k, n_k, weight.dtype.element_ty, S, 1, P, True, HAS_RESCALE, LANES)
    for t in tl.static_range(TILES):
        value = dot_left(high, low, _over_rows(tiles[t], LANES, BLOCK_I // LANES, P), PRECISION) * factor
        value = _from_product(value, LANES, BLOCK_I // LANES, P, tiles[t].shape[5])
        if HAS_BASE:
            at, mask = _columns(base, row, start + t * BLOCK_I, n_i, stride_bo, S, P, LANES, BLOCK_I, False)
            value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at, mask = _columns(out, row, start + t * BLOCK_I, n_i, n_i, S, P, LANES, BLOCK_I, False)
        tl.store(at, value.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _dots_backward_kernel(
    grad, weight, rescale, delta, parts, grad_blocks, grad_weight, grad_rescale, n_k, n_i, steps, stride_go, stride_wo,
    S: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr, BLOCK_I: tl.constexpr,
    HAS_RESCALE: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_W = M G and P = W Gᵀ of one block over a span of columns, W and G read once.

    G is loaded in two layouts, the second time from the cache nearest to the SM's. P sums over columns, which LANES (one a
    warp) share; their sums meet at the end.
    """
    NEED_P: tl.constexpr = NEED_BLOCKS or NEED_RESCALE
    I: tl.constexpr = BLOCK_I // LANES
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    start, row = pid_i * steps * BLOCK_I, pid_k.to(tl.int64) * S
    stop = tl.minimum(n_i, start + steps * BLOCK_I)
    left, right, rows = _loads(
        grad, weight, row, start, stop, stride_go, stride_wo, S, P, LANES, BLOCK_I, NEED_P, NEED_WEIGHT
    )
    if NEED_WEIGHT:
        high, low, factor = rotation(
            delta, rescale, pid_k, n_k, grad.dtype.element_ty, S, 1, P, False, HAS_RESCALE, LANES
        )
    sums = tl.zeros((LANES, P, P), tl.float32)
    for _ in range(steps):
        if NEED_P:
            turned = tl.permute(_over_columns(right, LANES, I, P), (0, 2, 1))
            sums = tl.dot(_over_columns(left, LANES, I, P), turned, sums, input_precision=PRECISION)
        if NEED_WEIGHT:
            value = dot_left(high, low, _over_rows(rows, LANES, I, P), PRECISION) * factor
            value = _from_product(value.to(grad_weight.dtype.element_ty), LANES, I, P, rows.shape[5])
            at, mask = _columns(grad_weight, row, start, stop, n_i, S, P, LANES, BLOCK_I, False)
            tl.store(at, value, mask=mask)
        start += BLOCK_I
        left, right, rows = _loads(
            grad, weight, row, start, stop, stride_go, stride_wo, S, P, LANES, BLOCK_I, NEED_P, NEED_WEIGHT
        )
    if NEED_P:
        product = tl.sum(sums, axis=0)[None, :, :]
        if SPLIT:
            _, _, offs, exists = tile_entries(pid_k, n_k, S, 1, P, False)
            tl.store(parts + pid_i.to(tl.int64) * n_k * (S * S) + offs, product, mask=exists)
        else:
            finish_tile(
                product, grad_blocks, grad_rescale, delta, rescale, pid_k, n_k, S, 1, P,
                NEED_BLOCKS, NEED_RESCALE, HAS_RESCALE,
            )  # fmt: skip


@triton.jit
def _loads(
    grad, weight, row, start, stop, stride_go, stride_wo, S: tl.constexpr, P: tl.constexpr, LANES: tl.constexpr,
    BLOCK_I: tl.constexpr, NEED_P: tl.constexpr, NEED_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Tiles of W and of G for a contraction over columns, and of G for one over rows; what nothing needs is 0."""
    left, right, rows = 0, 0, 0
    if NEED_P:
        at, mask = _columns(weight, row, start, stop, stride_wo, S, P, LANES, BLOCK_I, False)
        left = tl.load(at, mask=mask, other=0.0)
        at, mask = _columns(grad, row, start, stop, stride_go, S, P, LANES, BLOCK_I, False)
        right = tl.load(at, mask=mask, other=0.0)
    if NEED_WEIGHT:
        at, mask = _columns(grad, row, start, stop, stride_go, S, P, LANES, BLOCK_I, True)
        rows = tl.load(at, mask=mask, other=0.0)
    return left, right, rows


def merge_config(n_k: int, size: int, n_i: int, dtype: torch.dtype, sms: int, *, backward: bool) -> Columns:
    """A merge kernel's launch: a few programs for every SM, as long as each has a few tiles of columns."""
    if size <= MAX_SCALARS:
        return Columns(256, 1, tiles=2, steps=0 if backward and n_i <= 2048 else 1)
    # A thread of four warps has 16 bytes of a row of 16-bit blocks.
    block_i = 4096 // pad(size)
    tiles = cdiv(n_i, block_i)
    if backward:
        return Columns(block_i, 4, steps=cdiv(tiles, max(1, 3 * sms // n_k)))
    # Up to one program an SM solves its block while its columns are on their way (1280 x 1280 on an H200: 4.7 µs, and 5.8
    # with a launch for the solve); more programs find D solved, and are short (5120 x 1280: 9.6 and 11.2 µs).
    each = cdiv(tiles, max(1, sms // n_k))
    if n_k <= sms and each <= 5:
        return Columns(block_i, 4, tiles=each)
    return Columns(block_i, 4, tiles=2, inline=False)


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
    (n_k, size, _), n_i = blocks.shape, weight.shape[1]
    check_size("oft", "triton", size)
    rescale = None if rescale is None else rescale.contiguous()
    config = config or merge_config(n_k, size, n_i, weight.dtype, sm_count(weight.device), backward=False)
    blocks, w, bias = blocks.contiguous(), rows(weight), None if base is None else rows(base)
    shrink = shrink_factor(blocks, constraint)
    out = torch.empty(weight.shape, dtype=out_dtype, device=weight.device)
    delta = torch.empty(blocks.shape, dtype=torch.float32, device=weight.device)
    saved = (delta,) if any(needs) else ()
    grid = (cdiv(n_i, config.block_i * config.tiles), n_k)
    operands = (
        blocks, w, rescale, shrink, bias, out, delta, n_k, n_i, w.stride(0), 0 if bias is None else bias.stride(0),
    )  # fmt: skip
    flags = (rescale is not None, shrink is not None, bias is not None)
    if size <= MAX_SCALARS:
        _scalars_kernel[grid](
            *operands, size, config.block_i, config.tiles, *flags, bool(saved), num_warps=config.num_warps
        )
        return out, saved
    inline = solve(blocks, delta, shrink, config.inline)
    _dots_kernel[grid](
        *operands, size, pad(size), shares(config.num_warps, w.dtype), config.block_i, config.tiles, *flags, inline, precision(w.dtype),
        num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    return out, saved


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
    (n_k, size, _), n_i = blocks.shape, weight.shape[1]
    rescale = None if rescale is None else rescale.contiguous()
    config = config or merge_config(n_k, size, n_i, weight.dtype, sm_count(weight.device), backward=True)
    g, w = rows(grad), rows(weight)
    grads = Gradients(blocks, rescale, constraint, need_blocks, need_rescale)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if need_weight else None
    width = config.block_i * config.tiles
    steps = config.steps or cdiv(n_i, width)
    splits = cdiv(n_i, width * steps)
    parts = grads.partials(splits)
    operands = (
        g, w, rescale, saved[0], parts, grads.blocks, grad_weight, grads.rescale, n_k, n_i, steps,
        g.stride(0), w.stride(0),
    )  # fmt: skip
    flags = (rescale is not None, need_blocks, need_weight, need_rescale, parts is not None)
    if size <= MAX_SCALARS:
        _scalars_backward_kernel[(splits, n_k)](
            *operands, size, config.block_i, config.tiles, *flags, num_warps=config.num_warps
        )
    else:
        _dots_backward_kernel[(splits, n_k)](
            *operands, size, pad(size), shares(config.num_warps, w.dtype), config.block_i, *flags, precision(w.dtype),
            num_warps=config.num_warps, num_stages=1,
        )  # fmt: skip
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, saved[0], rescale)
    grad_blocks, grad_rescale = grads.result()
    return grad_blocks, grad_weight, grad_rescale
