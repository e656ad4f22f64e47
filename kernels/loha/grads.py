"""Room for the factors' gradients and for the partials that they are summed from."""

from __future__ import annotations

import torch
from torch import Tensor

Grads = tuple[Tensor | None, Tensor | None]


def new_grads(first: Tensor, second: Tensor, needs: tuple[bool, bool], splits: int) -> tuple[Tensor | None, Grads]:
    """(partials [splits, 1 or 2, ...] in float32, gradients), of one or both of two equal shapes as `needs` asks."""
    count = sum(needs)
    parts = first.new_empty((splits, count, *first.shape), dtype=torch.float32) if count else None
    grad1 = torch.empty(first.shape, dtype=first.dtype, device=first.device) if needs[0] else None
    grad2 = torch.empty(second.shape, dtype=second.dtype, device=second.device) if needs[1] else None
    return parts, (grad1, grad2)
