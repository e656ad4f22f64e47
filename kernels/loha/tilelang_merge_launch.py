"""LoHa's merge in TileLang: launch configs and launchers of the kernels in tilelang_merge.py.

    merge     ΔW[O, I] = scale · P1 ∘ P2,  P1 = up1 @ down1,  P2 = up2 @ down2     both products in registers
      backward  G1 = G ∘ P2, G2 = G ∘ P1:  grad_up1 = scale · G1 @ down1ᵀ, grad_down1 = scale · up1ᵀ @ G1, 2 likewise
                G[O, I] read once and P1, P2 made once a tile (`Strips`, tilelang_strips.py), or read twice (`Rows`,
                tilelang_rows.py), then one reduction; `MergeBackward` where neither applies

Sums over more than one block go through float32 partials that a reduction adds in a fixed order: results are
deterministic. G1 and G2 feed 16-bit products; they are scaled by a power of two where they leave float16's range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.common.errors import UnsupportedCase
from kernels.common.tilelang_target import Target, build, dtype_name, ready, ready_base, sizes, target_of
from kernels.common.views import cdiv, power_of_two, rounded_up, sm_count
from kernels.loha import tilelang_merge as kernels
from kernels.loha import tilelang_rows as rows_kernels
from kernels.loha import tilelang_strips as strip_kernels
from kernels.loha.grads import Grads, new_grads
from kernels.loha.tilelang_reduce import reduce_grads

MAX_RANK = 128
_PLAIN = ("disable_warp_specialized",)
# Stores of 16 bytes a thread in place of bulk ones.
_SMALL_STORES = ("disable_warp_specialized", "disable_tma_lower")


@dataclass(frozen=True)
class Merge:
    """Launch of the merge: a block writes `steps` tiles of ΔW, side by side or `by_rows`, `staged` in shared memory.

    `overlap`: both products of a tile are under way together. `per_sm`: blocks an SM, for which registers are limited.
    """

    block_o: int
    block_i: int
    steps: int = 1
    threads: int = 128
    stages: int = 0
    staged: bool = True
    by_rows: bool = False
    overlap: bool = False
    per_sm: int = 1
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class MergeBackward:
    """Launch of the factors' gradients: a block walks `span` rows of G, `block_o` at a time, over `block_i` columns."""

    block_o: int
    block_i: int
    span: int
    threads: int = 128
    stages: int = 2
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Rows:
    """Launch of the two-pass backward: a block sums over `span` columns of G, or rows, `block_n` at a time, for `block_m`."""

    block_m: int
    block_n: int
    span: int
    threads: int = 128
    stages: int = 2
    passes: tuple[str, ...] = _PLAIN


@dataclass(frozen=True)
class Strips:
    """Launch of the one-pass backward of small ranks: a block walks `span` rows of G over `subs` tiles of `block_i`."""

    block_o: int
    block_i: int
    span: int
    threads: int = 128
    stages: int = 2
    subs: int = 2
    passes: tuple[str, ...] = _PLAIN


def _balanced(choices: tuple[int, ...], n_o: int, n_i: int, sms: int) -> int:
    """The number of 64×64 tiles a block that leaves the busiest SM the fewest, of equal ones the first."""
    return min(choices, key=lambda steps: cdiv(cdiv(n_o, 64) * cdiv(n_i, 64 * steps), sms) * steps)


