"""LoHa in TileLang, by the same steps as in Triton: the merge, and the bypass through pairs of ranks or tiles of ΔW.

Which of the bypass's two forms runs depends on the rank alone: see kernels/loha/pairs.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.tilelang_target import ready, ready_base, target_of
from kernels.common.views import rows
from kernels.loha import tilelang_pairs_launch as pairs
from kernels.loha import tilelang_tiles as tiles
from kernels.loha.pairs import use_pairs
from kernels.loha.tilelang_merge_launch import factor_backward, merge_backward, merge_forward, rank_block

__all__ = ["bypass_backward", "bypass_forward", "merge_backward", "merge_forward"]


def bypass_forward(
    x: Tensor,
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: pairs.Pairs | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y[..., O]; saves what `kernels.loha.pairs.saved_specs` lists."""
    flat = ready(rows(x))
    bias = None if base is None else ready_base(rows(base), target_of(x))
    (n_o, n_r), n_t = up1.shape, flat.shape[0]
    factors = (ready(up1), ready(down1), ready(up2), ready(down2))
    out = torch.empty((*x.shape[:-1], n_o), dtype=out_dtype, device=x.device)
    if use_pairs(n_r):
        return out, pairs.forward(flat, factors, scale, bias, out.view(n_t, n_o), needs, config)
    tiles.product(
        flat, factors[0::2], factors[1::2], False, rank_block("loha_bypass", n_r), scale, bias, out.view(n_t, n_o)
    )
    return out, ()


def bypass_backward(
    grad: Tensor,
    x: Tensor,
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: pairs.Pairs | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_x[..., I], grad_up1[O, R], grad_down1[R, I], grad_up2[O, R], grad_down2[R, I])."""
    g, flat = ready(rows(grad)), ready(rows(x))
    factors = (ready(up1), ready(down1), ready(up2), ready(down2))
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    flat_grad_x = None if grad_x is None else grad_x.view(flat.shape)
    if use_pairs(up1.shape[1]):
        return grad_x, *pairs.backward(g, flat, factors, scale, saved, flat_grad_x, needs[1:], config)
    if flat_grad_x is not None:
        block_r = rank_block("loha_bypass", up1.shape[1])
        tiles.product(g, factors[1::2], factors[0::2], True, block_r, scale, None, flat_grad_x)
    if not any(needs[1:]):
        return grad_x, None, None, None, None
    return grad_x, *factor_backward("loha_bypass", g, flat, factors, scale, needs[1:], None)
