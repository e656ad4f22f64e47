"""LoHa's bypass through pairs of ranks: launch configs and launchers of the kernels in triton_pairs.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.triton_ops import precision
from kernels.common.views import cdiv, sm_count
from kernels.loha import triton_pairs as kernels
from kernels.loha.grads import new_grads
from kernels.loha.pairs import pair_rank
from kernels.loha.triton_reduce import reduce_grads


@dataclass(frozen=True)
class Project:
    """Launch of `project`: a program makes a tile of z from `span` columns of x, `block_n` at a time."""

    block_t: int
    block_p: int
    block_n: int
    span: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Apply:
    """Launch of `apply`: the tile of y that a program makes, `block_p` pairs at a time."""

    block_t: int
    block_n: int
    block_p: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Contract:
    """Launch of `contract`: a program sums over `span` tokens, `block_t` at a time, for `block_n` columns."""

    block_t: int
    block_n: int
    span: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Pairs:
    """The launches of the bypass through pairs."""

    project: Project
    apply: Apply
    contract: Contract


def project_config(n_t: int, n_n: int, n_p: int, dtype: torch.dtype, sms: int) -> Project:
    """z's launch: full tensor-core tiles where the tokens fill the SMs, else smaller ones and a split of the sum."""
    if dtype is torch.float32:
        block_t, block_p, block_n, num_warps = 32, min(n_p, 64), 32, 4
    elif n_t >= 64 * sms:
        block_t, block_p, block_n, num_warps = 128, n_p, 64, 8
    else:
        block_t, block_p, block_n, num_warps = 64, min(n_p, 64 if n_t <= 256 else 128), 64, 4
    tiles = cdiv(n_t, block_t) * cdiv(n_p, block_p)
    splits = max(1, min(16, 2 * sms // tiles, cdiv(n_n, block_n)))
    span = cdiv(cdiv(n_n, splits), block_n) * block_n
    return Project(block_t, block_p, block_n, span, num_warps, 3)


def apply_config(n_t: int, n_n: int, n_p: int, dtype: torch.dtype, sms: int) -> Apply:
    """y's launch: the largest tile that still gives every SM a program."""
    if dtype is torch.float32:
        return Apply(32, 64, min(n_p, 32), 4, 3)
    block_p = min(n_p, 64)
    if cdiv(n_t, 128) * cdiv(n_n, 128) >= 2 * sms:
        return Apply(128, 128, block_p, 8, 3)
    return Apply(64, 64, block_p, 4, 3)


def contract_config(n_t: int, n_n: int, n_p: int, dtype: torch.dtype, sms: int) -> Contract:
    """The factor gradients' launch; n_n: the columns of all jobs. Tokens are split where that fills the SMs better."""
    if dtype is torch.float32:
        block_t, block_n, num_warps = 16, 32, 8
    else:
        block_t, block_n, num_warps = 64, *((64, 4) if n_t <= 256 else (128, 8))
    tiles = cdiv(n_n, block_n)
    most = min(16, cdiv(n_t, 4 * block_t))
    # Waves of programs over the part of the work in each, and a little for the partials that every part writes.
    parts = min(range(1, most + 1), key=lambda k: cdiv(tiles * k, sms) / k * (1 + 0.01 * k))
    span = cdiv(cdiv(n_t, parts), block_t) * block_t
    return Contract(block_t, block_n, span, num_warps, 3)


def expand(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(D[P, I], U[P, O], what the rows of each were divided by [2, P]); padded pairs are zero rows."""
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    rank = pair_rank(n_r)
    n_p = rank**2
    d, u = up1.new_empty((n_p, n_i)), up1.new_empty((n_p, n_o))
    factors = up1.new_empty((2, n_p), dtype=torch.float32)
    block_n = 128
    programs = cdiv(n_i, block_n)
    kernels.expand_kernel[(programs + cdiv(n_o, block_n),)](
        down1, down2, up1, up2, d, u, factors, n_i, n_o, n_r, programs,
        *down1.stride(), *down2.stride(), *up1.stride(), *up2.stride(),
        block_n, 512, rank, up1.dtype is torch.float16, num_warps=8,
    )  # fmt: skip
    return d, u, factors


def project(
    a: Tensor, pairs: Tensor, factors: Tensor, need_low: bool, config: Project | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(high, low, factor) with factor · (high + low) = (a[T, N] @ pairs[P, N]ᵀ) ∘ factors[0] ∘ factors[1]."""
    (n_t, n_n), n_p = a.shape, pairs.shape[0]
    config = config or project_config(n_t, n_n, n_p, a.dtype, sm_count(a.device))
    scaled = a.dtype is torch.float16
    grid = (cdiv(n_p, config.block_p), cdiv(n_t, config.block_t), cdiv(n_n, config.span))
    parts = a.new_empty((grid[2], n_t, n_p), dtype=torch.float32)
    tops = a.new_empty(grid, dtype=torch.float32)
    kernels.project_kernel[grid](
        a, pairs, factors, parts, tops, n_t, n_n, n_p, config.span, a.stride(0),
        config.block_t, config.block_p, config.block_n, scaled, precision(a.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    need_low = need_low and a.dtype is not torch.float32
    high = a.new_empty((n_t, n_p))
    low = a.new_empty((n_t, n_p)) if need_low else None
    factor = a.new_empty((1,), dtype=torch.float32)
    block = 1024 if high.numel() >= 1 << 20 else 256
    kernels.combine_kernel[(cdiv(high.numel(), block),)](
        parts, tops, high, low, factor, grid[2], tops.numel(), high.numel(), block, 256, scaled, need_low, num_warps=4
    )
    return high, low, factor


def apply(
    high: Tensor,
    low: Tensor | None,
    factor: Tensor,
    pairs: Tensor,
    base: Tensor | None,
    out: Tensor,
    scale: float,
    config: Apply | None,
) -> None:
    """out[T, N] = scale · factor · (high + low)[T, P] @ pairs[P, N] + base[T, N]."""
    (n_t, n_p), n_n = high.shape, pairs.shape[1]
    config = config or apply_config(n_t, n_n, n_p, high.dtype, sm_count(high.device))
    kernels.apply_kernel[(cdiv(n_n, config.block_n), cdiv(n_t, config.block_t))](
        high, low, factor, pairs, base, out, n_t, n_n, n_p, scale, 0 if base is None else base.stride(0),
        config.block_t, config.block_n, config.block_p, base is not None, low is not None, precision(high.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def forward(
    x: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    base: Tensor | None,
    out: Tensor,
    needs: tuple[bool, ...],
    config: Pairs | None,
) -> tuple[Tensor, ...]:
    """Fills out[T, O] from x[T, I] and (up1, down1, up2, down2); returns what `pairs.saved_specs` lists."""
    d, u, row_factors = expand(*factors)
    z, low, factor = project(x, d, row_factors, True, config.project if config else None)
    apply(z, low, factor, u, base, out, scale, config.apply if config else None)
    if not any(needs):
        return ()
    return (d, u, row_factors, z, factor) if needs[1] or needs[3] else (d, u, row_factors)


def backward(
    g: Tensor,
    x: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    saved: tuple[Tensor, ...],
    grad_x: Tensor | None,
    needs: tuple[bool, ...],
    config: Pairs | None,
) -> tuple[Tensor | None, ...]:
    """Fills grad_x[T, I] where given; returns the gradients of (up1, down1, up2, down2) that `needs` asks for."""
    up1, down1, up2, down2 = factors
    d, u, row_factors = saved[:3]
    need_ups, need_downs = needs[0] or needs[2], needs[1] or needs[3]
    h = h_factor = None
    if grad_x is not None or need_downs:
        h, low, h_factor = project(g, u, row_factors, grad_x is not None, config.project if config else None)
        if grad_x is not None:
            apply(h, low, h_factor, d, None, grad_x, scale, config.apply if config else None)
    if not (need_ups or need_downs):
        return None, None, None, None
    z, z_factor = saved[3:] if need_ups else (None, None)
    (n_t, n_i), (n_o, n_r), n_p = x.shape, up1.shape, d.shape[0]
    columns_o, columns_i = n_o if need_ups else 0, n_i if need_downs else 0
    launch = config.contract if config else None
    launch = launch or contract_config(n_t, columns_o + columns_i, n_p, x.dtype, sm_count(x.device))
    splits = cdiv(n_t, launch.span)
    up_parts, ups = new_grads(up1, up2, (needs[0], needs[2]), splits)
    down_parts, downs = new_grads(down1, down2, (needs[1], needs[3]), splits)
    up_programs = cdiv(columns_o, launch.block_n)
    kernels.contract_kernel[(up_programs + cdiv(columns_i, launch.block_n), splits)](
        g, z, z_factor, x, h, h_factor, row_factors, up1, up2, down1, down2, up_parts, down_parts,
        n_t, n_o, n_i, n_r, launch.span, up_programs, g.stride(0), x.stride(0),
        *up1.stride(), *down1.stride(), *up2.stride(), *down2.stride(),
        launch.block_t, launch.block_n, pair_rank(n_r), *needs, precision(x.dtype),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    reduce_grads((up_parts, down_parts), (ups, downs), scale)
    return ups[0], downs[0], ups[1], downs[1]
