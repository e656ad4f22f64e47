"""LoHa in PyTorch: the eager arm, and in float64 the only oracle.

merge   ΔW[O, I] = scale · (up1[O, R] @ down1[R, I]) ∘ (up2[O, R] @ down2[R, I])
bypass  y[..., O] = x[..., I] @ ΔWᵀ
"""

from __future__ import annotations

from torch import Tensor


def merge_reference(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, scale: float) -> Tensor:
    """ΔW[O, I] in the inputs' dtype."""
    return (up1 @ down1) * (up2 @ down2) * scale


def bypass_reference(x: Tensor, up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, scale: float) -> Tensor:
    """y[..., O] in the inputs' dtype."""
    return x @ merge_reference(up1, down1, up2, down2, scale).T
