"""What a worker's process does on its GPU: says which card it is, measures its ceilings and its cases."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch

from harness import ceilings as limits
from harness import prebuild, stamp, sweeper, throttle
from harness.delimiters import make_delimiters
from harness.measure import Bench, Plan, make_bench, measure_case
from harness.record import Row
from kernels.registry import ops


class GpuLab:
    """The first visible CUDA device."""

    def __init__(self) -> None:
        sweeper.require_gpu()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._bench: Bench | None = None

    def identity(self) -> dict[str, Any]:
        """The card's kind, its UUID, and the host it is in."""
        properties = torch.cuda.get_device_properties(self.device)
        uuid = str(getattr(properties, "uuid", "")) or f"{socket.gethostname()}-{properties.name}"
        return {"gpu": properties.name, "uuid": uuid, "host": socket.gethostname()}

    def stamps(self, families: Sequence[str], allow_busy: bool) -> dict[str, dict[str, Any]]:
        """Each family's stamp on this card; BusyGpu where the card computes for somebody else."""
        throttle.refuse_busy(allow_busy)
        return {family: stamp.environment(family) for family in families}

    def ceilings(self) -> tuple[limits.Ceilings, list[Row]]:
        """The card's own ceilings, and one row a measurement."""
        return limits.measure(self.device, make_delimiters(self.device))

    def prebuild(self, tasks: Sequence[prebuild.Task], jobs: int | None) -> dict[str, int]:
        """Compiles into this host's caches."""
        return prebuild.prebuild(tasks, jobs=jobs, echo=lambda text: None)

    def measure(self, ceilings: limits.Ceilings, op: str, case: str, dtype: str, backends: Sequence[str]) -> list[Row]:
        """The case's rows; the same measuring as a plain sweep's."""
        if self._bench is None or self._bench.ceilings != ceilings:
            self._bench = make_bench(ceilings, Plan())
        found = ops()[op]
        return measure_case(
            self._bench, found, next(each for each in found.cases if each.name == case), dtype, backends
        )
