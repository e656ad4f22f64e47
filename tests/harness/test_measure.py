"""One case's rows on the CPU, with the timers replaced: statuses, plausibility, arms that fail half way."""

from __future__ import annotations

import pytest
import torch
from fakes import CEILINGS, product, toy_op

from harness import measure, throttle
from harness.measure import Bench, Plan, measure_case
from harness.plausible import implausible
from harness.profile import ArmError, DeviceTime
from harness.wall import WallTime
from kernels import UnsupportedCase


@pytest.fixture
def bench(monkeypatch):
    """A bench whose timers call every arm once and give each the time that `times` holds for it."""
    times = {"eager": 6.0, "compile": 5.0, "triton": 3.0, "tilelang": 4.0}

    def run(arms):
        for arm, call in arms.items():
            try:
                call()
            except Exception as error:
                raise ArmError(arm) from error

    def device_times(arms, delimiters, *, windows, calls):
        run(arms)
        return {a: times[a] if isinstance(times[a], DeviceTime) else DeviceTime((times[a],) * 3, ("k",)) for a in arms}

    def wall_times(arms, delimiters, *, rounds):
        run(arms)
        return {arm: WallTime([40.0, 41.0], [30.0, 20.0, 25.0]) for arm in arms}

    monkeypatch.setattr(measure, "device_times", device_times)
    monkeypatch.setattr(measure, "wall_times", wall_times)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: call().numel() * 4)
    monkeypatch.setattr(throttle, "state", lambda: throttle.State(1980, 0, 0))
    made = Bench(torch.device("cpu"), None, CEILINGS, Plan(), l2_bytes=1000, capability=(9, 0))
    return made, times


def measured(bench, op, dtype="fp32", backends=measure.BACKENDS):
    return {row["backend"]: row for row in measure_case(bench[0], op, op.cases[0], dtype, backends)}


def test_whole_case(bench):
    rows = measured(bench, toy_op())
    assert {b: row["status"] for b, row in rows.items()} == {
        "eager": "ok",
        "compile": "ok",
        "triton": "ok",
        "tilelang": "unsupported",
    }
    assert rows["tilelang"]["reason"] == "the toy has no TileLang kernel"
    row = rows["triton"]
    assert row["fwd"] == {"dev_us": [3.0] * 3, "wall_us": [40.0, 41.0], "host_us": 25.0, "launches": 1} | {
        "floor_us": row["floor_us"]
    }
    assert row["dims"] == {"O": 8, "I": 16, "R": 4}
    assert (row["bytes_read"], row["bytes_written"], row["flops"]) == (4 * (32 + 64), 4 * 128, 2 * 8 * 16 * 4)
    assert row["l2_resident"] and row["vram_fwd"] == 512 and row["clock_mhz"] == 1980
    assert not row["throttled"] and not row["noisy"] and row["tf32"] is False
    assert row["ulp"] == max(row["ulp_out"], *row["ulp_grads"].values())


def test_wrong_arm_is_not_timed(bench):
    op = toy_op(lambda a, b, scale, *, backend: product(a, b, scale) * (1.2 if backend == "triton" else 1))
    rows = measured(bench, op, backends=("eager", "triton"))
    assert rows["eager"]["status"] == "ok"
    assert rows["triton"]["status"] == "failed" and rows["triton"]["fwd"] is None


def test_planted_eager_fallback_in_the_compile_arm(bench):
    rows = measured(bench, toy_op(lambda a, b, scale, *, backend: product(a, b, scale)), backends=("eager", "compile"))
    assert rows["eager"]["status"] == "ok"
    assert rows["compile"]["status"] == "invalid" and "ran eagerly" in rows["compile"]["reason"]
    assert rows["compile"]["fwd"] is None


def test_arm_that_fails_while_timed_leaves_the_others(bench):
    calls = []

    def call(a, b, scale, *, backend):
        calls.append(backend)
        if backend == "triton" and calls.count("triton") > 14:
            raise RuntimeError("late failure")
        return product(a, b, scale)

    rows = measured(bench, toy_op(call), backends=("eager", "triton"))
    assert rows["eager"]["status"] == "ok"
    assert (rows["triton"]["status"], rows["triton"]["reason"]) == ("failed", "RuntimeError: late failure")


def test_lost_events_are_invalid(bench):
    bench[1]["triton"] = DeviceTime(reason="profiler saw kernels in 0 of 150 calls", discarded=3)
    row = measured(bench, toy_op(), backends=("eager", "triton"))["triton"]
    assert row["status"] == "invalid" and row["reason"].startswith("fwd: profiler saw")
    assert row["fwd"]["dev_us"] == []


