"""Views of arguments in the shape that kernels take, copying only where no view exists."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """x[..., N] as [rows, N] with a last stride of 1; a copy only where x's strides allow no such view."""
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    if flat.stride(1) == 1 and (flat.stride(0) >= flat.shape[1] or flat.shape[0] == 1):
        return flat
    return flat.contiguous()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`, itself one."""
    return max(least, 1 << max(0, n - 1).bit_length())


def rounded_up(n: int, bits: int = 3) -> int:
    """n rounded up to `bits` leading bits: kernels built for a number of steps are few, and serve every number."""
    grain = 1 << max(0, n.bit_length() - bits)
    return cdiv(n, grain) * grain


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a device; on the CPU a stand-in that keeps launch shapes small."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block can have on a device: all of an SM's but a kilobyte; on the CPU a stand-in, an H200's."""
    if device.type != "cuda":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024
