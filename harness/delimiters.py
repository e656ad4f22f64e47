"""The two kernels that divide the profiler's timeline: one flushes the L2 cache before a call, one announces an arm."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

# Substrings of the kernels' names on the timeline.
FLUSH = "harness_flush_l2"
MARKER = "harness_mark_arm"
MIN_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Delimiters:
    """`flush` evicts the L2 cache with a buffer that is larger; `marker` does nothing of note.

    Triton's flush only reads, so that the call starts with a clean cache: after one that writes, the call also pays
    for writing back an L2 full of the flush's lines (a 100 MB read: 40.9 µs against 34.4 µs on an H200).
    """

    flush: Callable[[], object]
    marker: Callable[[], object]
    made_with: str


def flush_bytes(l2_bytes: int) -> int:
    """max(256 MiB, 2 × L2)."""
    return max(MIN_FLUSH_BYTES, 2 * l2_bytes)


def make_delimiters(device: torch.device, *, made_with: str | None = None) -> Delimiters:
    """Triton kernels, or CUDA C++ through PyTorch's jiterator where Triton is missing or interprets on the CPU."""
    if made_with is None:
        interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "off")
        made_with = "jiterator" if interpreted or find_spec("triton") is None else "triton"
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    big = torch.zeros(flush_bytes(l2_bytes) // 4, dtype=torch.int32, device=device)
    small = torch.zeros(1, dtype=torch.int32, device=device)
    if made_with == "triton":
        from harness import triton_kernels

        made = Delimiters(lambda: triton_kernels.flush(big), lambda: triton_kernels.mark(small), made_with)
    else:
        flush, mark = (
            torch.cuda.jiterator._create_jit_fn(f"template <typename T> T {name}(T x) {{ return x + 1; }}")
            for name in (FLUSH, MARKER)
        )
        made = Delimiters(lambda: flush(big), lambda: mark(small), made_with)
    made.flush()
    made.marker()
    torch.cuda.synchronize(device)
    return made
