"""LoHa in Triton: the merge (triton_merge.py) and the bypass, through pairs of ranks or through tiles of ΔW.

Which of the bypass's two forms runs depends on the rank alone: see kernels/loha/pairs.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.views import rows
from kernels.loha import triton_pairs_launch as pairs
from kernels.loha import triton_tiles as tiles
from kernels.loha.pairs import use_pairs
from kernels.loha.triton_merge import factor_backward, merge_backward, merge_forward

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
    flat, bias = rows(x), None if base is None else rows(base)
    n_o, n_r = up1.shape
    out = torch.empty((*x.shape[:-1], n_o), dtype=out_dtype, device=x.device)
    if use_pairs(n_r):
        return out, pairs.forward(flat, (up1, down1, up2, down2), scale, bias, out.view(-1, n_o), needs, config)
    tiles.product(flat, (up1, up2), (down1, down2), scale, bias, out.view(-1, n_o), None)
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
    g, flat = rows(grad), rows(x)
    factors = (up1, down1, up2, down2)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    flat_grad_x = None if grad_x is None else grad_x.view(flat.shape)
    if use_pairs(up1.shape[1]):
        return grad_x, *pairs.backward(g, flat, factors, scale, saved, flat_grad_x, needs[1:], config)
    if flat_grad_x is not None:
        tiles.product(g, (down1.T, down2.T), (up1.T, up2.T), scale, None, flat_grad_x, None)
    if not any(needs[1:]):
        return grad_x, None, None, None, None
    return grad_x, *factor_backward("loha_bypass", g, flat, factors, scale, needs[1:], None)
