"""Sweeps over Dask workers on the CPU, with a fake lab: whatever dies, no finished row is lost and none is doubled."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fakes import toy_op

from harness import __main__ as cli
from harness import cluster, record, spread
from harness.record import row_key
from kernels.registry import Case

pytestmark = pytest.mark.xdist_group("cluster")
LAB = "cluster_fakes:FakeLab"
BOTH = ("eager", "triton")
CARDS = [f"card{i}" for i in range(4)]
DIMS = {"O": 8, "I": 16, "R": 4}
FATAL = ("exit", "segv", "raise", "killer")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The folder in which every worker's lab says what it begins."""
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_LAB", str(folder))
        # Workers import PyTorch; one thread each is what a small machine has.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="module")
def client(lab):
    with cluster.connect(4, CARDS) as made:
        yield made


@pytest.fixture
def four(client):
    """The address of a scheduler with four local workers; one that an earlier test killed is back."""
    client.wait_for_workers(4, timeout=60)
    return client.scheduler.address


@pytest.fixture
def log(lab):
    """The same folder, empty."""
    for path in lab.iterdir():
        path.unlink()
    return lab


def sweep(workers, out, names, said=None, found=CARDS, patience_s=30.0, **more):
    """One sweep of a toy family with these cases; its folders and what it said."""
    said = [] if said is None else said
    toy = {"toy": (replace(toy_op(), cases=tuple(Case(name, DIMS) for name in names)),)}
    more = {"lab": LAB, "chosen": toy, "found": found, "patience_s": patience_s, "backends": BOTH, **more}
    return spread.sweep(workers, out=out, echo=said.append, **more), said


def rows(folder):
    """{case: its rows} of a folder's record, in which no row stands twice."""
    found = record.load(folder / "toy.json").rows
    assert set(Counter(map(row_key, found)).values()) == {1}
    return {name: [row for row in found if row["case"] == name] for name in dict.fromkeys(r["case"] for r in found)}


def begun(log, name):
    return len((log / name).read_text().split())


def test_everything_that_can_befall_a_case(four, tmp_path, log):
    good = ("a0", "killed", *(f"b{i}" for i in range(9)))
    (out,), said = sweep(four, tmp_path / "out", ("raise", "a0", "exit", "segv", "killer", "dead", *good[1:]))
    found = rows(out)
    assert set(found) == {*good, *FATAL, "dead"} and {len(each) for each in found.values()} == {2}
    for name, why in zip(FATAL, ("exit code 3", "SIGSEGV", "planted", "so did the next one"), strict=True):
        assert all(row["status"] == "failed" and why in row["reason"] for row in found[name])
    # An arm that kills the card costs itself, and the other goes on in a new process.
    assert {row["backend"]: row["status"] for row in found["dead"]} == {"triton": "failed", "eager": "ok"}
    assert all(row["status"] == "ok" and row["uuid"] in CARDS for name in good for row in found[name])
    # Once more elsewhere where a worker died. A result that was still on it is measured again too, for each of two deaths.
    assert begun(log, "killer") == 2 and 2 <= begun(log, "killed") <= 4
    cards = record.load(out / "toy.json").meta["cards"]
    assert {uuid: card["ceilings"]["card"] for uuid, card in cards.items()} == dict(zip(CARDS, CARDS, strict=True))
    assert any(line.startswith("[ 16/16] toy ") for line in said)


def full_disk(monkeypatch, full):
    """Writes of the family's record for which `full` holds, counted from 1, find no room."""
    writes, real = [], record.os.replace

    def replace_file(part, path):
        if path.name == "toy.json":
            writes.append(path)
            if full(len(writes)):
                raise OSError(errno.ENOSPC, "No space left on device")
        real(part, path)

    monkeypatch.setattr(record.os, "replace", replace_file)


def test_full_disk(four, tmp_path, log, monkeypatch):
    """Rows that could not be written wait in memory; the file on disk stays whole and none is measured again."""
    names = [f"c{i}" for i in range(8)]
    full_disk(monkeypatch, lambda write: 3 <= write <= 9)
    (out,), said = sweep(four, tmp_path / "out", names)
    assert any("No space left on device; its rows are kept" in line for line in said)
    assert {name: len(each) for name, each in rows(out).items()} == dict.fromkeys(names, 2)
    assert all(begun(log, name) == 1 for name in names[1:])
    assert not list(out.glob("*.part")) and not list(out.glob(".*.part"))


def test_disk_that_stays_full(four, tmp_path, log, monkeypatch):
    """The command says so in the end; what was written before goes on from there."""
    names = [f"c{i}" for i in range(6)]
    full_disk(monkeypatch, lambda write: write > 2)
    with pytest.raises(OSError, match="could not be written"):
        sweep(four, tmp_path / "out", names, patience_s=0.1)
    kept = rows(tmp_path / "out")
    assert kept and len(kept) < 6
    monkeypatch.undo()
    before = {name: begun(log, name) for name in kept}
    sweep(four, tmp_path / "out", names)
    found = rows(tmp_path / "out")
    assert len(found) == 6 and all(found[name] == kept[name] for name in kept)
    # A probe is no row: it may take a case that is missing, not one that is there.
    assert {name: begun(log, name) for name in kept} == before


