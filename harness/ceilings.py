"""What the card can do at best, measured in the same run: memory bandwidth by traffic mix, and matmul peaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from harness.delimiters import Delimiters
from harness.profile import DeviceTime, device_times
from harness.record import Row
from kernels.registry import LINEAR_SHAPES

# Share of a stream's traffic that is written: a row is scored against the ceiling of its own mix.
WRITE_SHARE = {"read": 0.0, "triad": 1 / 3, "copy": 0.5, "write": 1.0}
# Bytes of one tensor, each past any L2; the largest are dropped where the card's memory is small.
SIZES = (2**28, 2**30, 2**32)
# Bytes of a ΔW in 16 bits: too short for a stream's rate, since filling and draining the card count.
SHORT_WRITES = tuple(sorted({2 * rows * columns for rows, columns in LINEAR_SHAPES.values()}))
SHORT_WRITE, SHORT_WRITE_ARMS = "short_write", ("constant", "loaded")
OPERAND_BYTES = 2**14
MATMULS = ((4096, 4096, 4096), (8192, 8192, 8192))
Ceilings = dict[str, Any]


def bandwidth(ceilings: Ceilings, bytes_read: int, bytes_written: int) -> float:
    """The measured ceiling in GB/s for this mix of reads and writes.

    Between two measured streams the time per byte is interpolated over the written share.
    """
    share = bytes_written / (bytes_read + bytes_written)
    points = sorted((at, 1 / ceilings[f"{kind}_gbps"]) for kind, at in WRITE_SHARE.items())
    for (low, slow), (high, fast) in pairwise(points):
        if share <= high:
            return 1 / (slow + (fast - slow) * (share - low) / (high - low))
    return 1 / points[-1][1]


def floor_us(ceilings: Ceilings | None, bytes_read: int, bytes_written: int, flops: int, kind: str) -> float | None:
    """The least time for this traffic and arithmetic at the measured rates; None where nothing was measured.

    kind: the matmul peak that applies, "fp16", "bf16", "fp32" or "tf32".
    """
    if not ceilings or bytes_read + bytes_written == 0:
        return None
    memory = (bytes_read + bytes_written) / bandwidth(ceilings, bytes_read, bytes_written) / 1e3
    peak = ceilings["matmul_tflops"].get(kind)
    return max(memory, flops / peak / 1e6) if peak else memory


def measure(device: torch.device, delimiters: Delimiters) -> tuple[Ceilings, list[Row]]:
    """Every stream and matmul at every size: the ceilings, and one row a measurement.

    A stream's ceiling is its best rate at the largest size: when a kernel ends, an L2's worth of its writes has not
    reached the memory yet, which makes smaller streams look faster than the memory is.
    """
    rows = [row for size in _sizes(device) for row in _stream_rows(device, delimiters, size)]
    rows += [row for size in SHORT_WRITES for row in _short_write_rows(device, delimiters, size)]
    rows += [row for shape in MATMULS for row in _matmul_rows(device, delimiters, shape)]
    ceilings: Ceilings = {f"{kind}_gbps": _best(rows, kind, "gbps") for kind in WRITE_SHARE}
    kinds = [row["kind"][len("matmul_") :] for row in rows if row["kind"].startswith("matmul_")]
    ceilings["matmul_tflops"] = {kind: _best(rows, f"matmul_{kind}", "tflops") for kind in dict.fromkeys(kinds)}
    return ceilings, rows


def _best(rows: list[Row], kind: str, unit: str) -> float:
    found = [row for row in rows if row["kind"] == kind]
    valid = [row for row in found if row["reason"] is None]
    if not valid:
        reasons = "; ".join(str(row["reason"]) for row in found)
        raise RuntimeError(f"the {kind} ceiling could not be measured: {reasons}")
    largest = max(row.get("bytes", 0) for row in valid)
    return max(row[unit] for row in valid if row.get("bytes", 0) == largest)


def _sizes(device: torch.device) -> list[int]:
    free, _ = torch.cuda.mem_get_info(device)
    return [size for size in SIZES if 4 * size < free] or [SIZES[0]]


def _stream_rows(device: torch.device, delimiters: Delimiters, size: int) -> list[Row]:
    a, b, out = (torch.rand(size // 4, device=device) for _ in range(3))
    arms: dict[str, Callable[[], Any]] = {
        "read torch": lambda: torch.sum(a),
        "triad torch": lambda: torch.add(a, b, alpha=2, out=out),
        "copy torch": lambda: out.copy_(a),
        "write torch": lambda: out.fill_(1),
    }
    if delimiters.made_with == "triton":
        from harness import triton_kernels as tk

        partial = tk.partials(a)
        arms |= {
            "read triton": lambda: tk.read(a, partial),
            "triad triton": lambda: tk.triad(out, a, b),
            "copy triton": lambda: tk.copy(out, a),
            "write triton": lambda: tk.fill(out),
        }
    tensors = {"read": 1, "triad": 3, "copy": 2, "write": 1}
    rows = []
    for arm, time in _time(arms, delimiters, calls=10).items():
        kind, implementation = arm.split()
        rows.append(_stream_row(kind, implementation, tensors[kind] * size, time))
    return rows


def _stream_row(kind: str, implementation: str, size: int, time: DeviceTime) -> Row:
    rate = None if time.reason else size / min(time.dev_us) / 1e3
    row = {"kind": kind, "implementation": implementation, "bytes": size}
    return {**row, "dev_us": list(time.dev_us), "gbps": rate, "reason": time.reason}


def _short_write_rows(device: torch.device, delimiters: Delimiters, size: int) -> list[Row]:
    """Two bounds for a merge: a constant written to as many bytes as ΔW has, and values that a small cold operand holds.

    What is written can't be known before the operand has come from the memory: that wait is in every merge's time.
    """
    if delimiters.made_with != "triton":
        return []
    from harness import triton_kernels as tk

    out, operand = torch.empty(size // 4, device=device), torch.rand(OPERAND_BYTES // 4, device=device)
    arms = dict(zip(SHORT_WRITE_ARMS, (lambda: tk.fill_short(out), lambda: tk.fill_short(out, operand)), strict=True))
    return [_stream_row(SHORT_WRITE, arm, size, time) for arm, time in _time(arms, delimiters, calls=10).items()]


def _matmul_rows(device: torch.device, delimiters: Delimiters, shape: tuple[int, int, int]) -> list[Row]:
    m, n, k = shape
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
    if torch.cuda.get_device_capability(device) < (8, 0):
        dtypes = {kind: dtype for kind, dtype in dtypes.items() if kind in ("fp16", "fp32")}
    pairs = {
        kind: tuple(torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n)))
        for kind, dtype in dtypes.items()
    }
    arms = {f"matmul_{kind}": _matmul(*pair, tf32=kind == "tf32") for kind, pair in pairs.items()}
    rows = []
    for kind, time in _time(arms, delimiters, calls=5).items():
        rate = None if time.reason else 2 * m * n * k / min(time.dev_us) / 1e6
        row = {"kind": kind, "implementation": "torch", "shape": list(shape), "dev_us": list(time.dev_us)}
        rows.append({**row, "tflops": rate, "reason": time.reason})
    return rows


def _matmul(a: Tensor, b: Tensor, *, tf32: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with _tf32(tf32):
            return a @ b

    return call


@contextmanager
def _tf32(on: bool) -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _time(arms: Mapping[str, Callable[[], Any]], delimiters: Delimiters, calls: int) -> dict[str, DeviceTime]:
    for call in arms.values():
        for _ in range(3):
            call()
    return device_times(arms, delimiters, calls=calls)


def describe(ceilings: Ceilings) -> str:
    """One line: GB/s by traffic mix, TFLOP/s by matmul dtype."""
    streams = ", ".join(f"{kind} {ceilings[f'{kind}_gbps']:.0f}" for kind in ("copy", "read", "write", "triad"))
    matmuls = ", ".join(f"{kind} {peak:.0f}" for kind, peak in ceilings["matmul_tflops"].items())
    return f"{streams} GB/s; matmul {matmuls} TFLOP/s"
