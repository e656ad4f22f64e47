"""Argument checks that name the argument, what came and what was wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BACKENDS = ("eager", "compile", "triton", "tilelang")
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOATING_SET = frozenset(FLOATING)


def check_backend(op: str, backend: str) -> None:
    """Raises ValueError unless `backend` is one of BACKENDS."""
    if backend not in BACKENDS:
        raise ValueError(f"{op}: backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")


def check_tensor(op: str, name: str, value: object) -> Tensor:
    """Raises TypeError unless `value` is a strided tensor of a floating dtype."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name}: got {type(value).__name__}, wanted a torch.Tensor")
    if value.dtype not in _FLOATING_SET:
        raise TypeError(f"{op}: {name}: got dtype {value.dtype}, wanted float16, bfloat16 or float32")
    if value.layout is not torch.strided:
        raise TypeError(f"{op}: {name}: got layout {value.layout}, wanted torch.strided")
    return value


def check_shape(op: str, name: str, value: Tensor, wanted: Sequence[int | str]) -> None:
    """Raises ValueError unless `value` has this shape; a string in `wanted` is a free axis of that name."""
    shape = value.shape
    if len(shape) == len(wanted) and all(isinstance(w, str) or s == w for s, w in zip(shape, wanted, strict=True)):
        return
    text = ", ".join(str(w) for w in wanted)
    raise ValueError(f"{op}: {name}: got shape {tuple(shape)}, wanted ({text})")


def check_last(op: str, name: str, value: Tensor, axis: str, size: int) -> None:
    """Raises ValueError unless `value` has at least one axis and its last one has this size."""
    if value.ndim == 0 or value.shape[-1] != size:
        raise ValueError(f"{op}: {name}: got shape {tuple(value.shape)}, wanted (..., {axis}={size})")
