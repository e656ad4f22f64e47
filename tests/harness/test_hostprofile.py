"""The host's time step by step: what is launched bare, that each round times every step, and where it is kept."""

from __future__ import annotations

import pytest
import torch
from fakes import CEILINGS, STAMP

from harness import hostprofile, record, show, sweeper
from harness.__main__ import main
from harness.record import Record
from kernels.common import plans
from kernels.registry import ops

CPU = torch.device("cpu")


def row(**more):
    steps = {name: [2.0, 1.0, 9.0] for name in (*hostprofile.STEPS, *hostprofile.SCALE)} | {"forward": [5.0] * 3}
    about = {"kind": hostprofile.KIND, "op": "toy", "case": "c", "dtype": "fp16", "backend": "triton", "launches": 2}
    return {**about, "steps": steps, **more}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's tiny shapes; a GPU has `python -m harness host`")
def test_every_step_is_timed_in_every_round(monkeypatch):
    monkeypatch.setattr(hostprofile, "CALLS", 2)
    monkeypatch.setattr(hostprofile, "ROUNDS", 3)
    op = ops()["lora_bypass"]
    rows = hostprofile.measure(CPU, [(op, op.tiny)], "fp32")
    assert [found["backend"] for found in rows] == list(hostprofile.DSLS)
    for found in rows:
        assert found["launches"] == 2
        assert set(found["steps"]) == {*hostprofile.STEPS, *hostprofile.SCALE}
        assert all(len(samples) == 3 and min(samples) > 0 for samples in found["steps"].values())
    assert rows[0]["steps"]["eager"] == rows[1]["steps"]["eager"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's tiny shapes; a GPU has `python -m harness host`")
@pytest.mark.parametrize("dsl", hostprofile.DSLS)
def test_what_is_launched_bare_does_the_work(dsl):
    op = ops()["lora"]
    inputs = op.make(op.tiny.dims, torch.float32, CPU, 0)
    with hostprofile._watched(op) as seen:
        wanted = op.run(inputs, dsl)
    (launch,) = seen.launches
    out = next(value for value in launch.args if isinstance(value, torch.Tensor) and value.shape == wanted.shape)
    for call in (launch.bare, lambda: launch.again(*launch.tensors)):
        out.zero_()
        call()
        torch.testing.assert_close(out, wanted)
    assert seen.plan is not None and plans.Planned._launch.__qualname__ == "Planned._launch"


def test_ratio_counts_the_launches():
    assert hostprofile.times(row())["launch"] == 2.0
    assert hostprofile.ratio(row()) == 5.0 / (2 * 2.0)


def test_table():
    table = show.hosts(Record({}, [{"kind": "copy"}, row()]))
    assert table.loc[("toy", "triton"), ["launches", "launch", "forward", "ratio"]].tolist() == [2, 2.0, 5.0, 1.25]
    assert len(show.hosts(Record({}, []))) == 0


def test_measured_ceilings_keep_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeper.stamp, "environment", lambda: dict(STAMP))
    monkeypatch.setattr(sweeper.limits, "measure", lambda *args: (CEILINGS, [{"kind": "copy"}]))
    Record(dict(STAMP), [{"kind": "read"}, row()]).save(tmp_path / "ceilings.json")
    sweeper._ceilings(tmp_path, None, None, resumed=False, echo=lambda text: None)
    assert [r["kind"] for r in record.load(tmp_path / "ceilings.json").rows] == ["copy", "host"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_needs_a_gpu(capsys):
    assert main(["host"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
