"""The profiler's timeline: what is attributed to which arm, and lost events that must never become a fast time."""

from __future__ import annotations

import pytest

from harness.delimiters import FLUSH, MARKER
from harness.profile import Event, summarize

WINDOWS, CALLS = 3, 50
KERNELS = {"eager": [("mm", 4000), ("mul", 2000)], "triton": [("fused", 3000)]}


def timeline(arms=KERNELS, windows=WINDOWS, calls=CALLS):
    """The events of a session without losses, as the device runs them."""
    events, now = [], 1000

    def add(name, duration):
        nonlocal now
        events.append(Event(name, now, duration))
        now += duration + 500

    add("something before the first marker", 100)
    add(FLUSH, 80000)
    for _ in range(windows):
        for kernels in arms.values():
            add(f"{MARKER}_0d", 1000)
            for _ in range(calls):
                add(FLUSH, 80000)
                for name, duration in kernels:
                    add(name, duration)
    add(MARKER, 1000)
    return events


def found(events, arms=tuple(KERNELS), windows=WINDOWS, calls=CALLS):
    return summarize(events, arms, windows, calls)


def nth(events, name, n):
    """The index of the n-th event of that name."""
    return [i for i, event in enumerate(events) if name in event.name][n]


def test_whole_session():
    times = found(timeline())
    assert times["eager"].dev_us == (6.0, 6.0, 6.0)
    assert times["eager"].kernels == ("mm", "mul")
    assert times["triton"].dev_us == (3.0, 3.0, 3.0)
    assert (times["eager"].launches, times["triton"].launches) == (2, 1)
    assert [t.reason for t in times.values()] == [None, None]


def test_order_of_delivery_does_not_matter():
    assert found(timeline()[::-1]) == found(timeline())


def test_own_zero_fill_counts():
    arms = {"a": [("Memset (Device)", 700), ("fused", 1000)], "b": [("fused", 1000)]}
    times = found(timeline(arms), tuple(arms))
    assert times["a"].dev_us == (1.7,) * 3 and times["a"].launches == 2
    assert times["b"].dev_us == (1.0,) * 3


def test_median_of_each_window_is_kept():
    events = timeline({"a": [("k", 1000)]}, windows=2)
    for n in range(30):
        i = nth(events, "k", n)
        events[i] = events[i]._replace(duration_ns=5000)
    # "k" is no part of a delimiter's name, so these are the first window's calls.
    assert found(events, ("a",), windows=2)["a"].dev_us == (5.0, 1.0)


@pytest.mark.parametrize("name", ["mm", "mul", FLUSH])
def test_one_lost_event_costs_its_window(name):
    events = timeline()
    # The 10th call of the first window; the flush before the first marker is one more.
    del events[nth(events, name, 10)]
    times = found(events)
    assert times["eager"].dev_us == (6.0, 6.0) and times["eager"].discarded == 1
    assert times["triton"].dev_us == (3.0, 3.0, 3.0)


def test_losses_in_every_window_are_invalid():
    events = timeline()
    for window in (2, 1, 0):
        del events[nth(events, "mul", window * CALLS + 7)]
    eager = found(events)["eager"]
    assert eager.dev_us == () and "no complete window: [49, 49, 49] of 50" in eager.reason


@pytest.mark.parametrize("seen", [0, 49, 100])
@pytest.mark.parametrize("name", ["k", FLUSH])
def test_wrong_number_of_events_is_invalid(seen, name):
    """0, 49 or 100 kernels, or calls, where 50 were made in every window."""
    events = timeline({"a": [("k", 1000)]}, calls=50)
    before, events = events[:2], events[2:]
    these = [e for e in events if e.name == name]
    rest = [e for e in events if e.name != name]
    these = these * 2 if seen == 100 else [e for i, e in enumerate(these) if i % 50 < seen]
    time = found(before + rest + these, ("a",))["a"]
    assert time.dev_us == () and time.reason


def test_twice_as_many_calls_is_invalid():
    time = found(timeline({"a": [("k", 1000)]}, calls=100), ("a",), calls=50)["a"]
    assert time.dev_us == () and "no complete window: [100, 100, 100] of 50" in time.reason


def test_no_events_at_all():
    assert all(t.reason and not t.dev_us for t in found([]).values())


def test_consistent_loss_in_one_window_does_not_win():
    """A window that lost the same kernel in every call agrees with itself, not with the arm's other windows."""
    events = timeline()
    for n in reversed(range(CALLS)):
        del events[nth(events, "mul", n)]
    eager = found(events)["eager"]
    assert eager.dev_us == (6.0, 6.0) and eager.kernels == ("mm", "mul")


def test_lost_marker_invalidates_all():
    events = timeline()
    del events[nth(events, MARKER, 2)]
    times = found(events)
    assert all("arm markers" in t.reason and not t.dev_us for t in times.values())
