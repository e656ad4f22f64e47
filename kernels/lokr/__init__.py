"""LoKr: a Kronecker-product weight delta ΔW = scale · w1 ⊗ w2, merged or applied to activations.

Source: Yeh et al., "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model Evaluation",
arXiv:2309.14859.
"""

from __future__ import annotations

from torch import Tensor

from kernels.common.checks import check_last, check_shape, check_tensor
from kernels.common.fused import FusedOp
from kernels.lokr.reference import Factor, bypass_reference, merge_reference

__all__ = ["Factor", "bypass", "merge"]


def _rows_cols(wa: Tensor, wb: Tensor | None) -> tuple[int, int]:
    """Shape of the factor that wa, or the pair (wa, wb), stands for."""
    return wa.shape[0], (wa if wb is None else wb).shape[1]


def _side(wa: Tensor, wb: Tensor | None) -> Factor:
    return wa if wb is None else (wa, wb)


def _merge_shape(w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None) -> tuple[int, ...]:
    (a, b), (c, d) = _rows_cols(w1, w1_b), _rows_cols(w2, w2_b)
    return a * c, b * d


def _bypass_shape(x: Tensor, w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None) -> tuple[int, ...]:
    return (*x.shape[:-1], w1.shape[0] * w2.shape[0])


def _merge_eager(w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None, scale: float) -> Tensor:
    return merge_reference(_side(w1, w1_b), _side(w2, w2_b), scale)


def _bypass_eager(x: Tensor, w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None, scale: float) -> Tensor:
    return bypass_reference(x, _side(w1, w1_b), _side(w2, w2_b), scale)


def _merge_reads(
    needs: tuple[bool, ...], tensors: tuple[Tensor | None, ...], scalars: tuple[float, ...]
) -> tuple[bool, ...]:
    """Which of (w1, w1_b, w2, w2_b) the merge's backward reads: the other side, and the partner in a pair."""
    need1, need2 = needs[0] or needs[1], needs[2] or needs[3]
    return (need2 or needs[1], need2 or needs[0], need1 or needs[3], need1 or needs[2])


def _check_factor(op: str, name: str, wa: Tensor, wb: Tensor | None, axes: str) -> None:
    if wb is None:
        check_shape(op, name, check_tensor(op, name, wa), tuple(axes))
        return
    check_shape(op, f"{name}[0]", check_tensor(op, f"{name}[0]", wa), (axes[0], "R"))
    check_shape(op, f"{name}[1]", check_tensor(op, f"{name}[1]", wb), (wa.shape[1], axes[1]))


def _check_merge(w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None, op: str = "lokr") -> None:
    _check_factor(op, "w1", w1, w1_b, "ab")
    _check_factor(op, "w2", w2, w2_b, "cd")


def _check_bypass(x: Tensor, w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None) -> None:
    op = "lokr_bypass"
    _check_merge(w1, w1_b, w2, w2_b, op)
    check_last(op, "x", check_tensor(op, "x", x), "I", _rows_cols(w1, w1_b)[1] * _rows_cols(w2, w2_b)[1])


_FACTORS, _OPTIONAL = ("w1", "w1_b", "w2", "w2_b"), ("w1_b", "w2_b")
_MERGE = FusedOp(
    "lokr",
    package="kernels.lokr",
    stem="merge",
    args=_FACTORS,
    optional=_OPTIONAL,
    scalars=("scale",),
    check=_check_merge,
    eager=_merge_eager,
    out_shape=_merge_shape,
    reads=_merge_reads,
)
_BYPASS = FusedOp(
    "lokr_bypass",
    package="kernels.lokr",
    stem="bypass",
    args=("x", *_FACTORS),
    optional=_OPTIONAL,
    scalars=("scale",),
    check=_check_bypass,
    eager=_bypass_eager,
    out_shape=_bypass_shape,
    reads=lambda needs, tensors, scalars: (any(needs[1:]), True, True, True, True),
)


def merge(w1: Factor, w2: Factor, scale: float = 1.0, *, base: Tensor | None = None, backend: str) -> Tensor:
    """The weight delta ΔW[O, I] = scale · w1[a, b] ⊗ w2[c, d], plus `base` where given; O = a·c, I = b·d.

    ΔW[i·c + k, j·d + l] = scale · w1[i, j] · w2[k, l].

    Args:
        w1: [a, b], or a pair (wa[a, R], wb[R, b]) that stands for wa @ wb; float16, bfloat16 or float32, any strides.
        w2: [c, d], or a pair (wa[c, R], wb[R, d]); the ranks of the two sides are independent.
        scale: the whole scale (not divided by a rank).
        base: [O, I], added before the one rounding (the frozen weight, for a merged weight).
        backend: "eager", "compile", "triton" or "tilelang".

    Returns:
        [O, I] in the promotion of all dtypes; differentiable in every tensor. Products accumulate in float32; on triton and
        tilelang the product of a pair is neither stored nor rounded. float32 inputs multiply in full float32 unless
        PyTorch's TF32 switch is on.

    Raises:
        ValueError: a wrong shape, device or backend name; TypeError: a wrong type or dtype, or float16 with bfloat16.
        UnsupportedCase: the backend cannot run this here; the message says why.
    """
    return _MERGE.call((*_parts("w1", w1), *_parts("w2", w2)), (float(scale),), base, backend)


def bypass(
    x: Tensor, w1: Factor, w2: Factor, scale: float = 1.0, *, base: Tensor | None = None, backend: str
) -> Tensor:
    """The delta applied to activations: y[..., O] = scale · x[..., I] @ (w1 ⊗ w2)ᵀ, plus `base` where given.

    With the last axis of x seen as X[b, d] and y's as Y[a, c]: Y = scale · w1 @ X @ w2ᵀ. ΔW is never built.

    Args:
        x: [..., I] with any leading axes, float16, bfloat16 or float32, any strides; I = b·d.
        w1: [a, b], or a pair (wa[a, R], wb[R, b]) that stands for wa @ wb.
        w2: [c, d], or a pair (wa[c, R], wb[R, d]).
        scale: the whole scale (not divided by a rank).
        base: [..., O] with O = a·c, added before the one rounding (the frozen layer's own output).
        backend: "eager", "compile", "triton" or "tilelang".

    Returns:
        [..., O] in the promotion of all dtypes; differentiable in every tensor. Intermediates keep float32's range on
        triton and tilelang.

    Raises:
        As `merge`.
    """
    return _BYPASS.call((x, *_parts("w1", w1), *_parts("w2", w2)), (float(scale),), base, backend)


def _parts(name: str, value: Factor) -> tuple[Tensor, Tensor | None]:
    """(w, None) for a full factor, (wa, wb) for a pair."""
    if not isinstance(value, (tuple, list)):
        return value, None
    if len(value) != 2 or value[1] is None:
        got = f"{len(value)} tensors" if len(value) != 2 else "None in a pair"
        raise ValueError(f"lokr: {name}: got {got}, wanted a tensor or a pair (wa, wb)")
    return value[0], value[1]
