"""The command line without a GPU: what works, what stops with a message, and what each says."""

from __future__ import annotations

import json

import pytest
import torch
from fakes import STAMP, bad_row, made_row, toy_op

from harness import __main__ as cli
from harness import quickcheck, stamp, sweeper, throttle, verdicts
from harness.measure import DeadContext
from harness.record import Record

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture
def folder(tmp_path):
    made = [made_row("toy", "c", b, [t]) for b, t in (("eager", 4.0), ("compile", 3.0), ("triton", 2.0))]
    Record(dict(STAMP), made).save(tmp_path / "run" / "toy.json")
    return tmp_path / "run"


@NO_GPU
def test_sweep_without_a_gpu(capsys):
    assert cli.main(["sweep"]) == 2
    assert "sweep needs an NVIDIA GPU" in capsys.readouterr().err


def test_verdict(folder, capsys):
    assert cli.main(["verdict", "--dir", str(folder), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["dev_eager"] == pytest.approx(2.0)
    assert cli.main(["verdict", "--dir", str(folder)]) == 0
    assert "toy  triton   1/1" in capsys.readouterr().out


def test_compare_exits_with_1_on_slower(folder, tmp_path, capsys):
    Record(dict(STAMP), [made_row("toy", "c", "triton", [3.0])]).save(tmp_path / "slow.json")
    assert cli.main(["compare", str(folder / "toy.json"), str(folder / "toy.json")]) == 0
    assert cli.main(["compare", str(folder / "toy.json"), str(tmp_path / "slow.json")]) == 1
    assert "slower  toy c fp16 triton fwd  1.500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema": 1, "meta', "ends in the middle of its JSON"),
        ('{"schema": 9, "meta": {}, "rows": []}', "schema 9, this version reads up to 1"),
    ],
)
def test_bad_file(tmp_path, capsys, text, says):
    (tmp_path / "x.json").write_text(text)
    assert cli.main(["verdict", "--dir", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_missing_folder(tmp_path, capsys):
    assert cli.main(["figures", "--dir", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "holds no recorded run" in capsys.readouterr().err


def test_default_folder_is_a_recorded_one(folder, monkeypatch):
    monkeypatch.setattr(stamp, "DATA", folder.parent)
    with pytest.raises(FileNotFoundError, match="no recorded run"):
        verdicts.default_dir()
    Record(dict(STAMP), []).save(folder / "ceilings.json")
    assert verdicts.default_dir() == folder


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(quickcheck, "ops", lambda: {"toy": toy_op()})


@NO_GPU
@pytest.mark.usefixtures("toy")
def test_quick_checks_the_maths_and_prints_no_time(capsys):
    assert cli.main(["quick", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("no GPU") and len(out) == 6
    cells = [line.split() for line in out[2:]]
    assert [c[2:4] for c in cells] == [
        ["eager", "ok"],
        ["compile", "ok"],
        ["triton", "ok"],
        ["tilelang", "unavailable"],
    ]
    assert all(c[6:9] == ["–"] * 3 for c in cells)


@NO_GPU
def test_quick_fails_on_a_wrong_kernel(monkeypatch, capsys):
    wrong = toy_op(lambda a, b, scale, *, backend: (a @ b) * (scale if backend == "eager" else 0.7))
    monkeypatch.setattr(quickcheck, "ops", lambda: {"toy": wrong})
    assert cli.main(["quick"]) == 1
    assert "failed" in capsys.readouterr().out


@pytest.mark.usefixtures("toy")
def test_quick_unknown_op(capsys):
    assert cli.main(["quick", "--op", "lola"]) == 2
    assert "op: got 'lola', wanted one of toy" in capsys.readouterr().err


def test_nothing_ran_is_no_pass():
    assert not quickcheck.passed([]) and not quickcheck.passed([{"status": "unsupported"}])
    assert quickcheck.passed([{"status": "ok"}, {"status": "unsupported"}])
    assert not quickcheck.passed([{"status": "ok"}, {"status": "invalid"}])


@pytest.mark.usefixtures("toy")
def test_quick_on_a_card_that_gives_up(monkeypatch):
    """What was found before is reported, and the check does not pass."""
    failed = bad_row("toy", "tiny", "eager", "failed", "device-side assert")

    def dead(*args):
        raise DeadContext([failed])

    said = []
    monkeypatch.setattr(quickcheck, "_checked", dead)
    monkeypatch.setattr(quickcheck, "measure_case", dead)
    rows = quickcheck.quick(dtype="all", echo=said.append)
    assert rows == [failed] and not quickcheck.passed(rows)
    assert "device-side assert" in said[1] and "answers no more" in said[2]


def test_keyboard_interrupt(monkeypatch, capsys):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeper, "sweep", stopped)
    assert cli.main(["sweep"]) == 130
    assert "finished cases are kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loads", "busy"), [([50, 40, 60, 70, 30], True), ([50, 40, 5], False), ([None], False), ([0], False)]
)
def test_busy_card(loads, busy):
    readings = iter(loads)

    def read():
        return throttle.State(utilization=next(readings))

    throttle.refuse_busy(True, read=read)
    if busy:
        with pytest.raises(throttle.BusyGpu, match="30 % busy"):
            throttle.refuse_busy(False, read=read, seconds=0)
    else:
        throttle.refuse_busy(False, read=read, seconds=0)


def test_throttle_reasons():
    assert throttle.State(reasons=0x01 | 0x02).throttled is False
    assert throttle.State(reasons=0x04).throttled and throttle.State().throttled is None
    assert throttle.drifted(throttle.State(1980), throttle.State(1500))
    assert not throttle.drifted(throttle.State(1980), throttle.State(1950))
    assert not throttle.drifted(throttle.State(), throttle.State(1500))


def test_stamp():
    made = stamp.environment("lora")
    assert set(stamp.IDENTITY) <= set(made) and made["torch"] == torch.__version__
    assert made["kernels_sha256"] == stamp.kernels_sha256("lora") != stamp.kernels_sha256("no such family")
    assert (
        stamp.slug("NVIDIA H200") == "nvidia-h200"
        and stamp.slug("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
    )
    with pytest.raises(ValueError, match="dtype: got 'fp8'"):
        stamp.dtype_names("fp8")
