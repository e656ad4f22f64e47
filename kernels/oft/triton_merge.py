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
    solve,
    solve_lanes,
    solve_scalars,
)
from kernels.common.plans import planned
from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, rows, sm_count


@dataclass(frozen=True)
class Columns:
    """Launch of a merge kernel: a program takes one block's rows, `block_i` columns at a time.

    tiles: how many such tiles it loads before it works on the first. steps (backward): how many times it does that, 0
    meaning to the last column, with nothing left to sum. stages: tiles in flight where the loop is pipelined instead.
    """

    block_i: int
    num_warps: int
    tiles: int = 1
    steps: int = 1
    stages: int = 3


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


@planned
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
            value += tl.load(base + (row + offs_n) * stride_bo + offs_i + t * BLOCK_I, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(out + (row + offs_n) * n_i + offs_i + t * BLOCK_I, value.to(out.dtype.element_ty), mask=mask)


@planned
@triton.jit
def _dots_backward_kernel(
    grad, weight, rescale, delta, parts, grad_blocks, grad_weight, grad_rescale, n_k, n_i, steps, stride_go, stride_wo,
    S: tl.constexpr, P: tl.constexpr, BLOCK_I: tl.constexpr, LANES: tl.constexpr,
    HAS_RESCALE: tl.constexpr, NEED_BLOCKS: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_RESCALE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_W = M G and P = W Gᵀ of one block over a span of columns, W and G read once.

    P sums over columns, which LANES (one a warp) share; their sums meet at the end.
    """
    NEED_P: tl.constexpr = NEED_BLOCKS or NEED_RESCALE
    pid_i, pid_k = tl.program_id(0), tl.program_id(1)
    offs_n = tl.arange(0, P)[:, None]
    row = pid_k.to(tl.int64) * S
    if NEED_WEIGHT:
        high, low, factor = rotation(delta, rescale, pid_k, n_k, grad.dtype.element_ty, S, 1, P, False, HAS_RESCALE)
        high, low = tl.reshape(high, (P, P)), tl.reshape(low, (P, P))
    lanes = tl.zeros((LANES, P, P), tl.float32)
    for step in range(steps):
        offs_i = (pid_i * steps + step) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
        mask = (offs_n < S) & (offs_i < n_i)
        g = tl.load(grad + (row + offs_n) * stride_go + offs_i, mask=mask, other=0.0)
        if NEED_P:
            w = tl.load(weight + (row + offs_n) * stride_wo + offs_i, mask=mask, other=0.0)
            left = tl.permute(tl.reshape(w, (P, LANES, BLOCK_I // LANES)), (1, 0, 2))
            right = tl.permute(tl.reshape(g, (P, LANES, BLOCK_I // LANES)), (1, 2, 0))
            lanes = tl.dot(left, right, lanes, input_precision=PRECISION)
        if NEED_WEIGHT:
            value = dot_left(high, low, g, PRECISION) * factor
            at = grad_weight + (row + offs_n) * n_i + offs_i
            tl.store(at, value.to(grad_weight.dtype.element_ty), mask=mask)
    if NEED_P:
        product = tl.sum(lanes, axis=0)
        if SPLIT:
            offs_m = tl.arange(0, P)[None, :]
            at = parts + ((pid_i.to(tl.int64) * n_k + pid_k) * S + offs_n) * S + offs_m
            tl.store(at, product, mask=(offs_n < S) & (offs_m < S))
        else:
            finish_tile(
                product[None, :, :], grad_blocks, grad_rescale, delta, rescale, pid_k, n_k, S, 1, P,
                NEED_BLOCKS, NEED_RESCALE, HAS_RESCALE,
            )  # fmt: skip


def merge_config(n_k: int, size: int, n_i: int, dtype: torch.dtype, sms: int, *, backward: bool) -> Columns:
    """A merge kernel's launch: a few programs for every SM, as long as each has a few tiles of columns."""
    if size <= MAX_SCALARS:
        return Columns(256, 1, tiles=2, steps=0 if backward and n_i <= 2048 else 1)
    block_i = 256 if pad(size) <= 16 and dtype is not torch.float32 else 64
    tiles = cdiv(n_i, block_i)
    spans = min(tiles, max(1, cdiv(3 * sms, n_k)))
    if backward:
        return Columns(block_i, 4, steps=cdiv(tiles, spans))
    # Programs past one an SM find D solved: they can be short.
    return Columns(block_i, 4, tiles=1 if n_k * tiles > sms else min(cdiv(tiles, spans), 5))


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
    inline = solve(blocks, delta, shrink, grid[0] * grid[1], sm_count(weight.device))
    _dots_kernel[grid](
        *operands, size, pad(size), config.block_i, config.tiles, *flags, inline, precision(w.dtype),
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
            *operands, size, pad(size), config.block_i, config.num_warps, *flags, precision(w.dtype),
            num_warps=config.num_warps, num_stages=config.stages,
        )  # fmt: skip
    if parts is not None:
        finish(parts, grads.blocks, grads.rescale, saved[0], rescale)
    grad_blocks, grad_rescale = grads.result()
    return grad_blocks, grad_weight, grad_rescale
