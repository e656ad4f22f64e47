"""Sweeps with a fake measurer: stopped, resumed, stale, and another card's."""

from __future__ import annotations

import pytest
import torch
from fakes import CEILINGS, STAMP, made_row, toy_op

from harness import load_or_sweep, record, sweeper
from harness.measure import DeadContext
from harness.record import ForeignGpu, TruncatedRecord
from harness.sweeper import Selection, fill, missing, resume

OP = toy_op(cases=4)
BOTH = ("eager", "triton")


class Measurer:
    """Gives each row the time of a clock that counts measured cases; raises where told."""

    def __init__(self, stop_at=None, error=None, bad=()):
        self.seen, self.stop_at, self.error, self.bad = [], stop_at, error, bad

    def __call__(self, op, case, dtype, backends):
        if len(self.seen) == self.stop_at:
            raise self.error
        self.seen.append((case.name, tuple(backends)))
        now = float(len(self.seen))
        return [
            made_row(op.name, case.name, b, [now], dtype=dtype)
            | ({"status": "failed", "reason": "planted"} if (case.name, b) in self.bad else {})
            for b in backends
        ]


def run(path, measurer, *, meta=STAMP, retry=False, pattern="*", backends=BOTH):
    """One sweep of the toy family into `path`; what it said."""
    said = []
    found = resume(path, dict(meta), said.append)
    todo = missing(found, Selection((OP,), ("fp16",), backends, pattern), retry)
    fill(found, path, todo, measurer, said.append)
    return said


def test_whole_sweep(tmp_path):
    path, measurer = tmp_path / "toy.json", Measurer()
    said = run(path, measurer)
    assert [case for case, _ in measurer.seen] == ["case0", "case1", "case2", "case3"]
    assert len(record.load(path).rows) == 8
    assert said[0].startswith("[  1/4] toy case0 fp16: eager 1.0 / 3.0 · triton 1.0 / 3.0")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("power cut"), SystemExit(1)])
def test_stopped_sweep_resumes_where_it_was(tmp_path, error):
    path = tmp_path / "toy.json"
    with pytest.raises(type(error)):
        run(path, Measurer(stop_at=2, error=error))
    before = record.load(path).rows
    assert [row["case"] for row in before] == ["case0", "case0", "case1", "case1"]
    again = Measurer()
    run(path, again)
    assert [case for case, _ in again.seen] == ["case2", "case3"]
    rows = record.load(path).rows
    assert rows[:4] == before and len(rows) == 8
    run(path, nothing := Measurer())
    assert nothing.seen == []


def test_only_missing_arms_are_measured(tmp_path):
    path = tmp_path / "toy.json"
    run(path, Measurer(), backends=("eager",))
    run(path, added := Measurer())
    assert added.seen[0] == ("case0", ("triton",))


def test_failures_are_rows_and_the_sweep_goes_on(tmp_path):
    path = tmp_path / "toy.json"
    said = run(path, Measurer(bad={("case1", "triton")}))
    rows = record.load(path).rows
    assert [row["status"] for row in rows if row["case"] == "case1"] == ["ok", "failed"] and len(rows) == 8
    assert "triton failed (planted)" in said[1]
    run(path, kept := Measurer())
    assert kept.seen == []
    run(path, retried := Measurer(), retry=True)
    assert retried.seen == [("case1", ("triton",))]
    assert all(row["status"] == "ok" for row in record.load(path).rows)


def test_dead_card_keeps_its_rows(tmp_path):
    path = tmp_path / "toy.json"
    row = made_row("toy", "case1", "triton", [1.0]) | {"status": "failed", "reason": "device-side assert"}
    with pytest.raises(DeadContext):
        run(path, Measurer(stop_at=1, error=DeadContext([row])))
    assert len(record.load(path).rows) == 3
    run(path, again := Measurer())
    assert again.seen[0] == ("case1", ("eager",))


def test_pattern(tmp_path):
    run(tmp_path / "toy.json", some := Measurer(), pattern="*[13]")
    assert [case for case, _ in some.seen] == ["case1", "case3"]


@pytest.mark.parametrize("name", ["kernels_sha256", "torch", "driver"])
def test_stale_rows_are_measured_again(tmp_path, name):
    path = tmp_path / "toy.json"
    run(path, Measurer())
    old = path.read_text()
    said = run(path, again := Measurer(), meta={**STAMP, name: "new"})
    assert len(again.seen) == 4 and f"{name} changed" in said[0]
    assert record.load(path).meta[name] == "new"
    assert (tmp_path / "previous" / "toy.json").read_text() == old


def test_a_short_run_does_not_replace_the_last_whole_one(tmp_path):
    path = tmp_path / "toy.json"
    run(path, Measurer())
    whole = path.read_text()
    run(path, Measurer(), meta={**STAMP, "driver": "2"}, pattern="*0")
    run(path, Measurer(), meta={**STAMP, "driver": "3"}, pattern="*0")
    assert (tmp_path / "previous" / "toy.json").read_text() == whole
    assert record.load(tmp_path / "previous" / "toy.json.unfinished").meta["driver"] == "2"


def test_another_cards_record_is_never_touched(tmp_path):
    path = tmp_path / "toy.json"
    run(path, Measurer())
    before = path.read_bytes()
    with pytest.raises(ForeignGpu):
        run(path, Measurer(), meta={**STAMP, "gpu": "NVIDIA Other"})
    assert path.read_bytes() == before


def test_truncated_record_stops_the_sweep(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text('{"schema": 1, "me')
    with pytest.raises(TruncatedRecord):
        run(path, Measurer())
    assert path.read_text() == '{"schema": 1, "me'


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_no_gpu_says_what_is_needed():
    with pytest.raises(sweeper.NoGpu, match=r"needs an NVIDIA GPU.*record"):
        sweeper.sweep()


def test_ceilings_are_measured_first_and_kept_for_a_resumed_sweep(tmp_path, monkeypatch):
    measured = iter((CEILINGS, {**CEILINGS, "copy_gbps": 1.0}))
    monkeypatch.setattr(sweeper.stamp, "environment", lambda: dict(STAMP))
    monkeypatch.setattr(sweeper.limits, "measure", lambda *args: (next(measured), [{"kind": "copy"}]))

    def ceilings(resumed):
        return sweeper._ceilings(tmp_path, None, None, resumed=resumed, echo=lambda text: None)

    assert ceilings(resumed=False) == CEILINGS
    assert ceilings(resumed=True) == CEILINGS
    assert record.load(tmp_path / "ceilings.json").meta["ceilings"] == CEILINGS
    assert ceilings(resumed=False)["copy_gbps"] == 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_load_or_sweep_without_a_gpu(tmp_path, monkeypatch):
    """The committed run, and in one line whose card it is; a clear error where there is none."""
    monkeypatch.setattr(sweeper.stamp, "DATA", tmp_path)
    with pytest.raises(FileNotFoundError, match="no recorded run of toy under data/, and no GPU"):
        load_or_sweep("toy")
    run(tmp_path / "nvidia-test" / "toy.json", Measurer())
    record.Record(dict(STAMP)).save(tmp_path / "nvidia-test" / "ceilings.json")
    said = []
    assert len(load_or_sweep("toy", echo=said.append).rows) == 8
    assert said == ["toy: 8 rows recorded on NVIDIA Test, 2026-01-02"]
