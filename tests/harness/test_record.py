"""Recorded runs on disk: strict, atomic, and refused by name where they are not what they seem."""

from __future__ import annotations

import json
import os

import pytest
from fakes import STAMP, made_row

from harness import record
from harness.record import ForeignGpu, FutureSchema, Record, RecordError, TruncatedRecord, blank_row, row_key


@pytest.fixture
def saved(tmp_path):
    run = Record(dict(STAMP), [made_row("toy", "case0", b, [1.0, 2.0]) for b in ("eager", "triton")])
    run.save(tmp_path / "toy.json")
    return run


def test_round_trip(saved):
    again = record.load(saved.path)
    assert again.rows == saved.rows and again.meta == saved.meta
    assert json.loads(saved.path.read_text())["schema"] == 1


def test_rows_are_lines(saved):
    assert sum(line.startswith('{"op"') for line in saved.path.read_text().splitlines()) == 2


def test_non_finite_becomes_null(tmp_path):
    row = blank_row("toy", "c", "fp16", "eager", {}) | {"ulp": float("nan"), "ulp_grads": {"a": float("inf"), "b": 1.0}}
    Record(dict(STAMP), [row]).save(tmp_path / "toy.json")
    assert "NaN" not in (tmp_path / "toy.json").read_text()
    loaded = record.load(tmp_path / "toy.json").rows[0]
    assert loaded["ulp"] is None and loaded["ulp_grads"] == {"a": None, "b": 1.0}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.99])
def test_truncated_file(saved, share):
    text = saved.path.read_text().rstrip()
    saved.path.write_text(text[: int(share * len(text))])
    with pytest.raises(TruncatedRecord, match=r"toy\.json: ends in the middle"):
        record.load(saved.path)


def test_future_schema(saved):
    saved.path.write_text(saved.path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(FutureSchema, match="schema 2, this version reads up to 1"):
        record.load(saved.path)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"schema": 0}', '{"schema": 1, "meta": {}}', '{"a": x}', '{"schema": NaN}']
)
def test_not_a_record(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RecordError, match=r"x\.json"):
        record.load(tmp_path / "x.json")


def test_foreign_gpu(saved):
    assert record.load(saved.path, gpu=STAMP["gpu"]).rows
    with pytest.raises(ForeignGpu, match="recorded on NVIDIA Test, this is NVIDIA Other"):
        record.load(saved.path, gpu="NVIDIA Other")


def test_failed_write_keeps_the_old_file(saved, monkeypatch):
    before = saved.path.read_text()

    def broken(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        Record(dict(STAMP), []).save(saved.path)
    assert saved.path.read_text() == before
    assert [path.name for path in saved.path.parent.iterdir()] == ["toy.json"]


def test_put_replaces_by_key(saved):
    new = made_row("toy", "case0", "eager", [9.0])
    saved.put([new, made_row("toy", "case1", "eager", [1.0])])
    assert len(saved.rows) == 3 and saved.find(row_key(new)) is new
