"""The arms that replay CUDA graphs: checked on other inputs than they were captured with, and rows of their own."""

from __future__ import annotations

import pytest
import torch
from fakes import CEILINGS, fake_capture, product, toy_op

from harness import graphed, measure, prebuild, precision, throttle
from harness.measure import Bench, Plan, measure_case
from harness.profile import DeviceTime
from harness.record import blank_row
from harness.steps import ARMS, BACKENDS, GRAPHED, chosen
from harness.wall import WallTime
from kernels import UnsupportedCase

CPU = torch.device("cpu")
OP = toy_op(lambda a, b, scale, *, backend: product(a, b, scale))


def reason(monkeypatch, replay_of, op=OP):
    """What the check says of a graph whose replay is replay_of(call, faithful replay, output, leaves)."""

    def planted(call, leaves, device):
        replay, output, peak = fake_capture(call, leaves, device)
        return replay_of(call, replay, output, leaves), output, peak

    monkeypatch.setattr(graphed, "capture", planted)
    arm = graphed.make(op, op.tiny, "fp32", CPU, "triton_graphed")
    return graphed.check(arm, precision.make_truth(op, op.tiny.dims, torch.float32, CPU, 7)).reason


def test_faithful_graph(monkeypatch):
    assert reason(monkeypatch, lambda call, replay, output, leaves: replay) is None


def test_graph_that_captured_nothing(monkeypatch):
    found = reason(monkeypatch, lambda *made: lambda: None)
    assert found.startswith("output: 128 of 128 elements are not finite (128 NaN")


def test_graph_of_the_captures_inputs(monkeypatch):
    """A call that copied its inputs somewhere before the capture replays what it saw then."""

    def baked(call, replay, output, leaves):
        then = output.detach().clone(), [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        grads = [leaf.grad for leaf in leaves]

        def again():
            with torch.no_grad():
                output.copy_(then[0])
                for grad, old in zip(grads, then[1], strict=True):
                    if grad is not None:
                        grad.copy_(old)

        return again

    assert reason(monkeypatch, baked).startswith("output: relative error")


def test_graph_without_its_backward(monkeypatch):
    def forward_only(call, replay, output, leaves):
        def again():
            fresh = call()
            with torch.no_grad():
                output.copy_(fresh)

        return again

    assert reason(monkeypatch, forward_only).startswith("a: 32 of 32 elements are not finite")


def test_graph_that_mutates_an_input(monkeypatch):
    def mutating(call, replay, output, leaves):
        def again():
            replay()
            leaves[1].data[0] += 1

        return again

    assert reason(monkeypatch, mutating) == "changed its input b"


def test_forward_graph_alone_is_checked(monkeypatch):
    def no_forward(call, replay, output, leaves):
        return replay if output.requires_grad else lambda: None

    assert reason(monkeypatch, no_forward).startswith("forward without autograd: output: 128 of 128")


@pytest.fixture
def bench(monkeypatch):
    """A bench whose graphs and timers are played on the CPU; `seen` collects the arms that were timed together."""
    seen = []

    def device_times(arms, delimiters, *, windows, calls):
        seen.append(tuple(arms))
        for call in arms.values():
            call()
        return {arm: DeviceTime((3.0,) * windows, ("k",)) for arm in arms}

    def wall_times(arms, delimiters, *, rounds):
        return {arm: WallTime([5.0 if arm in GRAPHED else 40.0], [4.0]) for arm in arms}

    monkeypatch.setattr(graphed, "capture", fake_capture)
    monkeypatch.setattr(measure, "device_times", device_times)
    monkeypatch.setattr(measure, "wall_times", wall_times)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: 1 << 9)
    monkeypatch.setattr(throttle, "state", lambda: throttle.State(1980, 0, 0))
    return Bench(CPU, None, CEILINGS, Plan(), l2_bytes=1000, capability=(9, 0)), seen


def test_rows_of_their_own(bench):
    made, seen = bench
    arms = ("eager", "triton", "eager_graphed", "triton_graphed")
    rows = {row["backend"]: row for row in measure_case(made, OP, OP.cases[0], "fp32", arms)}
    assert {row["status"] for row in rows.values()} == {"ok"} and seen == [arms, arms]
    row = rows["triton_graphed"]
    assert set(row) == set(blank_row("", "", "", "", {})) and row["fwdbwd"]["wall_us"] == [5.0]
    assert row["vram_fwd"] == row["vram_fwdbwd"] == 1 << 10 and rows["triton"]["vram_fwd"] == 1 << 9
    assert row["ulp"] > 0 and set(row["ulp_grads"]) == {"a", "b"}


def test_graphed_arms_alone(bench):
    """A sweep that adds them to an older record measures nothing else, and eager's graph bounds the others."""
    rows = measure_case(bench[0], OP, OP.cases[0], "fp32", GRAPHED)
    assert [(row["backend"], row["status"]) for row in rows] == [(arm, "ok") for arm in GRAPHED]


def test_a_capture_that_fails_is_a_row(bench, monkeypatch):
    def capture(call, leaves, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed, "capture", capture)
    rows = measure_case(bench[0], OP, OP.cases[0], "fp32", ("eager", "eager_graphed"))
    assert rows[0]["status"] == "ok" and rows[1]["status"] == "failed"
    assert rows[1]["reason"].startswith("capturing a CUDA graph: RuntimeError: operation not permitted")


def test_unsupported_plain_arm_is_unsupported_as_a_graph(bench):
    def call(a, b, scale, *, backend):
        if backend == "tilelang":
            raise UnsupportedCase("rank above 128")
        return product(a, b, scale)

    rows = measure_case(bench[0], toy_op(call), OP.cases[0], "fp32", ARMS[-1:])
    assert (rows[0]["status"], rows[0]["reason"]) == ("unsupported", "rank above 128")


def test_wrong_graph_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(graphed, "capture", lambda *what: (lambda: None, *fake_capture(*what)[1:]))
    made, seen = bench
    rows = measure_case(made, OP, OP.cases[0], "fp32", ("eager", "eager_graphed"))
    assert rows[1]["status"] == "failed" and "not finite" in rows[1]["reason"] and rows[1]["fwd"] is None
    assert seen == [("eager",), ("eager",)]


def test_kernels_are_built_once_for_both(monkeypatch):
    built = []
    monkeypatch.setattr(prebuild, "run_task", lambda task, device: built.append(task))
    prebuild.prebuild([("op", "case", "fp16", arm) for arm in ARMS], jobs=1, echo=lambda text: None)
    assert [task[3] for task in built] == ["triton", "tilelang", "compile"]


def test_choice_of_arms():
    assert chosen(None, BACKENDS) == BACKENDS
    assert chosen("triton_graphed, eager", ARMS) == ("eager", "triton_graphed")
    for bad in ("cuda", ""):
        with pytest.raises(ValueError, match="backends: got .* wanted some of eager"):
            chosen(bad, ARMS)
