"""LoRA: a low-rank weight delta ΔW = scale · up @ down, merged or applied to activations.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from kernels.common.checks import check_last, check_shape, check_tensor
from kernels.common.fused import FusedOp, Spec
from kernels.lora.reference import bypass_reference, merge_reference


def _bypass_saved(needs: tuple[bool, ...], x: Tensor, up: Tensor, down: Tensor) -> tuple[Spec, ...]:
    """z = x @ downᵀ as [T, R] in float32, which only up's gradient needs."""
    return (((prod(x.shape[:-1]), down.shape[0]), torch.float32),) if needs[1] else ()


def _check_merge(up: Tensor, down: Tensor, op: str = "lora") -> None:
    check_shape(op, "up", check_tensor(op, "up", up), ("O", "R"))
    check_shape(op, "down", check_tensor(op, "down", down), (up.shape[1], "I"))


def _check_bypass(x: Tensor, up: Tensor, down: Tensor) -> None:
    _check_merge(up, down, "lora_bypass")
    check_last("lora_bypass", "x", check_tensor("lora_bypass", "x", x), "I", down.shape[1])


_MERGE = FusedOp(
    "lora",
    package="kernels.lora",
    stem="merge",
    args=("up", "down"),
    scalars=("scale",),
    check=_check_merge,
    eager=merge_reference,
    out_shape=lambda up, down: (up.shape[0], down.shape[1]),
)
_BYPASS = FusedOp(
    "lora_bypass",
    package="kernels.lora",
    stem="bypass",
    args=("x", "up", "down"),
    scalars=("scale",),
    check=_check_bypass,
    eager=bypass_reference,
    out_shape=lambda x, up, down: (*x.shape[:-1], up.shape[0]),
    saved=_bypass_saved,
    reads=lambda needs, tensors, scalars: (needs[2], needs[0] or needs[2], needs[0]),
)


def merge(up: Tensor, down: Tensor, scale: float = 1.0, *, base: Tensor | None = None, backend: str) -> Tensor:
    """The weight delta ΔW[O, I] = scale · up[O, R] @ down[R, I], plus `base` where given.

    Args:
        up: [O, R], float16, bfloat16 or float32, any strides.
        down: [R, I], like `up`.
        scale: the whole scale (not divided by the rank).
        base: [O, I], added before the one rounding (the frozen weight, for a merged weight).
        backend: "eager", "compile", "triton" or "tilelang".

    Returns:
        [O, I] in the promotion of all dtypes; differentiable in up, down and base. 16-bit operands multiply in the
        16-bit type and accumulate in float32; float32 ones in full float32 unless PyTorch's TF32 switch is on.

    Raises:
        ValueError: a wrong shape, device or backend name; TypeError: a wrong type or dtype, or float16 with bfloat16.
        UnsupportedCase: the backend cannot run this here; the message says why.
    """
    return _MERGE.call((up, down), (float(scale),), base, backend)


def bypass(
    x: Tensor, up: Tensor, down: Tensor, scale: float = 1.0, *, base: Tensor | None = None, backend: str
) -> Tensor:
    """The delta applied to activations: y[..., O] = scale · (x[..., I] @ downᵀ) @ upᵀ, plus `base` where given.

    Args:
        x: [..., I] with any leading axes, float16, bfloat16 or float32, any strides.
        up: [O, R]; down: [R, I].
        scale: the whole scale (not divided by the rank).
        base: [..., O], added before the one rounding (the frozen layer's own output).
        backend: "eager", "compile", "triton" or "tilelang".

    Returns:
        [..., O] in the promotion of all dtypes; differentiable in x, up, down and base. The intermediate x @ downᵀ
        keeps float32's range on triton and tilelang.

    Raises:
        As `merge`.
    """
    return _BYPASS.call((x, up, down), (float(scale),), base, backend)
