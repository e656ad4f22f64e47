"""Tables that notebooks show of a record and of the run before it."""

import pytest
from fakes import STAMP, made_row

from harness import record, show, stamp
from harness.record import Record, Row


def timed(backend: str, dtype: str, *times: float) -> Row:
    return made_row("lokr", "dit_qkv_f8", backend, times, fwdbwd=times, dtype=dtype)


def test_what_changed(tmp_path):
    """A kernel that got faster, a baseline that stayed, and rows that only the later run has, which are no change."""
    path = tmp_path / "lokr.json"
    before = [timed("eager", "fp16", 20.0, 20.0, 20.0), timed("triton", "fp16", 10.0, 10.0, 10.0)]
    Record(STAMP | {"git_revision": "aaa"}, before).save(tmp_path / "previous" / path.name)
    now = [
        timed("eager", "fp16", 20.0, 20.0, 20.0),
        timed("triton", "fp16", 8.0, 8.0, 8.0),
        timed("triton", "fp32", 9.0),
    ]
    Record(STAMP | {"git_revision": "bbb"}, now).save(path)
    run = record.load(path)
    table = show.changes(run)
    assert table.loc[("lokr", "fp16", "eager")].tolist() == [0, 2, 0, 0, 1.0]
    assert table.loc[("lokr", "fp16", "triton")].tolist() == [2, 0, 0, 0, 0.8]
    assert show.before(run)[0] == "2026-01-02T03:04 of revision aaa → 2026-01-02T03:04 of revision bbb"


@pytest.mark.parametrize("text", ["", "\x00", '{"schema": 99, "meta": {}, "rows": []}', "ended { in"])
def test_a_run_before_that_cannot_be_read(tmp_path, text):
    Record(dict(STAMP), [timed("eager", "fp16", 20.0)]).save(tmp_path / "lokr.json")
    (tmp_path / "previous").mkdir()
    (tmp_path / "previous" / "lokr.json").write_text(text)
    run = record.load(tmp_path / "lokr.json")
    (said,) = show.before(run)
    assert said.startswith("not compared: ") and "previous" in said and show.changes(run).empty


def test_without_a_run_before(tmp_path):
    Record(dict(STAMP), [timed("eager", "fp16", 20.0)]).save(tmp_path / "lokr.json")
    run = record.load(tmp_path / "lokr.json")
    assert show.before(run) == [] and show.changes(run).empty
    assert show.changes(Record(dict(STAMP), [])).empty


def test_the_dtypes_that_were_recorded():
    run = record.load(next(iter(stamp.recorded_dirs())) / "lokr.json")
    table = show.dtypes(run, ("dev_eager", "ulp"))
    found = list(dict.fromkeys(row["dtype"] for row in run.rows))
    assert table.columns.tolist() == [(ratio, dtype) for ratio in ("dev_eager", "ulp") for dtype in found]
    assert table.xs("fp16", axis=1, level="dtype").equals(show.verdict(run)[["dev_eager", "ulp"]])
