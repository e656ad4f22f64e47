"""Room for gradients that one reduction writes together."""

from __future__ import annotations

import torch
from torch import Tensor


def new_grads(first: Tensor, second: Tensor, needs: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    """(both, first's, second's): room for the gradients of two equal shapes, those asked for, one after the other."""
    count = sum(needs)
    if not count:
        return None, None, None
    both = torch.empty((count, *first.shape), dtype=first.dtype, device=first.device)
    views = iter(both)
    return both.view(-1, first.shape[1]), *(next(views) if need else None for need in needs)
