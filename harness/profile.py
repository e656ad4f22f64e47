"""Device time: the sum of the kernel times of one call, from one profiler session for all arms of a case.

The session runs `windows` rounds; in each, every arm is announced by a marker kernel and called `calls` times,
each call after a kernel that flushes the L2 cache:

    marker  flush call flush call ...   marker  flush call ...   marker
            `---------- arm 0 ---------'        `---- arm 1 ---'

Every other kernel, copy or memset between two delimiters belongs to the call. The profiler can lose events, so each
call's list of kernels has to agree with the others of its arm; a window with a call that doesn't is thrown away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch

from harness.delimiters import FLUSH, MARKER, Delimiters

WINDOWS = 3
CALLS = 50
# Kineto's kinds of device-side entries that are no work: annotations and waits.
_NOT_WORK = frozenset({"gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range", "overhead"})


class Event(NamedTuple):
    """One kernel, copy or memset on the device's timeline."""

    name: str
    start_ns: int
    duration_ns: int


class ArmError(RuntimeError):
    """One arm raised while all were measured; `arm` says which, `__cause__` why."""

    def __init__(self, arm: str) -> None:
        super().__init__(f"{arm} raised")
        self.arm = arm


@dataclass(frozen=True)
class DeviceTime:
    """One arm's device time.

    dev_us: the median call of each complete window.
    kernels: the names of one call's kernels, in order.
    reason: None, or why there is no valid time.
    discarded: windows thrown away.
    """

    dev_us: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()
    reason: str | None = None
    discarded: int = 0

    @property
    def launches(self) -> int:
        return len(self.kernels)

    def joined(self, other: DeviceTime) -> DeviceTime:
        """The windows of two sessions; one without a valid time adds none, other kernels make both invalid."""
        discarded = self.discarded + other.discarded
        if self.reason or other.reason:
            return replace(self if other.reason else other, discarded=discarded)
        if self.kernels != other.kernels:
            differ = f"calls launched {self.launches} kernels in one session, {other.launches} in another"
            same = "the same number of other kernels from one session to the next"
            return DeviceTime(reason=differ if self.launches != other.launches else same, discarded=discarded)
        return DeviceTime(self.dev_us + other.dev_us, self.kernels, None, discarded)


def by_marker(events: Sequence[Event], marker: str = MARKER) -> list[list[Event]]:
    """The timeline as blocks of events between markers; what precedes the first is dropped."""
    blocks: list[list[Event]] = []
    for event in sorted(events, key=lambda e: e.start_ns):
        if marker in event.name:
            blocks.append([])
        elif blocks:
            blocks[-1].append(event)
    return blocks


def split(events: Sequence[Event], flush: str = FLUSH, marker: str = MARKER) -> list[list[list[Event]]]:
    """The timeline as blocks (between markers) of calls (between flushes) of events; what precedes is dropped."""
    blocks: list[list[list[Event]]] = []
    for block in by_marker(events, marker):
        blocks.append([])
        for event in block:
            if flush in event.name:
                blocks[-1].append([])
            elif blocks[-1]:
                blocks[-1][-1].append(event)
    return blocks


def summarize(
    events: Sequence[Event],
    arms: Sequence[str],
    windows: int,
    calls: int,
    flush: str = FLUSH,
    marker: str = MARKER,
) -> dict[str, DeviceTime]:
    """Each arm's device time from a session's events; pure, so that lost events can be planted in a test."""
    if len(set(events)) != len(events):
        twice = DeviceTime(reason="profiler delivered events twice", discarded=windows)
        return dict.fromkeys(arms, twice)
    blocks = split(events, flush, marker)
    wanted = windows * len(arms)
    # The session ends with one more marker, which bounds the last block.
    if len(blocks) != wanted + 1:
        lost = DeviceTime(reason=f"profiler lost events: {len(blocks)} of {wanted + 1} arm markers", discarded=windows)
        return dict.fromkeys(arms, lost)
    return {arm: _arm_time(blocks[i : wanted : len(arms)], calls) for i, arm in enumerate(arms)}


def _arm_time(windows: Sequence[list[list[Event]]], calls: int) -> DeviceTime:
    lists = Counter(tuple(event.name for event in call) for window in windows for call in window)
    # Lost events shorten a list, so of equally common ones the longest is right.
    kernels = max(lists, key=lambda names: (lists[names], len(names)), default=())
    if not kernels:
        seen = f"kernels in {lists.total() - lists[()]} of {calls * len(windows)} calls"
        return DeviceTime(reason=f"profiler saw {seen}", discarded=len(windows))
    medians = []
    for window in windows:
        if len(window) == calls and all(tuple(event.name for event in call) == kernels for call in window):
            medians.append(median(sum(event.duration_ns for event in call) for call in window) / 1000)
    discarded = len(windows) - len(medians)
    if not medians:
        agreeing = [sum(tuple(e.name for e in call) == kernels for call in window) for window in windows]
        return DeviceTime(
            kernels=kernels,
            reason=f"no complete window: {agreeing} of {calls} calls with the same {len(kernels)} kernels",
            discarded=discarded,
        )
    return DeviceTime(tuple(medians), kernels, None, discarded)


def device_times(
    arms: Mapping[str, Callable[[], Any]],
    delimiters: Delimiters,
    *,
    windows: int = WINDOWS,
    calls: int = CALLS,
    attempts: int = 2,
) -> dict[str, DeviceTime]:
    """Measures warmed-up arms; repeats the session once for arms without a complete window.

    Raises ArmError where an arm raises.
    """
    times: dict[str, DeviceTime] = {}
    pending = dict(arms)
    for _ in range(attempts):
        events = collect(pending, delimiters, windows=windows, calls=calls)
        times.update(summarize(events, tuple(pending), windows, calls))
        pending = {arm: call for arm, call in arms.items() if times[arm].reason}
        if not pending:
            break
    return {arm: times[arm] for arm in arms}


def collect(arms: Mapping[str, Callable[[], Any]], delimiters: Delimiters, *, windows: int, calls: int) -> list[Event]:
    """One profiler session over all arms, as this module's docstring draws it."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as session:
        # The first launches of a session set the profiler up; nothing before the first marker counts.
        delimiters.flush()
        torch.cuda.synchronize()
        for _ in range(windows):
            for arm, call in arms.items():
                delimiters.marker()
                try:
                    for _ in range(calls):
                        delimiters.flush()
                        call()
                except Exception as error:
                    raise ArmError(arm) from error
        delimiters.marker()
        torch.cuda.synchronize()
    return device_events(session)


def device_events(session: torch.profiler.profile) -> list[Event]:
    """The device-side work of a finished session, straight from Kineto: building PyTorch's event tree costs seconds."""
    profiler = session.profiler
    if profiler is None or profiler.kineto_results is None:
        return []
    return [
        Event(event.name(), event.start_ns(), event.duration_ns())
        for event in profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation()
        and getattr(event, "activity_type", str)() not in _NOT_WORK
    ]
