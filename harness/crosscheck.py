"""Device time three ways on a few cases: by the profiler, by events around a batch, and by replaying the batch as a graph.

The profiler sums kernels and sees no gap between them. Events around a batch see what passed on the device, gaps and
all; the batch is issued while the device still sleeps, so that the host's pace does not count. A graph has the gaps of
its own launches. In all three the L2 cache is flushed before every call; the flushes alone are measured and taken off.
What a call leaves in the cache to be written back is paid for by the next flush, so events and a graph see it, and the
profiler does not: 33 MB of results are some 8 µs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from harness import graphed
from harness.delimiters import FLUSH, Delimiters
from harness.profile import Event, by_marker, collect, device_times
from harness.record import Row
from harness.stamp import DTYPES
from harness.steps import PHASES, Step, arm_steps, timed_inputs
from kernels.registry import Case, Op, ops

KIND = "crosscheck"
COUNT = 6
CALLS = 10
ROUNDS = 7
ARMS = ("eager", "triton", "tilelang")
WAYS = ("profiler", "events", "graph")
# Cycles of a device's sleep for each second that the host takes to issue a batch: half as long again at 2 GHz.
CYCLES = 3e9
# Two ways agree within this share, or where each launch of the call explains a difference of this many µs: a gap before
# a kernel that waits for the one before it, or a start that the tail of the flush hides.
AGREE = 0.05
GAP_US = (-1.0, 3.0)


def choose(ops: Iterable[Op], count: int = COUNT) -> list[tuple[Op, Case]]:
    """Cases spread evenly over the sizes of the sweep (by bytes), of as many ops as there are."""

    def size(pair: tuple[Op, Case]) -> int:
        cost = pair[0].cost(pair[1].dims, 2)
        return cost.bytes_read + cost.bytes_written

    left = sorted(((op, case) for op in ops for case in op.cases), key=size)
    sizes = [size(pair) for pair in left]
    found: list[tuple[Op, Case]] = []
    for at in range(min(count, len(sizes))):
        wanted = sizes[round(at * (len(sizes) - 1) / max(1, count - 1))]
        used = {op.name for op, _ in found}
        rest = [pair for pair in left if pair not in found]
        fresh = [pair for pair in rest if pair[0].name not in used] or rest
        found.append(min(fresh, key=lambda pair: abs(size(pair) - wanted)))
    return found


def measure(
    device: torch.device,
    delimiters: Delimiters,
    cases: Sequence[tuple[Op, Case]],
    dtype: str = "fp16",
    arms: Sequence[str] = ARMS,
) -> list[Row]:
    """One row per case, arm and phase, with the samples in µs of each way; an arm that raises has a reason instead."""
    rows = []
    for op, case in cases:
        for arm in arms:
            about = {"kind": KIND, "op": op.name, "case": case.name, "dtype": dtype, "arm": arm}
            try:
                found = _arm(device, delimiters, op, case, dtype, arm)
            except Exception as error:
                rows.append({**about, "phase": None, "reason": f"{type(error).__name__}: {error}"[:200]})
                continue
            rows += [{**about, "phase": phase, **samples} for phase, samples in found.items()]
    return rows


def _arm(
    device: torch.device, delimiters: Delimiters, op: Op, case: Case, dtype: str, arm: str
) -> dict[str, dict[str, Any]]:
    leaves, grad = timed_inputs(op, case, dtype, device)
    calls = arm_steps(op, leaves, grad, arm)
    for call in calls.values():
        for _ in range(3):
            call()
    found = {}
    for phase in PHASES:
        call = calls[phase]
        profiled = device_times({arm: call}, delimiters)[arm]
        batch, flushes = _batch(delimiters.flush, call), _batch(delimiters.flush)
        inputs, tensors = timed_inputs(op, case, dtype, device)
        apart = arm_steps(op, inputs, tensors, arm)[phase]
        graphs = [
            graphed.capture(_batch(delimiters.flush, *some), list(inputs.values()), device)[0]
            for some in ((apart,), ())
        ]
        found[phase] = {
            "launches": profiled.launches,
            "reason": profiled.reason,
            "profiler_us": list(profiled.dev_us),
            "events_us": per_call(batch, flushes, device),
            "graph_us": per_call(graphs[0], graphs[1], device),
            "flush_us": flush_times(collect({arm: call, "nothing": _nothing}, delimiters, windows=1, calls=CALLS)),
        }
    return found


def _nothing() -> None:
    """A call that leaves nothing in the cache."""


def flush_times(events: Sequence[Event]) -> list[float | None]:
    """The median µs of a flush that comes after a call, in each block of a session's events; None where there is none."""
    blocks = [[event.duration_ns / 1e3 for event in block if FLUSH in event.name] for block in by_marker(events)]
    # A block's first flush comes after the block before it, and the session ends with a marker.
    return [median(block[1:]) if len(block) > 1 else None for block in blocks[:-1]]


