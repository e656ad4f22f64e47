"""Diag-OFT in PyTorch: the eager arm, and in float64 the only oracle.

Block k of `blocks[k, s, s]` gives a rotation R_k of s rows (the Cayley transform of a skew matrix):

    Q = B - Bᵀ        R = (I + Q)(I - Q)⁻¹        R - I = 2 ((I - Q)⁻¹ - I)

    merge   ΔW[O, I]: per block (R_k - I)ᵀ W_k, O = k · s
    bypass  out[..., O]: per block out[k, m] = Σ_n (R_k - I)[n, m] · y[k, n]

rescale[O], where given, scales each rotated row: r ∘ (Rᵀ W) instead of Rᵀ W, so that ΔW gains (r - 1) ∘ W.
constraint > 0, where given, bounds Q: Q · min(1, constraint / (‖Q‖ + 1e-8)), ‖Q‖ the Frobenius norm over all blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_reference(blocks: Tensor, constraint: float = 0.0) -> Tensor:
    """R - I of every block, [k, s, s], in at least float32 (no 16-bit inverse exists)."""
    b = blocks.to(torch.promote_types(blocks.dtype, torch.float32))
    q = b - b.mT
    if constraint > 0:
        q = q * (constraint / (q.norm() + 1e-8)).clamp(max=1)
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    # inv_ex: I - Q is never singular, and inv's check of that would wait for the device.
    return 2 * (torch.linalg.inv_ex(eye - q).inverse - eye)


def merge_reference(blocks: Tensor, weight: Tensor, rescale: Tensor | None = None, constraint: float = 0.0) -> Tensor:
    """ΔW[O, I] in the inputs' dtype."""
    delta = delta_reference(blocks, constraint).to(weight.dtype)
    out = torch.einsum("knm,kni->kmi", delta, weight.unflatten(0, blocks.shape[:2])).flatten(0, 1)
    return out if rescale is None else rescale[:, None] * out + (rescale - 1)[:, None] * weight


def bypass_reference(y: Tensor, blocks: Tensor, rescale: Tensor | None = None, constraint: float = 0.0) -> Tensor:
    """out[..., O] in the inputs' dtype."""
    delta = delta_reference(blocks, constraint).to(y.dtype)
    out = torch.einsum("knm,...kn->...km", delta, y.unflatten(-1, blocks.shape[:2])).flatten(-2)
    return out if rescale is None else rescale * out + (rescale - 1) * y
