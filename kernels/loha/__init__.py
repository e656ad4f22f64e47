"""LoHa: a weight delta that is the Hadamard product of two low-rank products, merged or applied to activations.

Source: Hyeon-Woo et al., "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning",
arXiv:2108.06098; Yeh et al., "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model Evaluation",
arXiv:2309.14859.
"""

from __future__ import annotations

from torch import Tensor

from kernels.common.checks import check_last, check_shape, check_tensor
from kernels.common.fused import FusedOp
from kernels.loha.pairs import reads, saved_specs
from kernels.loha.reference import bypass_reference, merge_reference

_FACTORS = ("up1", "down1", "up2", "down2")


def _check_merge(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, op: str = "loha") -> None:
    check_shape(op, "up1", check_tensor(op, "up1", up1), ("O", "R"))
    rank = up1.shape[1]
    check_shape(op, "down1", check_tensor(op, "down1", down1), (rank, "I"))
    check_shape(op, "up2", check_tensor(op, "up2", up2), (up1.shape[0], rank))
    check_shape(op, "down2", check_tensor(op, "down2", down2), (rank, down1.shape[1]))


def _check_bypass(x: Tensor, up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor) -> None:
    _check_merge(up1, down1, up2, down2, "loha_bypass")
    check_last("loha_bypass", "x", check_tensor("loha_bypass", "x", x), "I", down1.shape[1])


_MERGE = FusedOp(
    "loha",
    package="kernels.loha",
    stem="merge",
    args=_FACTORS,
    scalars=("scale",),
    check=_check_merge,
    eager=merge_reference,
    out_shape=lambda up1, down1, up2, down2: (up1.shape[0], down1.shape[1]),
)
_BYPASS = FusedOp(
    "loha_bypass",
    package="kernels.loha",
    stem="bypass",
    args=("x", *_FACTORS),
    scalars=("scale",),
    check=_check_bypass,
    eager=bypass_reference,
    out_shape=lambda x, up1, down1, up2, down2: (*x.shape[:-1], up1.shape[0]),
    saved=saved_specs,
    reads=reads,
)


def merge(
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float = 1.0,
    *,
    base: Tensor | None = None,
    backend: str,
) -> Tensor:
    """The weight delta ΔW[O, I] = scale · (up1 @ down1) ∘ (up2 @ down2), plus `base` where given.

    Args:
        up1, up2: [O, R], float16, bfloat16 or float32, any strides.
        down1, down2: [R, I], like `up1`.
        scale: the whole scale (not divided by the rank).
        base: [O, I], added before the one rounding (the frozen weight, for a merged weight).
        backend: "eager", "compile", "triton" or "tilelang".

    Returns:
        [O, I] in the promotion of all dtypes; differentiable in the four factors and base. 16-bit operands multiply in
        the 16-bit type and accumulate in float32; float32 ones in full float32 unless PyTorch's TF32 switch is on. On
        triton and tilelang the two products and their Hadamard product stay float32 until the one rounding.

    Raises:
        ValueError: a wrong shape, device or backend name; TypeError: a wrong type or dtype, or float16 with bfloat16.
        UnsupportedCase: the backend cannot run this here; the message says why.
    """
    return _MERGE.call((up1, down1, up2, down2), (float(scale),), base, backend)


def bypass(
    x: Tensor,
    up1: Tensor,
    down1: Tensor,
    up2: Tensor,
    down2: Tensor,
    scale: float = 1.0,
    *,
    base: Tensor | None = None,
    backend: str,
) -> Tensor:
    """The delta applied to activations: y[..., O] = x[..., I] @ ΔWᵀ with ΔW as in `merge`, plus `base` where given.

    Args:
        x: [..., I] with any leading axes, float16, bfloat16 or float32, any strides.
        up1, up2: [O, R]; down1, down2: [R, I].
        scale: the whole scale (not divided by the rank).
        base: [..., O], added before the one rounding (the frozen layer's own output).
        backend: "eager", "compile", "triton" or "tilelang".

    Returns:
        [..., O] in the promotion of all dtypes; differentiable in x, the four factors and base. Triton and tilelang
        never store ΔW: see `kernels.loha.pairs` for the two forms and which one runs.

    Raises:
        As `merge`.
    """
    return _BYPASS.call((x, up1, down1, up2, down2), (float(scale),), base, backend)