def test_noise_and_drift(bench, monkeypatch):
    bench[1]["triton"] = DeviceTime((3.0, 3.3, 3.1), ("k",))
    short = Bench(**{**bench[0].__dict__, "plan": Plan(extra=0)})
    rows = measured((short, None), toy_op(), backends=("eager", "triton"))
    assert rows["triton"]["noisy"] and not rows["eager"]["noisy"]
    clocks = iter((1980, 1980, 1500))
    monkeypatch.setattr(throttle, "state", lambda: throttle.State(next(clocks), 0x04, 0))
    row = measured(bench, toy_op(), backends=("eager",))["eager"]
    assert row["noisy"] and row["throttled"] and row["clock_mhz"] == 1500


def test_noisy_arm_gets_more_rounds_and_all_samples_are_kept(bench, monkeypatch):
    """Every arm goes again with the noisy one; once its best windows agree, no more is measured."""
    sessions = iter([(3.0, 3.3, 3.2), (3.5, 3.01, 3.4), (3.02, 3.6, 3.6), (9.0,) * 3, (9.0,) * 3])

    def device_times(arms, delimiters, *, windows, calls):
        noisy = next(sessions) if "triton" in arms else ()
        return {arm: DeviceTime(noisy if arm == "triton" else (6.0,) * windows, ("k",)) for arm in arms}

    monkeypatch.setattr(measure, "device_times", device_times)
    rows = measured(bench, toy_op(), backends=("eager", "triton"))
    assert rows["triton"]["fwd"]["dev_us"] == [3.0, 3.3, 3.2, 3.5, 3.01, 3.4, 3.02, 3.6, 3.6]
    assert rows["eager"]["fwd"]["dev_us"] == [6.0] * 9 and not rows["triton"]["noisy"]
    assert rows["triton"]["fwdbwd"]["dev_us"] == [9.0] * 3


def test_rounds_have_a_cap(bench, monkeypatch):
    times = (2.0**n for n in range(100))

    def device_times(arms, delimiters, **_):
        return {arm: DeviceTime((next(times), next(times)), ("k",)) for arm in arms}

    def wall_times(arms, delimiters, **_):
        return {arm: WallTime([next(times), next(times)], [1.0]) for arm in arms}

    monkeypatch.setattr(measure, "device_times", device_times)
    monkeypatch.setattr(measure, "wall_times", wall_times)
    row = measured(bench, toy_op(), backends=("eager", "triton"))["triton"]
    assert [len(row[phase][kind]) for phase in measure.PHASES for kind in ("dev_us", "wall_us")] == [8] * 4
    assert row["noisy"]


def test_sessions_that_disagree():
    first, again = DeviceTime((1.0, 1.1), ("a", "b")), DeviceTime((0.5,), ("a",))
    assert first.joined(again).reason == "calls launched 2 kernels in one session, 1 in another"
    lost = DeviceTime(reason="profiler lost events", discarded=3)
    assert first.joined(lost) == lost.joined(first) == DeviceTime((1.0, 1.1), ("a", "b"), None, 3)
    assert lost.joined(lost).reason and not lost.joined(lost).dev_us


def test_bf16_needs_a_newer_card(bench):
    old = Bench(torch.device("cpu"), None, CEILINGS, Plan(), l2_bytes=1000, capability=(7, 5))
    rows = measured((old, None), toy_op(), "bf16")
    assert {row["status"] for row in rows.values()} == {"unsupported"}
    assert "compute capability 8.0, this card has 7.5" in rows["eager"]["reason"]


def test_unsupported_everywhere_is_rows(bench):
    def call(a, b, scale, *, backend):
        raise UnsupportedCase("rank above 128")

    rows = measured(bench, toy_op(call))
    assert {(row["status"], row["reason"]) for row in rows.values()} == {("unsupported", "rank above 128")}


def test_oracle_that_fails_is_rows(bench):
    op = toy_op()
    broken = type(op)(**{**op.__dict__, "oracle": lambda a, b, scale: a})
    rows = measured(bench, broken)
    assert {row["status"] for row in rows.values()} == {"failed"}
    assert rows["eager"]["reason"].startswith("the float64 oracle: ")


@pytest.mark.parametrize(
    ("dev", "wall", "host", "floor", "resident", "says"),
    [
        (10.0, 50.0, 40.0, 9.0, False, None),
        (9.6, 50.0, 40.0, 10.0, False, None),
        (9.0, 50.0, 40.0, 10.0, False, "under the floor"),
        (9.0, 50.0, 40.0, 10.0, True, None),
        (9.0, 50.0, 40.0, None, False, None),
        (2000.0, 2100.0, 100.0, 100.0, False, None),
        (1000.0, 2100.0, 100.0, 100.0, False, "events around the call"),
        # torch.compile's forward + backward of a long case: the host issues for longer than the GPU works.
        (681.0, 1143.0, 1193.0, 100.0, False, None),
        (100.0, 400.0, 50.0, 10.0, False, None),
    ],
)
def test_implausible(dev, wall, host, floor, resident, says):
    found = implausible(dev, wall, host, floor, resident)
    assert found is None if says is None else says in found
