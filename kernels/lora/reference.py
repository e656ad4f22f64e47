"""LoRA in PyTorch: the eager arm, and in float64 the only oracle.

merge   ΔW[O, I] = scale · up[O, R] @ down[R, I]
bypass  y[..., O] = scale · (x[..., I] @ downᵀ) @ upᵀ
"""

from __future__ import annotations

from torch import Tensor


def merge_reference(up: Tensor, down: Tensor, scale: float) -> Tensor:
    """ΔW[O, I] in the inputs' dtype."""
    return (up @ down) * scale


def bypass_reference(x: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """y[..., O] in the inputs' dtype."""
    return ((x @ down.T) @ up.T) * scale