def test_stopped_and_resumed(four, tmp_path, log):
    names, said = [f"c{i}" for i in range(8)], []

    class Stop(list):
        def append(self, line):
            super().append(line)
            if line.startswith("[  3/"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(four, tmp_path / "out", names, Stop())
    kept = rows(tmp_path / "out")
    assert len(kept) == 3
    sweep(four, tmp_path / "out", names, said)
    found = rows(tmp_path / "out")
    assert len(found) == 8 and all(found[name] == kept[name] for name in kept)
    _, said = sweep(four, tmp_path / "out", names)
    assert "every row is there already" in said


def test_cards_of_another_kind_software_or_speed_have_records_of_their_own(four, tmp_path, log):
    for plan, card in (("other", "card1"), ("new", "card2"), ("slow", "card3")):
        (log / plan).write_text(card)
    folders, said = sweep(four, tmp_path / "out", ["a", "b", "c"])
    names = {folder.name: {row["uuid"] for each in rows(folder).values() for row in each} for folder in folders}
    assert names == {
        "nvidia-test": {"card0"},
        "nvidia-other": {"card1"},
        "nvidia-test-card2": {"card2"},
        "nvidia-test-card3": {"card3"},
    }
    assert all(len(rows(folder)) == 3 for folder in folders)
    assert any("card2 measures by itself: another driver" in line for line in said)
    assert any("card3 measures by itself: against card0: 0 faster, 0 same, 4 slower" in line for line in said)
    assert record.load(tmp_path / "out/nvidia-other/ceilings.json").meta["ceilings"]["card"] == "card1"


@pytest.mark.parametrize("crowded", [False, True])
def test_walls_of_a_crowded_host_are_marked(four, tmp_path, log, crowded):
    if crowded:
        (log / "crowded").write_text(" ".join(CARDS))
    (out,), said = sweep(four, tmp_path / "out", ["a", "b"])
    shared = record.load(out / "toy.json").meta["contention"]["here"]
    assert shared["wall"] == pytest.approx(1.5 if crowded else 1.0) and shared["dev"] == pytest.approx(1.0)
    assert shared["gpus"] == 4 and shared["differs"] == crowded
    assert {row["wall_contended"] for each in rows(out).values() for row in each} == {crowded}


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_workers_of_this_machine(tmp_path, log, count):
    names = [f"c{i}" for i in range(6)]
    (out,), _ = sweep(count, tmp_path / "out", names, found=CARDS[:count])
    made = [row for each in rows(out).values() for row in each]
    assert len(made) == 12
    # A healthy process is kept from case to case.
    assert len({row["pid"] for row in made}) == len({row["uuid"] for row in made}) <= count


@contextmanager
def running(*arguments, **env):
    """A Dask command, killed at the end."""
    command = [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]]
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def until(done, seconds=60.0):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_restarted_scheduler(tmp_path, log):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = f"tcp://127.0.0.1:{port}"
    scheduler = ("dask_scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard")
    worker = ("dask_worker", address, "--no-nanny", "--nthreads", "1", "--no-dashboard", "--death-timeout", "60")
    said, done = [], []
    thread = threading.Thread(
        target=lambda: done.append(sweep(address, tmp_path / "out", ["a", "b", "waits", "c", "d"], said, patience_s=60))
    )
    with running(*worker, CUDA_VISIBLE_DEVICES="card0"):
        with running(*scheduler):
            thread.start()
            until(lambda: (log / "waits").exists())
            kept = rows(tmp_path / "out")
            assert set(kept) == {"a", "b"}
        until(lambda: any("the scheduler is gone" in line for line in said))
    (log / "go").touch()
    with running(*scheduler), running(*worker, CUDA_VISIBLE_DEVICES="card0"):
        thread.join(timeout=90)
        assert done, said
    found = rows(tmp_path / "out")
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(("a", "b", "waits", "c", "d"), 2)
    assert all(found[name] == kept[name] for name in kept) and begun(log, "waits") == 2


def test_nobody_there(tmp_path, capsys, monkeypatch):
    with pytest.raises(cluster.NoWorkers, match="no scheduler with a worker answers"):
        sweep("tcp://127.0.0.1:9", tmp_path, ["a"], patience_s=0.5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["sweep", "--workers", "2"]) == 2
    assert "this machine has 0 GPUs" in capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    for name in ("cluster", "spread", "remote"):
        monkeypatch.delitem(sys.modules, f"harness.{name}")
        monkeypatch.delattr(sys.modules["harness"], name, raising=False)
    assert cli.main(["sweep", "--workers", "2"]) == 2
    assert "needs the extra `cluster`" in capsys.readouterr().err
