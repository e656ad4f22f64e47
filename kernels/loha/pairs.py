"""How the bypass avoids ΔW: the two forms of y = x @ ΔWᵀ, and which one a shape gets.

    pairs   with p = (r, s) over the R² pairs of ranks,
            D[p, i] = down1[r, i] · down2[s, i] and U[p, o] = up1[o, r] · up2[o, s]:  ΔWᵀ = scale · Dᵀ @ U,
            so y = scale · (x @ Dᵀ) @ U costs 2·T·(I + O)·R² operations and not 2·T·I·O.
    tiles   y accumulates x[T, i] @ ΔW[o, i]ᵀ over tiles of ΔW that are made in registers and dropped.

Both multiply out the same sum; pairs is the cheaper one for small ranks, and makes the backward as cheap.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from kernels.common.fused import Spec
from kernels.common.views import power_of_two

MAX_PAIR_RANK = 16


def pair_rank(n_r: int) -> int:
    """The rank that pairs are laid out for: a power of two of at least 4, with zeros past `n_r`."""
    return power_of_two(n_r, 4)


def use_pairs(n_r: int) -> bool:
    """Whether the bypass multiplies through pairs of ranks (else through tiles of ΔW)."""
    return n_r <= MAX_PAIR_RANK


def saved_specs(
    needs: tuple[bool, ...], x: Tensor, up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor
) -> tuple[Spec, ...]:
    """What the bypass keeps for its backward.

    pairs: D[P, I] and U[P, O] in the compute dtype, what each of their rows was divided by, [2, P] in float32, and,
    where a gradient of up is asked for, z[T, P] and its own factor. tiles: nothing.
    """
    (n_o, n_r), n_i = up1.shape, down1.shape[1]
    if not any(needs) or not use_pairs(n_r):
        return ()
    n_p = pair_rank(n_r) ** 2
    expanded = (((n_p, n_i), x.dtype), ((n_p, n_o), x.dtype), ((2, n_p), torch.float32))
    if not (needs[1] or needs[3]):
        return expanded
    return (*expanded, ((prod(x.shape[:-1]), n_p), x.dtype), ((1,), torch.float32))


def reads(needs: tuple[bool, ...], tensors: tuple[Tensor, ...], scalars: tuple[float, ...]) -> tuple[bool, ...]:
    """Which of (x, up1, down1, up2, down2) the bypass's backward reads: x where down's gradients, or in tiles any, need it."""
    need_ups, need_downs = needs[1] or needs[3], needs[2] or needs[4]
    return (need_downs or (need_ups and not use_pairs(tensors[1].shape[1])), True, True, True, True)
