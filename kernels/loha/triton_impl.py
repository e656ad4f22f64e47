"""LoHa in Triton: the merge (triton_merge.py) and the bypass, through pairs of ranks (triton_pairs.py) or tiles of ΔW."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.views import rows
from kernels.loha import triton_pairs_launch as pairs
from kernels.loha.triton_merge import merge_backward, merge_forward

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
    flat = rows(x)
    out = torch.empty((*x.shape[:-1], up1.shape[0]), dtype=out_dtype, device=x.device)
    bias = None if base is None else rows(base)
    return out, pairs.forward(flat, (up1, down1, up2, down2), scale, bias, out.view(-1, up1.shape[0]), needs, config)


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
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    flat_grad_x = None if grad_x is None else grad_x.view(-1, x.shape[-1])
    grads = pairs.backward(
        rows(grad), rows(x), (up1, down1, up2, down2), scale, saved, flat_grad_x, needs[1:], config
    )
    return grad_x, *grads
