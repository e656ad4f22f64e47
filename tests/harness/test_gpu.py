"""The measuring itself on a GPU, where times, launches and bytes of a call are known beforehand."""

from __future__ import annotations

import pytest
import torch

from harness import ceilings, selfcheck, sweeper
from harness.delimiters import make_delimiters
from harness.measure import Plan
from harness.record import load
from kernels.registry import families

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


def test_sweep_of_one_case(tmp_path):
    family, ops = next(iter(families().items()))
    case = ops[0].cases[0].name
    said = []
    folder = sweeper.sweep(
        family, out=tmp_path, case=case, jobs=0, allow_busy=True, plan=Plan(calls=10, rounds=3), echo=said.append
    )
    rows = load(folder / f"{family}.json", gpu=torch.cuda.get_device_name()).rows
    assert {row["case"] for row in rows} == {case} and len(rows) == 4
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert len(row["fwd"]["dev_us"]) == 3 and min(row["fwd"]["wall_us"]) > min(row["fwd"]["dev_us"]) > 0
        assert row["fwdbwd"]["launches"] > row["fwd"]["launches"] >= 1
        assert row["vram_fwd"] >= row["bytes_written"] and row["floor_us"] > 0
    sweeper.sweep(family, out=tmp_path, case=case, jobs=0, allow_busy=True, echo=said.append)
    assert said[-1].endswith("every row is there already")
