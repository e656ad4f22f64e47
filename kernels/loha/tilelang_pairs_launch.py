"""LoHa's bypass through pairs of ranks: launch configs and launchers of the kernels in tilelang_pairs.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.tilelang_target import Target, build, dtype_name, sizes, target_of
from kernels.common.views import cdiv, rounded_up, sm_count
from kernels.loha import tilelang_pairs as kernels
from kernels.loha.grads import Grads, new_grads
from kernels.loha.pairs import pair_rank
from kernels.loha.tilelang_reduce import reduce_grads

_PLAIN = ("disable_warp_specialized",)
Factors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Expand:
    """Launch of `expand`: a block makes `block_n` columns of all pairs; it looks for the largest by `chunk`."""

    block_n: int = 64
    chunk: int = 1024
    threads: int = 256
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Project:
    """Launch of `project`: a block makes a tile of z from `span` columns of x, `block_n` at a time."""

    block_t: int
    block_p: int
    block_n: int
    span: int
    threads: int = 128
    stages: int = 3
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Combine:
    """Launch of `combine`: a block makes `block` vectors of four."""

    block: int = 128
    threads: int = 128


@dataclass(frozen=True)
class Apply:
    """Launch of `apply`: the tile of y that a block makes, `block_p` pairs at a time."""

    block_t: int
    block_n: int
    block_p: int
    threads: int = 128
    stages: int = 3
    staged: bool = True
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Contract:
    """Launch of `contract`: a block sums over `span` tokens, `block_t` at a time, for `block_n` columns."""

    block_t: int
    block_n: int
    span: int
    threads: int = 128
    stages: int = 2
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Pairs:
    """The launches of the bypass through pairs that a shape decides."""

    project: Project
    apply: Apply
    contract: Contract


def _stages(most: int, stage_bytes: int, target: Target) -> int:
    """Pipeline stages up to `most` that fit the card's shared memory beside a few small arrays."""
    return max(1, min(most, (target.shared_bytes - 4096) // stage_bytes))


def expand_config(target: Target) -> Expand:
    """D's and U's launch."""
    return Expand(32) if target.cpu else Expand()


def project_config(n_t: int, n_n: int, n_p: int, dtype: torch.dtype, target: Target, sms: int) -> Project:
    """z's launch: full tensor-core tiles where the tokens fill the SMs, else smaller ones and a split of the sum."""
    if target.cpu:
        return Project(16, min(n_p, 32), 32, 64)
    if dtype is torch.float32:
        block_t, block_p, block_n, threads = 64, min(n_p, 64), 32, 128
    elif n_t >= 64 * sms:
        block_t, block_p, block_n, threads = 128, n_p, 64, 256
    else:
        block_t, block_p, block_n, threads = 64, min(n_p, 64 if n_t <= 256 else 128), 64, 128
    tiles = cdiv(n_t, block_t) * cdiv(n_p, block_p)
    steps = cdiv(n_n, block_n)
    per_split = cdiv(steps, max(1, min(16, 2 * sms // tiles, steps)))
    stages = _stages(min(3, per_split), (block_t + block_p) * block_n * dtype.itemsize, target)
    return Project(block_t, block_p, block_n, per_split * block_n, threads, stages)


def apply_config(n_t: int, n_n: int, n_p: int, dtype: torch.dtype, target: Target, sms: int) -> Apply:
    """y's launch: the largest tile that still gives every SM a block."""
    if target.cpu:
        return Apply(16, 32, min(n_p, 32))
    if dtype is torch.float32:
        return Apply(64, 64, min(n_p, 32))
    block_p = min(n_p, 64)
    if cdiv(n_t, 128) * cdiv(n_n, 128) >= 2 * sms:
        return Apply(128, 128, block_p, 256, _stages(min(3, n_p // block_p), 3 * 128 * block_p * 2, target))
    return Apply(64, 64, block_p, 128, _stages(min(3, n_p // block_p), 3 * 64 * block_p * 2, target))


def contract_config(n_t: int, n_n: int, n_p: int, dtype: torch.dtype, target: Target, sms: int) -> Contract:
    """A factor gradient's launch. The tokens are split where that fills the SMs better."""
    if target.cpu:
        return Contract(16, 32, 64)
    if dtype is torch.float32:
        block_t, block_n, threads = 32, 32, 256
    else:
        block_t, block_n, threads = 64, 64, 128 if n_t <= 256 else 256
    tiles = cdiv(n_n, block_n)
    most = min(16, cdiv(n_t, 4 * block_t))
    parts = min(range(1, most + 1), key=lambda k: cdiv(tiles * k, sms) / k * (1 + 0.01 * k))
    steps = rounded_up(cdiv(cdiv(n_t, parts), block_t))
    stages = _stages(min(2, steps), block_t * (block_n + n_p) * dtype.itemsize, target)
    return Contract(block_t, block_n, steps * block_t, threads, stages)


def expand(factors: Factors) -> tuple[Tensor, Tensor, Tensor]:
    """(D[P, I], U[P, O], what the rows of each were divided by [2, P]); padded pairs are zero rows."""
    up1, down1, up2, down2 = factors
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    target, rank = target_of(up1), pair_rank(n_r)
    config = expand_config(target)
    d, u = up1.new_empty((rank**2, n_i)), up1.new_empty((rank**2, n_o))
    divided = up1.new_empty((2, rank**2), dtype=torch.float32)
    run = build(
        kernels.expand,
        target,
        **sizes(target, I=n_i, O=n_o, R=n_r),
        RANK=rank,
        dtype=dtype_name(up1.dtype),
        config=config,
    )
    run(down1, down2, up1, up2, d, u, divided)
    return d, u, divided


def project(
    a: Tensor, pairs: Tensor, factors: Tensor, need_low: bool, config: Project | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(high, low, factor) with factor · (high + low) = (a[T, N] @ pairs[P, N]ᵀ) ∘ factors[0] ∘ factors[1]."""
    (n_t, n_n), n_p = a.shape, pairs.shape[0]
    target, dtype = target_of(a), dtype_name(a.dtype)
    config = config or project_config(n_t, n_n, n_p, a.dtype, target, sm_count(a.device))
    splits = cdiv(n_n, config.span)
    parts = a.new_empty((splits, n_t, n_p), dtype=torch.float32)
    tops = a.new_empty((splits, cdiv(n_t, config.block_t), n_p // config.block_p), dtype=torch.float32)
    build(kernels.project, target, **sizes(target, N=n_n), P=n_p, dtype=dtype, config=config)(
        a, pairs, factors, parts, tops
    )
    need_low = need_low and a.dtype is not torch.float32
    high = a.new_empty((n_t, n_p))
    low = a.new_empty((n_t, n_p)) if need_low else None
    factor = a.new_empty((1,), dtype=torch.float32)
    build(kernels.combine, target, splits=splits, dtype=dtype, need_low=need_low, config=Combine())(
        parts.view(splits, -1, 4), tops.view(-1), high.view(-1, 4), None if low is None else low.view(-1, 4), factor
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
    target = target_of(high)
    run = build(
        kernels.apply,
        target,
        **sizes(target, N=n_n),
        P=n_p,
        dtype=dtype_name(high.dtype),
        out_dtype=dtype_name(out.dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        has_low=low is not None,
        config=config or apply_config(n_t, n_n, n_p, high.dtype, target, sm_count(high.device)),
    )
    run(high, low, factor, pairs, base, out, scale)


def contract(
    a: Tensor,
    z: Tensor,
    z_factor: Tensor,
    factors: Tensor,
    f1: Tensor,
    f2: Tensor,
    by_rank: bool,
    needs: tuple[bool, bool],
    config: Contract | None,
) -> tuple[Tensor | None, Grads]:
    """(partials, room for the gradients of f1 and f2 that they sum to)."""
    (n_t, n_n), n_r = a.shape, f1.shape[0 if by_rank else 1]
    target = target_of(a)
    config = config or contract_config(n_t, n_n, z.shape[1], a.dtype, target, sm_count(a.device))
    parts, grads = new_grads(f1, f2, needs, cdiv(n_t, config.span))
    if parts is None:
        return parts, grads
    run = build(
        kernels.contract,
        target,
        **sizes(target, N=n_n, R=n_r),
        RANK=pair_rank(n_r),
        dtype=dtype_name(a.dtype),
        by_rank=by_rank,
        needs=needs,
        config=config,
    )
    run(a, z, z_factor, factors, f1, f2, parts.view(-1, *f1.shape))
    return parts, grads


def forward(
    x: Tensor,
    factors: Factors,
    scale: float,
    base: Tensor | None,
    out: Tensor,
    needs: tuple[bool, ...],
    config: Pairs | None,
) -> tuple[Tensor, ...]:
    """Fills out[T, O] from x[T, I] and (up1, down1, up2, down2); returns what `pairs.saved_specs` lists."""
    d, u, divided = expand(factors)
    z, low, factor = project(x, d, divided, True, config.project if config else None)
    apply(z, low, factor, u, base, out, scale, config.apply if config else None)
    if not any(needs):
        return ()
    return (d, u, divided, z, factor) if needs[1] or needs[3] else (d, u, divided)


def backward(
    g: Tensor,
    x: Tensor,
    factors: Factors,
    scale: float,
    saved: tuple[Tensor, ...],
    grad_x: Tensor | None,
    needs: tuple[bool, ...],
    config: Pairs | None,
) -> tuple[Tensor | None, ...]:
    """Fills grad_x[T, I] where given; returns the gradients of (up1, down1, up2, down2) that `needs` asks for."""
    up1, down1, up2, down2 = factors
    d, u, divided = saved[:3]
    launch = config.contract if config else None
    ups: Grads = (None, None)
    downs: Grads = (None, None)
    up_parts = down_parts = None
    if needs[0] or needs[2]:
        up_parts, ups = contract(g, saved[3], saved[4], divided[1], up1, up2, False, (needs[0], needs[2]), launch)
    if grad_x is not None or needs[1] or needs[3]:
        h, low, h_factor = project(g, u, divided, grad_x is not None, config.project if config else None)
        if grad_x is not None:
            apply(h, low, h_factor, d, None, grad_x, scale, config.apply if config else None)
        down_needs = (needs[1], needs[3])
        down_parts, downs = contract(x, h, h_factor, divided[0], down1, down2, True, down_needs, launch)
    reduce_grads((up_parts, down_parts), (ups, downs), scale)
    return ups[0], downs[0], ups[1], downs[1]
