"""The measuring itself on a GPU, where times, launches and bytes of a call are known beforehand."""

from __future__ import annotations

import pytest
import torch

from harness import ceilings, crosscheck, graphed, precision, selfcheck, sweeper
from harness.delimiters import make_delimiters
from harness.measure import Plan
from harness.profile import device_times
from harness.record import load
from harness.steps import ARMS, GRAPHED, PHASES, arm_steps
from kernels.registry import families, ops

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def delimiters(device):
    return make_delimiters(device)


@pytest.mark.parametrize("check", selfcheck.CHECKS, ids=lambda check: check.__name__)
def test_selfcheck(check, device, delimiters):
    passed, says = check(device, delimiters)
    assert passed, says


def test_delimiters_without_triton(device):
    passed, says = selfcheck.launches(device, make_delimiters(device, made_with="jiterator"))
    assert passed, says


def test_ceilings(device, delimiters):
    measured, rows = ceilings.measure(device, delimiters)
    assert all(row["reason"] is None for row in rows)
    assert measured["copy_gbps"] > measured["matmul_tflops"]["fp32"]
    assert measured["matmul_tflops"]["fp16"] > measured["matmul_tflops"]["fp32"]


@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
@pytest.mark.parametrize("backend", GRAPHED)
def test_graphed(op, backend, device):
    """A graph of every op follows its inputs, forward and backward, and a replay launches what a call launches."""
    arm = graphed.make(op, op.quick, "fp16", device, backend)
    first_seed = precision.seed(op.name, op.quick.name, "fp16", 0)
    truth = precision.make_truth(op, op.quick.dims, torch.float16, device, first_seed)
    eager = precision.check(op, truth, "eager")
    assert graphed.check(arm, truth, eager).reason is None
    arm.load({name: 2 * value.detach() for name, value in truth.inputs.items()}, truth.grad)
    assert graphed.check(arm, truth, eager).reason is None
    assert arm.phases["fwdbwd"].peak_bytes >= 0.99 * arm.phases["fwd"].peak_bytes > 0


def test_replay_is_timed_as_its_call(device, delimiters):
    """The profiler sees the kernels inside a graph, one by one and in order."""
    op = ops()["lora"]
    arm = graphed.make(op, op.quick, "fp16", device, "eager_graphed")
    calls = arm_steps(op, arm.inputs, arm.grad, "eager")
    for phase in PHASES:
        found = device_times({"plain": calls[phase], "graphed": arm.phases[phase].replay}, delimiters, calls=20)
        assert found["graphed"].reason is None and found["graphed"].kernels == found["plain"].kernels
        assert min(found["graphed"].dev_us) == pytest.approx(min(found["plain"].dev_us), rel=0.15)


def test_capture_that_synchronises_leaves_the_process_well(device):
    x = torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        graphed.capture(lambda: x * x.sum().item(), [x], device)
    torch.cuda.synchronize()
    assert graphed.capture(lambda: x + 1, [x], device)[1].shape == x.shape


def test_three_clocks(device, delimiters):
    """Profiler, events and a graph's replay tell one story of a long call and of a short one."""
    chosen = crosscheck.choose(ops().values())
    rows = crosscheck.measure(device, delimiters, [chosen[0], chosen[-1]], arms=("eager", "triton"))
    meta = {"l2_bytes": torch.cuda.get_device_properties(device).L2_cache_size}
    meta["ceilings"] = ceilings.measure(device, delimiters)[0]
    assert crosscheck.explained(rows, meta), [crosscheck.explain(row, meta) for row in rows]


def test_sweep_of_one_case(tmp_path):
    family, its_ops = next(iter(families().items()))
    case = its_ops[0].cases[0].name
    said = []
    folder = sweeper.sweep(
        family, out=tmp_path, case=case, jobs=0, allow_busy=True, plan=Plan(calls=10, rounds=3), echo=said.append
    )
    rows = load(folder / f"{family}.json", gpu=torch.cuda.get_device_name()).rows
    assert {row["case"] for row in rows} == {case} and [row["backend"] for row in rows] == list(ARMS)
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert len(row["fwd"]["dev_us"]) >= 3 and min(row["fwd"]["wall_us"]) > min(row["fwd"]["dev_us"]) > 0
        assert row["fwdbwd"]["launches"] > row["fwd"]["launches"] >= 1
        assert row["vram_fwd"] >= row["bytes_written"] and row["floor_us"] > 0
    sweeper.sweep(family, out=tmp_path, case=case, jobs=0, allow_busy=True, echo=said.append)
    assert said[-1].endswith("every row is there already")
