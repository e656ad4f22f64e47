"""Every planted fault is caught by its name, and a kernel without one passes."""

from __future__ import annotations

import pytest
import torch

from harness import faults, selfcheck
from harness.__main__ import main

CPU = torch.device("cpu")


@pytest.mark.parametrize("fault", [f for f in faults.FAULTS if not f.gpu], ids=lambda fault: fault.name)
def test_caught_by_name(fault):
    assert fault.says in str(fault.seen(CPU))


@pytest.mark.gpu
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_caught_by_name_on_a_gpu(fault):
    assert fault.says in str(fault.seen(torch.device("cuda", torch.cuda.current_device())))


def test_without_a_fault_nothing_is_said():
    assert faults.checked(faults.planted_op(), CPU) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it does without a GPU")
def test_selfcheck_without_a_gpu(capsys):
    assert main(["selfcheck"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(faults.FAULTS) + 1 and sum("needs a GPU" in line for line in said) == 2
    assert all(line.startswith("ok") for line in said if "needs a GPU" not in line)


def test_a_fault_that_is_not_caught_fails(monkeypatch, capsys):
    blind = faults.Fault("nothing wrong", "something", lambda device: None)
    monkeypatch.setattr(faults, "FAULTS", (blind,))
    assert selfcheck.plant(CPU) == 1
    assert "FAIL nothing wrong: None" in capsys.readouterr().out
