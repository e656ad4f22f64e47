"""LoKr in PyTorch: the eager arm, and in float64 the only oracle.

    merge   ΔW[a·c, b·d] = scale · w1[a, b] ⊗ w2[c, d]
    bypass  y[..., a·c] = x[..., b·d] @ ΔWᵀ = scale · w1 X w2ᵀ, with X the last axis of x as [b, d] and y's as [a, c]

Either factor may be a pair (wa, wb) that stands for wa @ wb.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

Factor = Tensor | tuple[Tensor, Tensor]


def full(factor: Factor) -> Tensor:
    """The factor as one matrix."""
    return factor if isinstance(factor, Tensor) else factor[0] @ factor[1]


def merge_reference(w1: Factor, w2: Factor, scale: float) -> Tensor:
    """ΔW[a·c, b·d] in the inputs' dtype."""
    # torch.kron takes no transposed views.
    delta = torch.kron(full(w1).contiguous(), full(w2).contiguous())
    return delta if scale == 1 else delta * scale


def bypass_reference(x: Tensor, w1: Factor, w2: Factor, scale: float) -> Tensor:
    """y[..., a·c] in the inputs' dtype."""
    w1, w2 = full(w1), full(w2)
    z = linear(x.unflatten(-1, (w1.shape[1], w2.shape[1])), w2)
    y = linear(z.mT, w1).mT.flatten(-2)
    return y if scale == 1 else y * scale
