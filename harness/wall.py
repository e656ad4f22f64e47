"""Wall and host time of one call, and the memory it needs at its peak."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from harness.delimiters import Delimiters
from harness.profile import ArmError

ROUNDS = 30


@dataclass
class WallTime:
    """wall_us: CUDA events around one call, one entry a round; issue_us: the host's time to issue it."""

    wall_us: list[float] = field(default_factory=list)
    issue_us: list[float] = field(default_factory=list)

    @property
    def host_us(self) -> float:
        return median(self.issue_us)

    def joined(self, other: WallTime) -> WallTime:
        """The rounds of both."""
        return WallTime(self.wall_us + other.wall_us, self.issue_us + other.issue_us)


def wall_times(
    arms: Mapping[str, Callable[[], Any]], delimiters: Delimiters, *, rounds: int = ROUNDS
) -> dict[str, WallTime]:
    """Round-robin over warmed-up arms, each call after an L2 flush and a synchronise; ArmError where an arm raises."""
    times = {arm: WallTime() for arm in arms}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    names = list(arms)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for i in range(len(names)):
                arm = names[(turn + i) % len(names)]
                delimiters.flush()
                torch.cuda.synchronize()
                start.record()
                before = time.perf_counter()
                try:
                    arms[arm]()
                except Exception as error:
                    raise ArmError(arm) from error
                issued = time.perf_counter() - before
                end.record()
                torch.cuda.synchronize()
                # To the nanosecond: the clocks tell no more, and a record keeps every sample.
                times[arm].wall_us.append(round(start.elapsed_time(end) * 1e3, 3))
                times[arm].issue_us.append(round(issued * 1e6, 3))
    finally:
        if collecting:
            gc.enable()
    return times


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory that one call holds above what was allocated before it.

    From an empty cache, since a cached block is given out whole where less than 1 MiB of it would be left over.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak
