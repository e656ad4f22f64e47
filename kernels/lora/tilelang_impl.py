"""LoRA in TileLang, by the same steps as in Triton.

    merge     ΔW[O, I] = scale · up[O, R] @ down[R, I]                  one launch, a tile of ΔW a block
      backward  grad_up = scale · G @ downᵀ, grad_down = scale · upᵀ @ G    G read once (`dual`), then one reduction
    bypass    z[T, R] = x @ downᵀ, y[T, O] = scale · z @ upᵀ            two launches, the first split over I
      backward  h = G @ up, grad_up = scale · Gᵀ @ z                        G read once (`dual`)
                grad_x = scale · h @ down, grad_down = scale · hᵀ @ x       x read once, then one reduction

Sums over more than one block go through float32 partials that a reduction adds in a fixed order: results are
deterministic. z and h stay float32; where they feed a 16-bit product they are scaled by a power of two if need be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.errors import UnsupportedCase
from kernels.common.tilelang_ops import reduce_partials
from kernels.common.tilelang_target import Target, build, dtype_name, ready, sizes, target_of
from kernels.common.views import cdiv, rows, sm_count
from kernels.lora import tilelang_kernels as kernels

MAX_RANK = 256
_PLAIN = ("disable_warp_specialized",)


@dataclass(frozen=True)
class Merge:
    """Launch of the merge: the tile of ΔW that a block writes, `staged` through shared memory or not."""

    block_o: int
    block_i: int
    threads: int = 128
    staged: bool = True
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Dual:
    """Launch of a backward pass over G or x: a block walks `span` rows, `block_m` at a time, over `block_n` columns."""

    block_m: int
    block_n: int
    span: int
    threads: int = 128
    stages: int = 3
    staged: bool = True
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Down:
    """Launch of z = x @ downᵀ: a block makes `block_t` rows of z from `span` columns of x, `block_i` at a time."""

    block_t: int
    block_i: int
    span: int
    threads: int = 128
    stages: int = 3
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Up:
    """Launch of y = scale · z @ upᵀ: the tile of y that a block writes, `staged` through shared memory or not."""

    block_t: int
    block_o: int
    threads: int = 128
    staged: bool = True
    passes: tuple[str, ...] = _PLAIN


def merge_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int) -> Merge:
    """The merge's tile: large where ΔW fills the SMs many times over, small where it does not."""
    if target.cpu:
        return Merge(32, 32)
    if dtype is torch.float32 or n_r > 64:
        return Merge(64, 64)
    if cdiv(n_o, 64) * cdiv(n_i, 128) >= 4 * sms:
        return Merge(64, 128)
    return Merge(64, 64)


