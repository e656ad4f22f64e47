"""How often `compare` errs, on runs simulated with the noise of recorded ones.

A simulated row keeps a recorded row's device time and takes the scatter of another row's windows; between two runs every
row moves by a factor of its own, and all of them by a common one, as two days on one card would have it.
"""

from __future__ import annotations

import random

import pytest

from harness import comparison, record
from harness.stamp import recorded_dirs

PHASES = ("fwd", "fwdbwd")
# Standard deviations of a row's own move and of the run's; windows of one run scatter by 0.3 % in the median row.
OWN, COMMON = 0.01, 0.004
TICK = 0.032


@pytest.fixture(scope="module")
def times():
    """(device time, windows over their best) of every recorded row's phase."""
    runs = [run for folder in recorded_dirs() for run in record.load_dir(folder).values()]
    # A row of a family: what is measured of the card itself has a kind.
    rows = [row for run in runs for row in run.rows if "kind" not in row]
    found = [row[phase]["dev_us"] for row in rows if row["status"] == "ok" for phase in PHASES]
    assert len(found) > 300
    return [(min(windows), [window / min(windows) for window in windows]) for windows in found]


def rerun(time, scatters, draw, common):
    """One run's windows of a row that takes `time`, in steps of the profiler's clock."""
    moved = time * common * draw.gauss(1, OWN)
    scatter = draw.choice(scatters)
    return [max(TICK, round(moved * factor / TICK) * TICK) for factor in scatter]


def share(times, verdict, factor, seed):
    """The share of rows that get this verdict where the second run is slower by `factor`."""
    draw = random.Random(seed)
    commons = [draw.gauss(1, COMMON) for _ in range(2)]
    # A row's windows scatter as those of rows of about its length do.
    ordered = sorted(times)
    found = 0
    for at, (time, _) in enumerate(ordered):
        near = [scatter for _, scatter in ordered[max(0, at - 30) : at + 30]]
        before, after = (rerun(time * by, near, draw, common) for by, common in zip((1, factor), commons, strict=True))
        row = {"status": "ok", "noisy": False, "throttled": False}
        change = comparison._change((), "fwd", row | {"fwd": {"dev_us": before}}, row | {"fwd": {"dev_us": after}})
        found += change.verdict in verdict
    return found / len(ordered)


@pytest.mark.parametrize("seed", range(3))
def test_two_runs_of_one_tree(times, seed):
    assert share(times, ("slower", "faster"), 1.0, seed) <= 0.02


@pytest.mark.parametrize("seed", range(3))
def test_a_tenth_slower_is_found(times, seed):
    assert share(times, ("slower",), 1.1, seed) >= 0.95


@pytest.mark.parametrize("seed", range(3))
def test_a_tenth_faster_is_found(times, seed):
    assert share(times, ("faster",), 1 / 1.1, seed) >= 0.95
