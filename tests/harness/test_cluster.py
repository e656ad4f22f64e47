"""Sweeps over Dask workers on the CPU, with a fake lab: whatever dies, no finished row is lost and none is doubled."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import toy_op

from harness import record, spread
from harness.record import Record, row_key
from kernels.registry import Case

pytestmark = pytest.mark.xdist_group("cluster")
LAB = "cluster_fakes:FakeLab"
BOTH = ("eager", "triton")
DIMS = {"O": 8, "I": 16, "R": 4}


@pytest.fixture(autouse=True)
def log(tmp_path, monkeypatch):
    """Where the labs of every worker say what they begin."""
    folder = tmp_path / "log"
    folder.mkdir()
    monkeypatch.setenv("FAKE_LAB", str(folder))
    # A worker imports this project, and with it PyTorch; one thread each is what a small machine has.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def toy(*names):
    return {"toy": (replace(toy_op(), cases=tuple(Case(name, DIMS) for name in names)),)}


def sweep(workers, out, names, cards=(), **more):
    """One sweep of these cases; the folders and what it said."""
    said = []
    found = spread.sweep(
        workers,
        out=out,
        backends=more.pop("backends", BOTH),
        lab=LAB,
        chosen=toy(*names),
        found=cards,
        patience_s=more.pop("patience_s", 30.0),
        echo=said.append,
        **more,
    )
    return found, said


def rows(folder):
    """{case: [rows]} of a folder's record, in which no row stands twice."""
    found = record.load(folder / "toy.json").rows
    assert max(Counter(map(row_key, found)).values()) == 1
    return {case: [row for row in found if row["case"] == case] for case in dict.fromkeys(r["case"] for r in found)}


def begun(log, name):
    return (log / name).read_text().split()


CRASHES = ("exit", "segv", "dead", "raise", "killed", "killer")


@pytest.mark.parametrize("count", [4])
def test_four_workers_and_everything_that_can_befall_a_case(tmp_path, log, count):
    names = ("a0", *CRASHES, *(f"b{i}" for i in range(9)))
    (out,), said = sweep(count, tmp_path / "out", names, [f"card{i}" for i in range(count)])
    found = rows(out)
    assert sorted(found) == sorted(names)
    assert all(len(each) == 2 for each in found.values())
    status = {name: {row["backend"]: (row["status"], row["reason"]) for row in each} for name, each in found.items()}
    for name, why in (("exit", "exit code 3"), ("segv", "SIGSEGV"), ("raise", "planted"), ("killer", "the next one")):
        assert all(state == "failed" and why in reason for state, reason in status[name].values()), status[name]
    assert status["dead"] == {"triton": ("failed", "illegal access"), "eager": ("ok", None)}
    good = [row for name in names if name not in CRASHES[:-2] + CRASHES[-1:] for row in found[name]]
    assert all(row["status"] == "ok" for row in good)
    # Once more elsewhere, or on the worker's successor, and no case of another worker goes with it.
    assert len(begun(log, "killed")) == len(begun(log, "killer")) == 2
    assert all(len(begun(log, f"b{i}")) == 1 for i in range(9))
    assert {row["uuid"] for row in good} <= {f"card{i}" for i in range(count)}
    meta = record.load(out / "toy.json").meta
    assert {uuid: card["ceilings"]["card"] for uuid, card in meta["cards"].items()} == {
        f"card{i}": f"card{i}" for i in range(count)
    }
    assert any(line.startswith(f"[{len(names):3}/{len(names)}]") for line in said)


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_workers_and_a_child_that_lives_on(tmp_path, log, count):
    names = [f"c{i}" for i in range(6)]
    (out,), _ = sweep(count, tmp_path / "out", names, [f"card{i}" for i in range(count)])
    found = rows(out)
    assert list(map(len, found.values())) == [2] * 6
    # The measuring process is kept from case to case.
    assert len({row["pid"] for each in found.values() for row in each}) <= count
    before = (out / "toy.json").read_text()
    _, said = sweep(count, tmp_path / "out", names, [f"card{i}" for i in range(count)])
    assert "every row is there already" in said and (out / "toy.json").read_text() == before
