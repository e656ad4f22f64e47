"""Device time three ways, with the clocks replaced: what is taken off, what is explained, and where it is kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fakes import CEILINGS, STAMP, product, toy_op

from harness import crosscheck, graphed, record, show, sweeper
from harness.__main__ import main
from harness.delimiters import FLUSH, MARKER
from harness.profile import DeviceTime, Event
from harness.record import Record
from kernels.registry import ops

CPU = torch.device("cpu")
OP = toy_op(lambda a, b, scale, *, backend: product(a, b, scale))


def row(profiler, events, graph, launches=2, **more):
    samples = {"profiler_us": [profiler] * 3, "events_us": [events] * 7, "graph_us": [graph] * 7}
    about = {"kind": crosscheck.KIND, "op": "toy", "case": "c", "dtype": "fp16", "arm": "triton", "phase": "fwd"}
    return {**about, "launches": launches, "reason": None, **samples, **more}


def test_six_cases_over_all_sizes_and_ops():
    found = crosscheck.choose(ops().values())
    assert len(found) == len({op.name for op, _ in found}) == 6
    sizes = [sum((lambda c: (c.bytes_read, c.bytes_written))(op.cost(case.dims, 2))) for op, case in found]
    assert max(sizes) > 20 * min(sizes)
    assert len(crosscheck.choose([OP])) == 3


def test_the_flushes_are_taken_off(monkeypatch):
    flushed = []
    spent = {"flush": 70.0, "call": 5.0}
    clock = SimpleNamespace(now=0.0)

    def flush():
        flushed.append(1)
        clock.now += spent["flush"]

    def call():
        clock.now += spent["call"]

    def elapsed(batch, device):
        before = clock.now
        batch()
        return clock.now - before

    monkeypatch.setattr(crosscheck, "elapsed_us", elapsed)
    found = crosscheck.per_call(crosscheck._batch(flush, call), crosscheck._batch(flush), CPU)
    assert found == pytest.approx([5.0] * crosscheck.ROUNDS)
    assert len(flushed) == 2 * crosscheck.ROUNDS * crosscheck.CALLS


def session(arms, flushes=3):
    """A session's events: each block a marker, then flushes, 70 µs after the first arm's calls and 60 otherwise."""
    names = [name for _ in arms for name in (MARKER, *([FLUSH, "kernel"] * flushes))] + [MARKER]
    took = [70_000 if 0 < at < 2 * flushes else 60_000 for at in range(len(names))]
    took[1] = 65_000
    return [Event(name, 1_000_000 * at, each) for at, (name, each) in enumerate(zip(names, took, strict=True))]


def test_a_flush_after_a_call():
    assert crosscheck.flush_times(session(("triton", "nothing"))) == [70.0, 60.0]
    assert crosscheck.flush_times(session(("triton",), flushes=1)) == [None]
    made = row(9.4, 16.7, 15.5, launches=1)
    assert crosscheck.explained([made | {"flush_us": [64.1, 60.0]}])
    assert not crosscheck.explained([made | {"flush_us": [60.2, 60.0]}])


def test_rows(monkeypatch):
    monkeypatch.setattr(graphed, "capture", lambda call, leaves, device: (call, call(), 0))
    monkeypatch.setattr(crosscheck, "elapsed_us", lambda batch, device: 1.0)
    monkeypatch.setattr(crosscheck, "device_times", lambda arms, _: {a: DeviceTime((3.0,), ("k",)) for a in arms})
    monkeypatch.setattr(crosscheck, "collect", lambda arms, *args, **options: session(arms))

    def broken(a, b, scale, *, backend):
        if backend == "tilelang":
            raise RuntimeError("no such thing")
        return product(a, b, scale)

    op = toy_op(broken)
    rows = crosscheck.measure(CPU, SimpleNamespace(flush=lambda: None), [(op, op.tiny)], "fp32")
    assert [(r["arm"], r["phase"]) for r in rows] == [
        ("eager", "fwd"),
        ("eager", "fwdbwd"),
        ("triton", "fwd"),
        ("triton", "fwdbwd"),
        ("tilelang", None),
    ]
    assert rows[-1]["reason"] == "RuntimeError: no such thing" and not crosscheck.explained(rows)
    assert crosscheck.times(rows[0]) == {"profiler": 3.0, "events": 0.0, "graph": 0.0}
    assert rows[0]["flush_us"] == [70.0, 60.0]


@pytest.mark.parametrize(
    ("made", "says", "fine"),
    [
        (row(100.0, 103.0, 101.0), "events agree, graph agrees", True),
        (row(4.0, 6.0, 5.0), "events +1.0 µs a launch, graph +0.5 µs a launch", True),
        (row(4.0, 40.0, 5.0), "events +36.0 µs: unexplained, graph +0.5 µs a launch", False),
        (row(40.0, 20.0, 40.0), "events -20.0 µs: unexplained, graph agrees", False),
        (row(4.0, 4.0, 4.0, events_us=[], reason="lost events"), "not measured: lost events", False),
    ],
)
def test_explained(made, says, fine):
    assert crosscheck.explain(made) == says and crosscheck.explained([made]) is fine
    assert not crosscheck.explained([])


def test_what_the_next_flush_writes_back():
    """3072×3072 in 16 bit are 18.9 MB: 4.4 µs at this rate, beside 3 µs of a launch's gap; nothing without the card's figures."""
    meta = {"l2_bytes": 60e6, "ceilings": {"copy_gbps": 4300.0}}
    made = row(9.4, 16.7, 15.5, launches=1) | {"op": "loha", "case": "dit_qkv_r64"}
    assert crosscheck.write_back_us(made, meta) == pytest.approx(18.9e6 / 4.3e6, rel=0.01)
    assert (
        crosscheck.explain(made, meta)
        == "events +7.3 µs: launches and write-back, graph +6.1 µs: launches and write-back"
    )
    assert not crosscheck.explained([made]) and not crosscheck.explained([made | {"op": "toy"}], meta)
    assert not crosscheck.explained([made | {"events_us": [17.3] * 7}], meta)
    assert crosscheck.write_back_us(made | {"launches": 9}, meta) == pytest.approx(60e6 / 4.3e6)


def test_a_clock_that_changes():
    """The card lowers its clock under load: one way's samples then scatter over the other's."""
    made = row(100.0, 120.0, 100.0) | {"profiler_us": [100.0, 100.0, 119.0]}
    assert crosscheck.explain(made) == "events +20.0 µs: in the samples' spread, graph agrees"


def test_table(tmp_path):
    Record(dict(STAMP), [{"kind": "copy"}, row(4.0, 6.0, 5.0)]).save(tmp_path / "ceilings.json")
    table = show.crosschecks(record.load(tmp_path / "ceilings.json"))
    assert table.loc[("toy", "c", "triton", "fwd")].tolist() == [
        2,
        4.0,
        6.0,
        5.0,
        crosscheck.explain(row(4.0, 6.0, 5.0)),
    ]
    assert len(show.crosschecks(Record({}, []))) == 0


def test_measured_ceilings_keep_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeper.stamp, "environment", lambda: dict(STAMP))
    monkeypatch.setattr(sweeper.limits, "measure", lambda *args: (CEILINGS, [{"kind": "copy"}]))
    Record(dict(STAMP), [{"kind": "read"}, row(4.0, 6.0, 5.0)]).save(tmp_path / "ceilings.json")
    sweeper._ceilings(tmp_path, None, None, resumed=False, echo=lambda text: None)
    assert [r["kind"] for r in record.load(tmp_path / "ceilings.json").rows] == ["copy", "crosscheck"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_needs_a_gpu(capsys):
    assert main(["crosscheck"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
