"""Hand-made stand-ins: a small op, rows with known numbers, a card's stamp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.record import Row, blank_row
from kernels import UnsupportedCase
from kernels.registry import Case, Op

CEILINGS = {
    "copy_gbps": 4000.0,
    "read_gbps": 4200.0,
    "write_gbps": 3200.0,
    "triad_gbps": 4100.0,
    "matmul_tflops": {"fp16": 700.0, "bf16": 700.0, "fp32": 50.0, "tf32": 350.0},
}
STAMP: dict[str, Any] = {
    "gpu": "NVIDIA Test",
    "driver": "1",
    "cuda": "1",
    "torch": "1",
    "triton": "1",
    "tilelang": "1",
    "started": "2026-01-02T03:04:05+00:00",
    "kernels_sha256": "abc",
}


def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return (a @ b) * scale


_compiled = torch.compile(product, fullgraph=True)


def call(a: Tensor, b: Tensor, scale: float, *, backend: str) -> Tensor:
    if backend == "tilelang":
        raise UnsupportedCase("the toy has no TileLang kernel")
    return (_compiled if backend == "compile" else product)(a, b, scale)


def toy_op(run: Any = call, name: str = "toy", cases: int = 3) -> Op:
    return Op(
        name=name,
        family="toy",
        call=run,
        oracle=product,
        args=("a", "b"),
        shapes=lambda d: {"a": (d["O"], d["R"]), "b": (d["R"], d["I"])},
        out_shape=lambda d: (d["O"], d["I"]),
        flops=lambda d: (2 * d["O"] * d["I"] * d["R"], 6 * d["O"] * d["I"] * d["R"]),
        cases=tuple(Case(f"case{i}", {"O": 8 * (i + 1), "I": 16, "R": 4}) for i in range(cases)),
        quick=Case("quick", {"O": 16, "I": 16, "R": 4}),
        tiny=Case("tiny", {"O": 8, "I": 16, "R": 4}),
        kwargs={"scale": 0.5},
    )


def fake_capture(call: Any, leaves: Sequence[Tensor], device: torch.device) -> tuple[Any, Tensor, int]:
    """A CUDA graph as the CPU can play it: a replay computes again and writes to the tensors of the capture."""
    output = call()
    grads = [leaf.grad for leaf in leaves]

    def replay() -> None:
        again = call()
        with torch.no_grad():
            output.copy_(again)
            for grad, leaf in zip(grads, leaves, strict=True):
                if grad is not None:
                    grad.copy_(leaf.grad)

    return replay, output, 1 << 10


def made_row(
    op: str,
    case: str,
    backend: str,
    dev: Sequence[float],
    *,
    fwdbwd: Sequence[float] | None = None,
    wall: float = 100.0,
    dims: dict[str, int] | None = None,
    dtype: str = "fp16",
    **more: Any,
) -> Row:
    """An ok row with these device times; `more` overrides any key."""
    both = list(fwdbwd or [3 * t for t in dev])
    row = blank_row(op, case, dtype, backend, dims or {"O": 8, "I": 8, "R": 4})
    row |= {
        "status": "ok",
        "fwd": {"dev_us": list(dev), "wall_us": [wall, 1.1 * wall], "host_us": wall / 2, "launches": 1},
        "fwdbwd": {"dev_us": both, "wall_us": [2 * wall], "host_us": wall, "launches": 3, "floor_us": 0.9 * min(both)},
        "vram_fwd": 1 << 20,
        "vram_fwdbwd": 1 << 22,
        "bytes_read": 1 << 20,
        "bytes_written": 1 << 22,
        "flops": 1 << 20,
        "floor_us": 0.9 * min(dev),
        "l2_resident": False,
        "ulp": 2.0,
        "ulp_out": 1.0,
        "ulp_grads": {"a": 2.0},
        "rel_err": 1e-3,
        "clock_mhz": 1980,
        "throttled": False,
        "noisy": False,
    }
    return row | more


def bad_row(op: str, case: str, backend: str, status: str, reason: str, dtype: str = "fp16") -> Row:
    """A row without times."""
    return blank_row(op, case, dtype, backend, {}) | {"status": status, "reason": reason, "l2_resident": False}