def merge_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int) -> Merge:
    """The merge's tiles, as measured on an H200: small ones, both products of a tile under way together.

    Rank 64: blocks that keep their columns of down, as many as fill the SMs twice or, of large ones, four times:
    12288×3072 30.4 µs against 37.9 by columns and one product after the other, 3072×3072 9.2 against 12.6. Rank 16:
    12288×3072 20.9 in 3 stages and 21.6 in 2, 3072×3072 6.7 with bulk stores and 7.1 with small ones.
    """
    if target.cpu:
        return Merge(32, 32, 2)
    size = n_o * n_i
    if dtype is torch.float32 or n_r > 64:
        return Merge(64, 64)
    if size <= 1 << 21:
        block, threads = (128, 256) if n_r > 16 and size > 1 << 20 else (64, 128)
        return Merge(block, block, 1, threads, overlap=True, passes=_SMALL_STORES)
    if n_r <= 16:
        steps = 4 if size <= 1 << 23 else _balanced((6, 5, 4), n_o, n_i, sms)
        if size < 1 << 25:
            return Merge(64, 64, steps, 128, 2, overlap=True, per_sm=4)
        return Merge(64, 64, steps, 128, 3, overlap=True, per_sm=4, passes=_SMALL_STORES)
    if size <= 1 << 23:
        return Merge(64, 64, 4, 128, 2, overlap=True, per_sm=4)
    spans = max(1, (2 if size < 1 << 25 else 4) * sms // cdiv(n_i, 128))
    return Merge(64, 128, cdiv(cdiv(n_o, spans), 64), 128, 2, by_rows=True, overlap=True)


def backward_config(
    n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int, has_x: bool
) -> MergeBackward:
    """The backward's strip: as wide as registers allow (it divides up's partials), while each SM gets a block."""
    if target.cpu:
        return MergeBackward(16, 64, 64)
    threads = 256 if n_r > 32 or has_x else 128
    narrow = n_o * n_i <= 1 << 21 or has_x or n_r > 64 or target.shared_bytes < 160 * 1024
    block_o, block_i = (32, 32) if dtype is torch.float32 else (64, 64 if narrow else 128)
    steps = rounded_up(cdiv(cdiv(n_o, max(1, 2 * sms // cdiv(n_i, block_i))), block_o))
    return MergeBackward(block_o, block_i, steps * block_o, threads, min(2, steps))


def strip_config(n_o: int, n_i: int, sms: int) -> Strips:
    """The strips of small ranks, as measured on an H200: two tiles wide, and as long as two blocks an SM make them.

    12288×3072, rank 16: 71.0 µs against 90.0 one tile wide; 1280×1280: 9.1 one tile wide and long, 9.3 two tiles wide.
    """
    if n_o * n_i <= 1 << 21:
        return Strips(64, 64, 64, 128, 0, 1)
    steps = rounded_up(cdiv(cdiv(n_o, max(1, 2 * sms // cdiv(n_i, 128))), 64), bits=4)
    return Strips(64, 64, steps * 64, 128, min(2, steps))


def merge_backward_config(
    n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int, needs: tuple[bool, ...] = (True,) * 4
) -> MergeBackward | Rows | Strips:
    """The merge's backward: two passes over G where one would write large partials, as measured on an H200.

    Rank 64: 12288×3072 134.0 µs against 306.7 in one pass, 3072×3072 48.4 against 82.2; rank 16: 143.2 against 71.0.
    """
    if target.cpu or dtype is torch.float32 or n_r > 64:
        return backward_config(n_o, n_i, n_r, dtype, target, sms, False)
    if n_r <= 16:
        if all(needs):
            return strip_config(n_o, n_i, sms)
        return backward_config(n_o, n_i, n_r, dtype, target, sms, False)
    size = n_o * n_i
    if size <= 1 << 19:
        return Rows(64, 64, 128)
    if size <= 1 << 23:
        return Rows(64, 64, 320)
    return Rows(64, 64, 768 if size <= 1 << 24 else 1536)


def rank_block(op: str, n_r: int) -> int:
    """The rank's tile, a power of two; raises UnsupportedCase above MAX_RANK.

    In tiles of 48 columns a 16-bit operand that is read both ways would need two layouts at once.
    """
    if n_r > MAX_RANK:
        raise UnsupportedCase(f"{op}: rank {n_r} is above {MAX_RANK}, the most that a TileLang kernel holds in a tile")
    return power_of_two(n_r, 16)


def merge_forward(
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Merge | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[O, I]; saves nothing."""
    target = target_of(up1)
    base = ready_base(base, target)
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    run = build(
        kernels.merge,
        target,
        **sizes(target, I=n_i, R=n_r),
        BLOCK_R=rank_block("loha", n_r),
        dtype=dtype_name(up1.dtype),
        out_dtype=dtype_name(out_dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        config=config or merge_config(n_o, n_i, n_r, up1.dtype, target, sm_count(up1.device)),
    )
    out = torch.empty((n_o, n_i), dtype=out_dtype, device=up1.device)
    run(ready(up1), ready(down1), ready(up2), ready(down2), base, out, scale)
    return out, ()


def merge_backward(
    grad: Tensor,
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: MergeBackward | Rows | Strips | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_up1[O, R], grad_down1[R, I], grad_up2[O, R], grad_down2[R, I])."""
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    target, sms = target_of(grad), sm_count(grad.device)
    config = config or merge_backward_config(n_o, n_i, n_r, grad.dtype, target, sms, needs)
    if isinstance(config, Rows):
        return row_backward(ready(grad), (up1, down1, up2, down2), scale, needs, config)
    if isinstance(config, Strips):
        return strip_backward(ready(grad), (up1, down1, up2, down2), scale, config)
    return factor_backward("loha", ready(grad), None, (up1, down1, up2, down2), scale, needs, config)


def factor_backward(
    op: str,
    g: Tensor,
    x: Tensor | None,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    needs: tuple[bool, ...],
    config: MergeBackward | None,
) -> tuple[Tensor | None, ...]:
    """The factors' gradients from that of ΔW, which is g[O, I] or, with x, g[T, O]ᵀ @ x[T, I]."""
    up1, down1, up2, down2 = (ready(t) for t in factors)
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    target = target_of(g)
    config = config or backward_config(n_o, n_i, n_r, g.dtype, target, sm_count(g.device), x is not None)
    up_parts, ups = new_grads(up1, up2, (needs[0], needs[2]), cdiv(n_i, config.block_i))
    down_parts, downs = new_grads(down1, down2, (needs[1], needs[3]), cdiv(n_o, config.span))
    run = build(
        kernels.factor_backward,
        target,
        **sizes(target, I=n_i, R=n_r),
        BLOCK_R=rank_block(op, n_r),
        dtype=dtype_name(g.dtype),
        has_x=x is not None,
        needs=tuple(needs),
        config=config,
    )
    run(
        g, x, up1, down1, up2, down2,
        None if up_parts is None else up_parts.view(-1, n_o, n_r),
        None if down_parts is None else down_parts.view(-1, n_r, n_i),
    )  # fmt: skip
    reduce_grads((up_parts, down_parts), (ups, downs), scale)
    return ups[0], downs[0], ups[1], downs[1]


def strip_backward(
    g: Tensor, factors: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, config: Strips
) -> tuple[Tensor | None, ...]:
    """All four factors' gradients from ΔW's gradient g[O, I]."""
    up1, down1, up2, down2 = (ready(t) for t in factors)
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    target = target_of(g)
    up_parts, ups = new_grads(up1, up2, (True, True), cdiv(n_i, config.block_i * config.subs))
    down_parts, downs = new_grads(down1, down2, (True, True), cdiv(n_o, config.span))
    assert up_parts is not None and down_parts is not None
    run = build(
        strip_kernels.strip_backward,
        target,
        **sizes(target, I=n_i, R=n_r),
        BLOCK_R=rank_block("loha", n_r),
        dtype=dtype_name(g.dtype),
        config=config,
    )
    run(g, up1, down1, up2, down2, up_parts.view(-1, n_o, n_r), down_parts.view(-1, n_r, n_i))
    reduce_grads((up_parts, down_parts), (ups, downs), scale)
    return ups[0], downs[0], ups[1], downs[1]


def _outs(parts: Tensor | None, grads: Grads, scale: float) -> tuple[Grads, float, Tensor | None, bool]:
    """Where the sums go, with what scale, and the partials that are reduced afterwards: none of an axis in one span."""
    if parts is None or parts.shape[0] == 1:
        first, second = (None if grad is None else grad.unsqueeze(0) for grad in grads)
        return (first, second), scale, None, False
    rows = parts.flatten(0, 1)
    return (rows, rows), 1.0, parts, True


def row_backward(
    g: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    needs: tuple[bool, ...],
    config: Rows,
) -> tuple[Tensor | None, ...]:
    """The factors' gradients from ΔW's gradient g[O, I]; partials, and a reduction, only of what is split into spans."""
    up1, down1, up2, down2 = (ready(t) for t in factors)
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    target, dtype = target_of(g), dtype_name(g.dtype)
    up_splits, down_splits = cdiv(n_i, config.span), cdiv(n_o, config.span)
    up_parts, ups = new_grads(up1, up2, (needs[0], needs[2]), up_splits)
    down_parts, downs = new_grads(down1, down2, (needs[1], needs[3]), down_splits)
    up_outs, up_scale, up_parts, up_split = _outs(up_parts, ups, scale)
    down_outs, down_scale, down_parts, down_split = _outs(down_parts, downs, scale)
    groups = down_splits if needs[1] or needs[3] else 1
    up_rows = cdiv(cdiv(n_o, config.block_m), groups)
    run = build(
        rows_kernels.row_backward,
        target,
        **sizes(target, I=n_i, R=n_r),
        BLOCK_R=rank_block("loha", n_r),
        dtype=dtype,
        up_split=up_split,
        down_split=down_split,
        up_spans=up_splits,
        up_steps=cdiv(min(config.span, n_i), config.block_n),
        down_steps=cdiv(min(config.span, n_o), config.block_n),
        needs=tuple(needs),
        config=replace(config, span=0),
    )
    run(g, up1, down1, up2, down2, *up_outs, *down_outs, up_scale, down_scale, groups, up_rows)
    none: Grads = (None, None)
    left = (none if up_parts is None else ups, none if down_parts is None else downs)
    reduce_grads((up_parts, down_parts), left, scale)
    return ups[0], downs[0], ups[1], downs[1]