def dual_config(n_m: int, n_n: int, n_r: int, dtype: torch.dtype, target: Target, sms: int, whole_span: bool) -> Dual:
    """The strip of a backward pass: as wide as registers allow, as long as leaves every SM a block.

    `whole_span`: the rows' rank-sized operand is held for the whole span at once, which bounds the span.
    """
    if target.cpu:
        return Dual(16, 32, 64)
    rank = _rank_block("lora", n_r, target)
    threads = 128 if rank <= 32 else 256
    if dtype is torch.float32:
        block_m, block_n = 32, 64 if rank <= 32 else 32
    else:
        block_m, block_n = 64 if target.arch == "sm_90a" else 32, 256 if rank <= 32 else 128
    if n_m * n_n < 1 << 21:
        block_n = min(block_n, 64)
    most = max(1, 64 * threads // (rank * block_m)) if whole_span else 64
    steps = min(cdiv(cdiv(n_m, max(1, cdiv(2 * sms, cdiv(n_n, block_n)))), block_m), most)
    # Three leading bits: a few builds serve every number of rows.
    grain = 1 << max(0, steps.bit_length() - 3)
    steps = min(cdiv(steps, grain) * grain, most)
    return Dual(block_m, block_n, steps * block_m, threads, min(3, steps))


def down_config(n_t: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int) -> Down:
    """z's launch: the I axis is split until every SM has a block."""
    if target.cpu:
        return Down(16, 32, 64)
    block_t = 32 if n_t <= 256 else 64
    block_i = 64 if dtype is torch.float32 or n_r > 64 else 128
    splits = max(1, min(cdiv(n_i, block_i), sms // cdiv(n_t, block_t)))
    steps = cdiv(cdiv(n_i, splits), block_i)
    return Down(block_t, block_i, steps * block_i, 128 if block_t > 32 else 64, min(3, steps))


def up_config(n_t: int, n_o: int, n_r: int, dtype: torch.dtype, target: Target, sms: int) -> Up:
    """y's launch: smaller tiles where there are few tokens."""
    if target.cpu:
        return Up(16, 32)
    return Up(32 if n_t <= 256 else 64, 64 if dtype is torch.float32 or n_r > 64 else 128)


def merge_forward(
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Merge | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[O, I]; saves nothing."""
    target = target_of(up)
    up, down, base = ready(up), ready(down), _base(base, target)
    (n_o, n_r), n_i = up.shape, down.shape[1]
    run = build(
        kernels.merge,
        target,
        **sizes(target, I=n_i, R=n_r),
        BLOCK_R=_rank_block("lora", n_r, target),
        dtype=dtype_name(up.dtype),
        out_dtype=dtype_name(out_dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        config=config or merge_config(n_o, n_i, n_r, up.dtype, target, sm_count(up.device)),
    )
    out = torch.empty((n_o, n_i), dtype=out_dtype, device=up.device)
    run(up, down, base, out, scale)
    return out, ()


def merge_backward(
    grad: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: Dual | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_up[O, R], grad_down[R, I])."""
    right_parts, left_parts = dual("lora", ready(grad), ready(down), ready(up), needs, True, config)
    outs = [
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if n else None
        for t, n in zip((up, down), needs, strict=True)
    ]
    reduce_partials((right_parts, left_parts), outs, scale)
    return tuple(outs)


def dual(
    op: str, g: Tensor, right: Tensor, left: Tensor, needs: tuple[bool, ...], by_rank: bool, config: Dual | None
) -> tuple[Tensor | None, Tensor | None]:
    """Float32 partials over G[M, N] of G @ right as [S, M, R] and of leftᵀ @ G, for `needs` = (right's, left's).

    left is [M, R]. by_rank: right is [R, N] and the second partials [S', R, N]; else [N, R] and [S', N, R].
    """
    (n_m, n_n), n_r = g.shape, left.shape[1]
    target = target_of(g)
    whole_span = left.dtype is not g.dtype
    config = config or dual_config(n_m, n_n, n_r, g.dtype, target, sm_count(g.device), whole_span)
    strips, spans = cdiv(n_n, config.block_n), cdiv(n_m, config.span)
    left_shape = (spans, n_r, n_n) if by_rank else (spans, n_n, n_r)
    right_parts = g.new_empty((strips, n_m, n_r), dtype=torch.float32) if needs[0] else None
    left_parts = g.new_empty(left_shape, dtype=torch.float32) if needs[1] else None
    run = build(
        kernels.dual,
        target,
        **sizes(target, N=n_n, R=n_r),
        BLOCK_R=_rank_block(op, n_r, target),
        dtype=dtype_name(g.dtype),
        left_dtype=dtype_name(left.dtype),
        need_right=needs[0],
        need_left=needs[1],
        right_by_rank=by_rank,
        left_by_rank=by_rank,
        config=config,
    )
    run(g, right if needs[0] else None, left if needs[1] else None, right_parts, left_parts)
    return right_parts, left_parts


def bypass_forward(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: tuple[Down, Up] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y[..., O]; saves z[T, R] in float32 where up's gradient will be asked for."""
    target, sms = target_of(x), sm_count(x.device)
    flat, up, down = ready(rows(x)), ready(up), ready(down)
    base = None if base is None else _base(rows(base), target)
    (n_t, n_i), (n_o, n_r) = flat.shape, up.shape
    first, second = config or (
        down_config(n_t, n_i, n_r, x.dtype, target, sms),
        up_config(n_t, n_o, n_r, x.dtype, target, sms),
    )
    block_r, dtype = _rank_block("lora_bypass", n_r, target), dtype_name(x.dtype)
    parts = x.new_empty((cdiv(n_i, first.span), n_t, n_r), dtype=torch.float32)
    make_z = build(kernels.down_rows, target, **sizes(target, I=n_i, R=n_r), BLOCK_R=block_r, dtype=dtype, config=first)
    make_z(flat, down, parts)
    single = len(parts) == 1
    z = parts[0] if single else x.new_empty((n_t, n_r), dtype=torch.float32) if needs[1] else None
    make_y = build(
        kernels.up_tile,
        target,
        **sizes(target, O=n_o, R=n_r),
        BLOCK_R=block_r,
        dtype=dtype,
        out_dtype=dtype_name(out_dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        save_z=z is not None and not single,
        config=second,
    )
    out = torch.empty((*x.shape[:-1], n_o), dtype=out_dtype, device=x.device)
    make_y(parts, up, base, out.view(n_t, n_o), None if single else z, scale)
    return out, (z,) if needs[1] and z is not None else ()


def bypass_backward(
    grad: Tensor,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: tuple[Dual | None, Dual | None] = (None, None),
) -> tuple[Tensor | None, ...]:
    """(grad_x[..., I], grad_up[O, R], grad_down[R, I])."""
    need_x, need_up, need_down = needs
    target = target_of(x)
    g, flat, up, down = ready(rows(grad)), ready(rows(x)), ready(up), ready(down)
    (n_t, n_i), n_r = flat.shape, down.shape[0]
    # Without up's gradient nothing reads `left`; `up` stands in for the z that was not saved.
    left = ready(saved[0]) if need_up else up
    h_parts, up_parts = dual("lora_bypass", g, up, left, (need_x or need_down, need_up), False, config[0])
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device) if need_up else None
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device) if need_down else None
    down_parts = None
    if h_parts is not None:
        launch = config[1] or dual_config(n_t, n_i, n_r, x.dtype, target, sm_count(x.device), True)
        down_parts = x.new_empty((cdiv(n_t, launch.span), n_r, n_i), dtype=torch.float32) if need_down else None
        run = build(
            kernels.down_backward,
            target,
            **sizes(target, I=n_i, R=n_r),
            BLOCK_R=_rank_block("lora_bypass", n_r, target),
            dtype=dtype_name(x.dtype),
            need_x=need_x,
            need_down=need_down,
            config=launch,
        )
        flat_grad = None if grad_x is None else grad_x.view(n_t, n_i)
        run(h_parts, flat if need_down else None, down if need_x else None, flat_grad, down_parts, scale)
    reduce_partials((up_parts, down_parts), (grad_up, grad_down), scale)
    return grad_x, grad_up, grad_down


def _rank_block(op: str, n_r: int, target: Target) -> int:
    """The rank as the tiles hold it; on the CPU one of four sizes, so that few builds serve every rank."""
    if n_r > MAX_RANK:
        raise UnsupportedCase(
            f"{op}: rank {n_r} is above {MAX_RANK}, the most that the TileLang kernels hold in a tile"
        )
    if target.cpu:
        return next(size for size in (16, 64, 128, 256) if n_r <= size)
    return max(16, cdiv(n_r, 16) * 16)


def _base(base: Tensor | None, target: Target) -> Tensor | None:
    if base is None:
        return None
    return ready(base.float() if target.cpu else base)
