"""Diag-OFT: a block-diagonal rotation of a layer's output rows, merged or applied to the layer's output.

Per block, Q = B - Bᵀ and R = (I + Q)(I - Q)⁻¹ (Cayley); the delta is (R - I)ᵀ applied to s rows of the weight, or to
s channels of the layer's output.

Source: Qiu et al., "Controlling Text-to-Image Diffusion by Orthogonal Finetuning", arXiv:2306.07280; `rescale` and
`constraint` as in LyCORIS's Diag-OFT.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.checks import check_last, check_shape, check_tensor
from kernels.common.fused import FusedOp, Spec
from kernels.oft.reference import bypass_reference, merge_reference


def _saved(needs: tuple[bool, ...], blocks: Tensor) -> tuple[Spec, ...]:
    """R - I as [k, s, s] in float32, which every gradient needs."""
    return ((tuple(blocks.shape), torch.float32),) if any(needs) else ()


def _check(op: str, blocks: Tensor, rescale: Tensor | None) -> tuple[int, int]:
    """(k, s), once blocks is [k, s, s] and rescale, where given, is [k · s]."""
    check_shape(op, "blocks", check_tensor(op, "blocks", blocks), ("k", "s", "s"))
    count, size, columns = blocks.shape
    if size != columns:
        raise ValueError(f"{op}: blocks: got shape {tuple(blocks.shape)}, wanted square blocks (k, s, s)")
    if rescale is not None:
        check_shape(op, "rescale", check_tensor(op, "rescale", rescale), (count * size,))
    return count, size


def _check_merge(blocks: Tensor, weight: Tensor, rescale: Tensor | None) -> None:
    count, size = _check("oft", blocks, rescale)
    check_shape("oft", "weight", check_tensor("oft", "weight", weight), (count * size, "I"))


def _check_bypass(y: Tensor, blocks: Tensor, rescale: Tensor | None) -> None:
    count, size = _check("oft_bypass", blocks, rescale)
    check_last("oft_bypass", "y", check_tensor("oft_bypass", "y", y), "O", count * size)


_MERGE = FusedOp(
    "oft",
    package="kernels.oft",
    stem="merge",
    args=("blocks", "weight", "rescale"),
    optional=("rescale",),
    scalars=("constraint",),
    check=_check_merge,
    eager=merge_reference,
    out_shape=lambda blocks, weight, rescale: tuple(weight.shape),
    saved=lambda needs, blocks, weight, rescale: _saved(needs, blocks),
    # blocks only for the constraint's chain rule: D is saved.
    reads=lambda needs, tensors, scalars: (needs[0] and scalars[0] > 0, needs[0] or needs[2], True),
)
_BYPASS = FusedOp(
    "oft_bypass",
    package="kernels.oft",
    stem="bypass",
    args=("y", "blocks", "rescale"),
    optional=("rescale",),
    scalars=("constraint",),
    check=_check_bypass,
    eager=bypass_reference,
    out_shape=lambda y, blocks, rescale: tuple(y.shape),
    saved=lambda needs, y, blocks, rescale: _saved(needs, blocks),
    reads=lambda needs, tensors, scalars: (needs[1] or needs[2], needs[1] and scalars[0] > 0, True),
)


def merge(
    blocks: Tensor,
    weight: Tensor,
    *,
    base: Tensor | None = None,
    rescale: Tensor | None = None,
    constraint: float | None = None,
    backend: str,
) -> Tensor:
    """The weight delta ΔW[O, I], per block (R_k - I)ᵀ W_k, plus `base` where given.

    Args:
        blocks: [k, s, s] with k · s = O, float16, bfloat16 or float32, any strides; Q = B - Bᵀ.
        weight: [O, I], the frozen weight that is rotated, like `blocks`.
        base: [O, I], added before the one rounding (the frozen weight itself, for a merged weight).
        rescale: [O] or None; with it, ΔW = rescale ∘ (Rᵀ W) - W.
        constraint: a bound on ‖Q‖ (Frobenius, over all blocks): Q · min(1, constraint / (‖Q‖ + 1e-8)). None or 0: no
            bound. LyCORIS's module passes its `constrain` times O here.
        backend: "eager", "compile", "triton" or "tilelang".

    Returns:
        [O, I] in the promotion of all dtypes; differentiable in blocks, weight, rescale and base. The Cayley transform
        is in float32; on triton and tilelang R - I is never rounded to 16 bits.

    Raises:
        ValueError: a wrong shape, device or backend name; TypeError: a wrong type or dtype, or float16 with bfloat16.
        UnsupportedCase: the backend cannot run this here (a block size above 64 on triton and tilelang, for one).
    """
    return _MERGE.call((blocks, weight, rescale), (_bound("oft", constraint),), base, backend)


def bypass(
    y: Tensor,
    blocks: Tensor,
    *,
    base: Tensor | None = None,
    rescale: Tensor | None = None,
    constraint: float | None = None,
    backend: str,
) -> Tensor:
    """The delta applied to a layer's output: out[..., k, m] = Σ_n (R_k - I)[n, m] · y[..., k, n], plus `base`.

    Args:
        y: [..., O] with any leading axes, the frozen layer's output without its bias; float16, bfloat16 or float32, any
            strides.
        blocks: [k, s, s] with k · s = O.
        base: [..., O], added before the one rounding (the frozen layer's own output).
        rescale, constraint, backend: as for `merge`; with rescale, out = rescale ∘ (Rᵀ y) - y.

    Returns:
        [..., O] in the promotion of all dtypes; differentiable in y, blocks, rescale and base.

    Raises:
        As `merge`.
    """
    return _BYPASS.call((y, blocks, rescale), (_bound("oft_bypass", constraint),), base, backend)


def _bound(op: str, constraint: float | None) -> float:
    if constraint is not None and not constraint >= 0:
        raise ValueError(f"{op}: constraint: got {constraint}, wanted a number of at least 0, or None")
    return float(constraint or 0.0)