def _batch(*each: Step) -> Step:
    def calls() -> Any:
        result = None
        for _ in range(CALLS):
            for step in each:
                result = step()
        return result

    return calls


def per_call(batch: Step, flushes: Step, device: torch.device) -> list[float]:
    """µs of one call in each round: the batch less the flushes alone, over the calls in it."""
    return [(elapsed_us(batch, device) - elapsed_us(flushes, device)) / CALLS for _ in range(ROUNDS)]


def elapsed_us(batch: Callable[[], Any], device: torch.device) -> float:
    """µs between two events on the device around a batch that the host has issued before the device begins it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before = time.perf_counter()
    batch()
    issued = time.perf_counter() - before
    torch.cuda.synchronize(device)
    torch.cuda._sleep(max(2**20, round(CYCLES * issued)))
    start.record()
    batch()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) * 1e3


def times(row: Mapping[str, Any]) -> dict[str, float] | None:
    """The median of each way, or None where one has no samples."""
    samples = {way: row.get(f"{way}_us") for way in WAYS}
    return {way: median(each) for way, each in samples.items() if each} if all(samples.values()) else None


def explain(row: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> str:
    """Why the three differ, in words; "unexplained" where nothing known accounts for it.

    meta: of the run that the row is in; without it nothing is put down to lines that are written back.
    """
    found = times(row)
    if found is None:
        return f"not measured: {row.get('reason')}"
    parts = []
    for way in WAYS[1:]:
        apart = found[way] - found["profiler"]
        launches = max(1, row["launches"])
        if abs(apart) <= AGREE * found["profiler"]:
            parts.append(f"{way} agree" if way == "events" else f"{way} agrees")
        elif GAP_US[0] <= apart / launches <= GAP_US[1]:
            parts.append(f"{way} {apart / launches:+.1f} µs a launch")
        elif 0 < apart <= AGREE * found["profiler"] + GAP_US[1] * launches + write_back_us(row, meta or {}):
            parts.append(f"{way} {apart:+.1f} µs: launches and write-back")
        elif _apart(row[f"{way}_us"], row["profiler_us"]) <= AGREE * found["profiler"]:
            parts.append(f"{way} {apart:+.1f} µs: in the samples' spread")
        else:
            parts.append(f"{way} {apart:+.1f} µs: unexplained")
    return ", ".join(parts)


def write_back_us(row: Mapping[str, Any], meta: Mapping[str, Any]) -> float:
    """How long the flush after a call writes back what the call left in the L2 cache.

    As measured, by what flushes take after the call and after nothing. Where a row has no such times, at most: each launch
    may leave as many bytes as the call's results have, all together no more than the cache holds; they are written while
    the flush reads, so at the rate of a copy.
    """
    after, alone = row.get("flush_us") or (None, None)
    if after is not None and alone is not None:
        return max(0.0, after - alone)
    op, rate = ops().get(row["op"]), (meta.get("ceilings") or {}).get("copy_gbps")
    case = next((case for case in op.cases if case.name == row["case"]), None) if op else None
    if op is None or case is None or not rate or not meta.get("l2_bytes"):
        return 0.0
    cost = op.cost(case.dims, DTYPES[row["dtype"]].itemsize, backward=row["phase"] == "fwdbwd")
    return min(cost.bytes_written * max(1, row["launches"]), meta["l2_bytes"]) / (rate * 1e3)


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    """How far the ranges of two samples lie apart; 0 where they overlap."""
    return max(0.0, min(a) - max(b), min(b) - max(a))


def explained(rows: Iterable[Mapping[str, Any]], meta: Mapping[str, Any] | None = None) -> bool:
    """Whether there is a measurement and every one is explained."""
    said = [explain(row, meta) for row in rows]
    return bool(said) and not any("unexplained" in text or "not measured" in text for text in said)
