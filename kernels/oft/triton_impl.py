"""Diag-OFT in Triton; D = R - I, M = D diag(r) + diag(r - 1), or D itself without rescale.

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
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.cayley import MAX_SCALARS, Gradients, check_size, shrink_factor
from kernels.common.cayley_triton import (
    dot_left,
    dot_right,
    finish,
    finish_scalars,
    finish_tile,
    rotation,
    solve,
    solve_lanes,
    solve_scalars,
)
from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, rows, sm_count


@dataclass(frozen=True)
class Columns:
    """Launch of a merge kernel: a program takes one block's rows over `tiles` tiles of `block_i` columns."""

    block_i: int
    tiles: int
    num_warps: int


@dataclass(frozen=True)
class Tokens:
    """Launch of a bypass kernel: a program takes `blocks` blocks' channels over `tiles` tiles of `block_t` tokens."""

    block_t: int
    tiles: int
    blocks: int
    num_warps: int


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
                value += tl.load(base + (row + m) * stride_bo + offs_i + t * BLOCK_I, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + (row + m) * n_i + offs_i + t * BLOCK_I, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _scalars_backward_kernel(
    grad, weight, rescale, delta, parts, grad_blocks, grad_weight, grad_rescale, n_k, n_i, stride_go, stride_wo,
    S: tl.constexpr, BLOCK_I: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """grad_W and P of one block of up to 4 rows over a span of columns; the gradients themselves where that is all of them."""
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    # Eight columns a thread: their part of each sum stays in the thread until the end.
    inner = tl.arange(0, BLOCK_I // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    offs_i = pid_i * (TILES * BLOCK_I) + inner
    row = pid_k.to(tl.int64) * S
    w, g, d, sums = (), (), (), ()
    for t in tl.static_range(TILES):
        mask = offs_i + t * BLOCK_I < n_i
        for n in tl.static_range(S):
            g = g + (tl.load(grad + (row + n) * stride_go + offs_i + t * BLOCK_I, mask=mask, other=0.0),)
            if NEED_BLOCKS or NEED_RESCALE:
                w = w + (tl.load(weight + (row + n) * stride_wo + offs_i + t * BLOCK_I, mask=mask, other=0.0),)
    for i in tl.static_range(S * S):
        d = d + (tl.load(delta + row * S + i),)
        sums = sums + (tl.zeros((BLOCK_I // 8,), tl.float32),)
    r = ()
    for m in tl.static_range(S):
        if HAS_RESCALE:
            r = r + (tl.load(rescale + row + m).to(tl.float32),)
        else:
            r = r + (1.0,)
    for t in tl.static_range(TILES):
        if NEED_BLOCKS or NEED_RESCALE:
            added = ()
            for n in tl.static_range(S):
                for m in tl.static_range(S):
                    product = w[t * S + n].to(tl.float32) * g[t * S + m].to(tl.float32)
                    added = added + (sums[n * S + m] + tl.sum(product, axis=1),)
            sums = added
        if NEED_WEIGHT:
            for n in tl.static_range(S):
                value = (r[n] - 1.0) * g[t * S + n].to(tl.float32)
                for m in tl.static_range(S):
                    value += d[n * S + m] * r[m] * g[t * S + m].to(tl.float32)
                at = grad_weight + (row + n) * n_i + offs_i + t * BLOCK_I
                tl.store(at, value.to(grad_weight.dtype.element_ty), mask=offs_i + t * BLOCK_I < n_i)
    if NEED_BLOCKS or NEED_RESCALE:
        product = ()
        for i in tl.static_range(S * S):
            product = product + (tl.sum(sums[i], axis=0),)
        if SPLIT:
            at = parts + (pid_i.to(tl.int64) * n_k * S + row) * S
            for i in tl.static_range(S * S):
                tl.store(at + i, product[i])
        else:
            scaled = ()
            for n in tl.static_range(S):
                for m in tl.static_range(S):
                    scaled = scaled + (r[m] * product[n * S + m],)
            if NEED_RESCALE:
                for m in tl.static_range(S):
                    value = product[m * S + m]
                    for n in tl.static_range(S):
                        value += d[n * S + m] * product[n * S + m]
                    tl.store(grad_rescale + row + m, value.to(grad_rescale.dtype.element_ty))
            if NEED_BLOCKS:
                result = finish_scalars(scaled, d, S)
                for i in tl.static_range(S * S):
                    tl.store(grad_blocks + row * S + i, result[i].to(grad_blocks.dtype.element_ty))


@triton.jit
def _dots_kernel(
    blocks, weight, rescale, shrink, base, out, delta, n_k, n_i, stride_wo, stride_bo,
    S: tl.constexpr, P: tl.constexpr, BLOCK_I: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, HAS_SHRINK: tl.constexpr, HAS_BASE: tl.constexpr, INLINE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """ΔW of one block: its columns are on their way while D is solved, then Mᵀ @ tile by tensor cores."""
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    offs_n = tl.arange(0, P)[:, None]
    offs_i = pid_i * (TILES * BLOCK_I) + tl.arange(0, BLOCK_I)[None, :]
    row = pid_k.to(tl.int64) * S
    tiles = ()
    for t in tl.static_range(TILES):
        at = weight + (row + offs_n) * stride_wo + offs_i + t * BLOCK_I
        tiles = tiles + (tl.load(at, mask=(offs_n < S) & (offs_i + t * BLOCK_I < n_i), other=0.0),)
    if INLINE:
        factor = 1.0
        if HAS_SHRINK:
            factor = tl.load(shrink)
        solve_lanes(blocks, delta, factor, pid_k, n_k, S, 1)
        tl.debug_barrier()
    high, low, factor = rotation(delta, rescale, pid_k, n_k, weight.dtype.element_ty, S, 1, P, True, HAS_RESCALE)
    high, low = tl.reshape(high, (P, P)), tl.reshape(low, (P, P))
    for t in tl.static_range(TILES):
        mask = (offs_n < S) & (offs_i + t * BLOCK_I < n_i)
        value = dot_left(high, low, tiles[t], PRECISION) * factor
        if HAS_BASE:
            value += tl.load(base + (row + offs_n) * stride_bo + offs_i + t * BLOCK_I, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + (row + offs_n) * n_i + offs_i + t * BLOCK_I, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _dots_backward_kernel(
    grad, weight, rescale, delta, parts, grad_blocks, grad_weight, grad_rescale, n_k, n_i, stride_go, stride_wo,
    S: tl.constexpr, P: tl.constexpr, BLOCK_I: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_W = M G and P = W Gᵀ of one block over a span of columns, W and G read once."""
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    offs_n = tl.arange(0, P)[:, None]
    offs_i = pid_i * (TILES * BLOCK_I) + tl.arange(0, BLOCK_I)[None, :]
    row = pid_k.to(tl.int64) * S
    w, g = (), ()
    for t in tl.static_range(TILES):
        mask = (offs_n < S) & (offs_i + t * BLOCK_I < n_i)
        g = g + (tl.load(grad + (row + offs_n) * stride_go + offs_i + t * BLOCK_I, mask=mask, other=0.0),)
        if NEED_BLOCKS or NEED_RESCALE:
            w = w + (tl.load(weight + (row + offs_n) * stride_wo + offs_i + t * BLOCK_I, mask=mask, other=0.0),)
    if NEED_WEIGHT:
        high, low, factor = rotation(delta, rescale, pid_k, n_k, weight.dtype.element_ty, S, 1, P, False, HAS_RESCALE)
        high, low = tl.reshape(high, (P, P)), tl.reshape(low, (P, P))
    product = tl.zeros((P, P), tl.float32)
    for t in tl.static_range(TILES):
        if NEED_WEIGHT:
            value = dot_left(high, low, g[t], PRECISION) * factor
            at = grad_weight + (row + offs_n) * n_i + offs_i + t * BLOCK_I
            mask = (offs_n < S) & (offs_i + t * BLOCK_I < n_i)
            tl.store(at, value.to(grad_weight.dtype.element_ty), mask=mask)
        if NEED_BLOCKS or NEED_RESCALE:
            product = tl.dot(w[t], tl.trans(g[t]), product, input_precision=PRECISION)
    if NEED_BLOCKS or NEED_RESCALE:
        if SPLIT:
            offs_m = tl.arange(0, P)[None, :]
            at = parts + ((pid_i.to(tl.int64) * n_k + pid_k) * S + offs_n) * S + offs_m
            tl.store(at, product, mask=(offs_n < S) & (offs_m < S))
        else:
            finish_tile(
                product[None, :, :], grad_blocks, grad_rescale, delta, rescale, pid_k, n_k, S, 1, P,
                NEED_BLOCKS, NEED_RESCALE, HAS_RESCALE,
            )  # fmt: skip


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
def _by_token(tile, BLOCK_T: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """[N, T, P] as [T, N · P]."""
    return tl.reshape(tl.permute(tile, (1, 0, 2)), (BLOCK_T, N * P))


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


@triton.jit
def _bypass_backward_kernel(
    grad, y, rescale, delta, parts, grad_y, grad_blocks, grad_rescale, n_t, n_k, stride_gt, stride_yt,
    S: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, TILES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, NEED_Y: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_y = g Mᵀ and P = yᵀ g of N blocks over a span of tokens, y and g read once."""
    pid_k, pid_t = tl.program_id(0), tl.program_id(1)
    first = pid_k * N
    lanes = tl.arange(0, N * P)[None, :]
    offs_c = (first + lanes // P) * S + lanes % P
    mask_c = (first + lanes // P < n_k) & (lanes % P < S)
    g, tokens = (), ()
    for t in tl.static_range(TILES):
        start = (pid_t * TILES + t) * BLOCK_T
        at, mask = _tokens(grad, start, offs_c, mask_c, n_t, stride_gt, BLOCK_T)
        g = g + (tl.load(at, mask=mask, other=0.0),)
        if NEED_BLOCKS or NEED_RESCALE:
            at, mask = _tokens(y, start, offs_c, mask_c, n_t, stride_yt, BLOCK_T)
            tokens = tokens + (tl.load(at, mask=mask, other=0.0),)
    if NEED_Y:
        high, low, factor = rotation(delta, rescale, first, n_k, y.dtype.element_ty, S, N, P, True, HAS_RESCALE)
    product = tl.zeros((N, P, P), tl.float32)
    for t in tl.static_range(TILES):
        tile = _by_block(g[t], BLOCK_T, N, P)
        if NEED_Y:
            value = _by_token(dot_right(tile, high, low, PRECISION) * factor, BLOCK_T, N, P)
            at, mask = _tokens(grad_y, (pid_t * TILES + t) * BLOCK_T, offs_c, mask_c, n_t, n_k * S, BLOCK_T)
            tl.store(at, value.to(grad_y.dtype.element_ty), mask=mask)
        if NEED_BLOCKS or NEED_RESCALE:
            left = tl.permute(tl.reshape(tokens[t], (BLOCK_T, N, P)), (1, 2, 0))
            product = tl.dot(left, tile, product, input_precision=PRECISION)
    if NEED_BLOCKS or NEED_RESCALE:
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


def _pad(size: int) -> int:
    """The side of a block's tile: a power of two that tensor cores take."""
    return max(16, triton.next_power_of_2(size))


def merge_config(n_k: int, size: int, n_i: int, dtype: torch.dtype, sms: int, *, backward: bool) -> Columns:
    """A merge kernel's launch: wide rows, and enough programs for every SM."""
    if size <= MAX_SCALARS:
        return Columns(256, 1, 1)
    block_i = 256 if _pad(size) <= 16 and dtype is not torch.float32 else 64
    return Columns(block_i, 1, 4)


def bypass_config(n_t: int, n_k: int, size: int, dtype: torch.dtype, sms: int, *, backward: bool) -> Tokens:
    """A bypass kernel's launch: about 64 channels, and enough programs for every SM."""
    blocks = max(1, 64 // _pad(size))
    return Tokens(16 if n_t <= 256 else 64, 1, blocks, 4)


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
    inline = solve(blocks, delta, shrink)
    _dots_kernel[grid](
        *operands, size, _pad(size), config.block_i, config.tiles, *flags, inline, precision(w.dtype),
        num_warps=config.num_warps,
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
    config = config or merge_config(n_k, size, n_i, weight.dtype, sm_count(weight.device), backward=True)
    g, w = rows(grad), rows(weight)
    grads = Gradients(blocks, rescale, constraint, need_blocks, need_rescale)
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if need_weight else None
    splits = cdiv(n_i, config.block_i * config.tiles)
    parts = grads.partials(splits)
    operands = (
        g, w, rescale, saved[0], parts, grads.blocks, grad_weight, grads.rescale, n_k, n_i, g.stride(0), w.stride(0),
    )  # fmt: skip
    flags = (rescale is not None, need_blocks, need_weight, need_rescale, parts is not None)
    if size <= MAX_SCALARS:
        _scalars_backward_kernel[(splits, n_k)](
            *operands, size, config.block_i, config.tiles, *flags, num_warps=config.num_warps
        )
    else:
        _dots_backward_kernel[(splits, n_k)](
            *operands, size, _pad(size), config.block_i, config.tiles, *flags, precision(w.dtype),
            num_warps=config.num_warps,
        )  # fmt: skip
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, saved[0], rescale)
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
    check_size("oft_bypass", "triton", size)
    blocks, flat, bias = blocks.contiguous(), rows(y), None if base is None else rows(base)
    n_t = flat.shape[0]
    config = config or bypass_config(n_t, n_k, size, y.dtype, sm_count(y.device), backward=False)
    shrink = shrink_factor(blocks, constraint)
    out = torch.empty(y.shape, dtype=out_dtype, device=y.device)
    delta = torch.empty(blocks.shape, dtype=torch.float32, device=y.device)
    inline = solve(blocks, delta, shrink)
    _bypass_kernel[(cdiv(n_k, config.blocks), cdiv(n_t, config.block_t * config.tiles))](
        flat, blocks, rescale, shrink, bias, out, delta, n_t, n_k, flat.stride(0), 0 if bias is None else bias.stride(0),
        size, _pad(size), config.blocks, config.block_t, config.tiles,
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
    g, flat = rows(grad), rows(y)
    n_t = flat.shape[0]
    config = config or bypass_config(n_t, n_k, size, y.dtype, sm_count(y.device), backward=True)
    grads = Gradients(blocks, rescale, constraint, need_blocks, need_rescale)
    grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device) if need_y else None
    splits = cdiv(n_t, config.block_t * config.tiles)
    parts = grads.partials(splits)
    _bypass_backward_kernel[(cdiv(n_k, config.blocks), splits)](
        g, flat, rescale, saved[0], parts, grad_y, grads.blocks, grads.rescale, n_t, n_k, g.stride(0), flat.stride(0),
        size, _pad(size), config.blocks, config.block_t, config.tiles,
        rescale is not None, need_y, need_blocks, need_rescale, parts is not None, precision(y.dtype),
        num_warps=config.num_warps,
    )  # fmt: skip
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, saved[0], rescale)
    grad_blocks, grad_rescale = grads.result()
    return grad_y, grad_blocks, grad_rescale
