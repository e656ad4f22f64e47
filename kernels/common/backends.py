"""Whether a backend can run here, and if not, why."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

from kernels.common.errors import UnsupportedCase


def interpreting() -> bool:
    """Whether Triton kernels run in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off")


@cache
def unsupported(backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why `backend` cannot compute in `dtype` on `device`, or None where it can."""
    if backend in ("eager", "compile"):
        return None
    if find_spec(backend) is None:
        return f"{backend} is not installed"
    if dtype is torch.float64:
        return f"{backend} kernels compute in float16, bfloat16 or float32, not float64"
    if device.type == "cuda":
        if dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
            return "bfloat16 needs a GPU of compute capability 8.0 or newer"
        if backend == "triton" and interpreting():
            return "TRITON_INTERPRET=1 is set: Triton kernels are interpreted on the CPU and never see the GPU"
        return None
    if device.type != "cpu":
        return f"{backend} kernels run on CUDA devices, not on {device.type}"
    if backend == "triton":
        if not interpreting():
            return "triton needs a CUDA device (on the CPU set TRITON_INTERPRET=1 before the kernels are imported)"
        return "bfloat16 dot products are wrong in Triton's CPU interpreter" if dtype is torch.bfloat16 else None
    return None if dtype is torch.float32 else "tilelang's CPU target runs float32 only"


def require(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises UnsupportedCase with the reason where `backend` cannot compute in `dtype` on `device`."""
    reason = unsupported(backend, device, dtype)
    if reason is not None:
        raise UnsupportedCase(reason)


def allow_tf32() -> bool:
    """Whether the user asked for TF32 products of float32 inputs on CUDA (PyTorch's own switch, in its new or old form)."""
    matmul = torch.backends.cuda.matmul
    wanted = getattr(matmul, "fp32_precision", "none")
    return bool(wanted == "tf32" if wanted != "none" else matmul.allow_tf32)
