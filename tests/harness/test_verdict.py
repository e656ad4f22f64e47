"""Verdicts over hand-made rows, and two runs compared."""

from __future__ import annotations

import json
import math

import pytest
from fakes import STAMP, bad_row, made_row

from harness import comparison, record, verdicts
from harness.record import ForeignGpu, MixedSchemas, Record
from harness.statistic import geometric_mean, mean_ratio, noise
from harness.verdicts import judge, verdict


def rows():
    """Two cases: triton 2× and 8× faster than eager, 1.5× and 6× than compile; tilelang fails in the second."""
    made = []
    for case, eager, compiled, triton in (("a", 4.0, 3.0, 2.0), ("b", 16.0, 12.0, 2.0)):
        made += [
            made_row("toy", case, "eager", [eager, 1.1 * eager], wall=90.0, ulp=4.0, vram_fwdbwd=300),
            made_row("toy", case, "compile", [compiled], wall=60.0),
            made_row("toy", case, "triton", [triton], fwdbwd=[2 * triton], wall=30.0, ulp=2.0, vram_fwdbwd=100),
        ]
    return [*made, made_row("toy", "a", "tilelang", [8.0]), bad_row("toy", "b", "tilelang", "failed", "assert")]


@pytest.fixture
def folder(tmp_path):
    Record(dict(STAMP), rows()).save(tmp_path / "run" / "toy.json")
    Record(dict(STAMP), []).save(tmp_path / "run" / "ceilings.json")
    return tmp_path / "run"


def test_geometric_means():
    values = judge(rows(), "toy", "triton", "fp16").values
    assert values["dev_eager"] == pytest.approx(4) and values["dev_compile"] == pytest.approx(3)
    assert values["fbdev_eager"] == pytest.approx(6) and values["fbdev_compile"] == pytest.approx(4.5)
    assert values["fb_eager"] == pytest.approx(3) and values["fb_compile"] == pytest.approx(2)
    assert values["vram"] == pytest.approx(3)
    assert (values["ulp"], values["eager_ulp"]) == (pytest.approx(2), pytest.approx(4))
    assert (values["n"], values["n_ok"], values["worst_case"]) == (2, 2, "a")


def test_a_failure_is_not_hidden():
    found = judge(rows(), "toy", "tilelang", "fp16", cases=("a", "b", "c"))
    assert (found.values["n"], found.values["n_ok"]) == (3, 1)
    assert found.values["dev_eager"] == pytest.approx(0.5)
    assert found.notes == ("b: failed: assert", "c: not measured")


def test_a_missing_baseline_is_noted():
    some = [row for row in rows() if (row["case"], row["backend"]) != ("b", "compile")]
    found = judge(some, "toy", "triton", "fp16")
    assert found.values["dev_compile"] == pytest.approx(1.5) and found.values["dev_eager"] == pytest.approx(4)
    assert found.notes == ("against compile: without b",)


def test_nothing_ok():
    bad = [row | {"status": "invalid"} for row in rows()]
    values = judge(bad, "toy", "triton", "fp16").values
    assert values["n_ok"] == 0 and values["dev_eager"] is None and values["worst_case"] is None


def test_json_has_the_fixed_keys(folder):
    found = json.loads(verdict(folder, format="json"))
    assert [list(entry) for entry in found] == [list(verdicts.COLUMNS)] * 2
    assert found == verdict(folder)


def test_text_and_markdown_agree(folder):
    text, table = verdict(folder, format="text"), verdict(folder, format="markdown").splitlines()
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1
    assert "| toy | triton | 2/2 | 4.00 | 3.00 |" in table[2]
    assert "| toy | tilelang | 1/2 | 0.50 |" in table[3] and "b: failed: assert" in text


def graphed_rows():
    """Beside `rows`: as graphs triton is 1.5× faster than eager, and its plain arm's wall is of no account."""
    made = rows()
    for case in ("a", "b"):
        made += [
            made_row("toy", case, "eager_graphed", [3.0], wall=12.0, ulp=3.0, vram_fwdbwd=200),
            made_row("toy", case, "triton_graphed", [2.0], wall=8.0, ulp=2.0, vram_fwdbwd=100),
        ]
    return made


def test_graphed_arms_are_compared_with_eagers_graph(tmp_path):
    values = judge(graphed_rows(), "toy", "triton_graphed", "fp16").values
    assert values["dev_eager"] == values["fb_eager"] == pytest.approx(1.5)
    assert values["vram"] == pytest.approx(2) and values["eager_ulp"] == pytest.approx(3)
    assert [values[name] for name in ("dev_compile", "fbdev_compile", "fb_compile")] == [None] * 3
    assert (values["n"], values["n_ok"]) == (2, 2) and values["worst_case"] == "a"
    assert judge(graphed_rows(), "toy", "triton", "fp16") == judge(rows(), "toy", "triton", "fp16")
    Record(dict(STAMP), graphed_rows()).save(tmp_path / "toy.json")
    assert [row["backend"] for row in verdict(tmp_path)] == ["triton", "tilelang", "triton_graphed"]
    assert "| toy | triton_graphed | 2/2 | 1.50 | – | 1.50 | – | 1.50 | – |" in verdict(tmp_path, format="markdown")


def test_graphed_arm_without_eagers_graph():
    some = [row for row in graphed_rows() if (row["case"], row["backend"]) != ("b", "eager_graphed")]
    found = judge(some, "toy", "triton_graphed", "fp16", cases=("a", "b", "c"))
    assert (found.values["n"], found.values["n_ok"]) == (3, 2)
    assert found.notes == ("c: not measured", "against eager_graphed: without b")


def test_tie():
    ratio = mean_ratio([([1.0], [1.1]), ([1.0], [0.9]), ([1.0], [1.05]), ([1.0], [0.97])])
    assert ratio.tie and ratio.low < 1 < ratio.high
    clear = mean_ratio([([2.0, 2.1], [1.0, 1.05]), ([3.0], [1.0])])
    assert not clear.tie and 1.9 <= clear.low <= clear.value <= clear.high
    assert clear == mean_ratio([([2.0, 2.1], [1.0, 1.05]), ([3.0], [1.0])])


def test_rows_have_intervals_of_their_own():
    samples = (("eager", [2.0, 2.02, 2.01]), ("triton", [2.01, 1.99, 2.0]))
    made = rows() + [made_row("toy", "c", b, t, fwdbwd=[9.0 if b == "eager" else 3.0]) for b, t in samples]
    found = judge(made, "toy", "triton", "fp16")
    a, c = found.rows["dev_eager"]["a"], found.rows["dev_eager"]["c"]
    assert a.value == 2 and 2 <= a.high <= 2.2 + 1e-9 and not a.tie and a.n == 1
    assert c.tie and c.low <= 2 / 1.99 <= c.high
    assert [note for note in found.notes if note.startswith("tie")] == ["tie dev/eager: c"]


def test_interval_holds_its_value_however_noisy_a_side_is():
    """Every resample of a noisy baseline is slower than its best; the mean's bound must not pass the mean by."""
    pairs = [([10.0, 13.0, 13.0], [5.0, 5.0, 5.0])] * 24
    ratio = mean_ratio(pairs)
    assert ratio.value == pytest.approx(2) and ratio.low <= 2 <= ratio.high < 2.6


def test_noise_is_of_the_best_samples():
    """Samples that are added can lower it: an outlier stops counting once three others agree."""
    assert noise([]) == 0 and noise([3.0]) == 0
    assert noise([3.0, 3.3, 3.1]) == pytest.approx(0.1)
    assert noise([3.0, 3.3, 3.1, 3.03, 3.06]) == pytest.approx(0.02)


def test_geometric_mean():
    assert geometric_mean([1, 4]) == pytest.approx(2)
    for bad in ([], [1, 0], [-1]):
        with pytest.raises(ValueError, match="wanted positive"):
            geometric_mean(bad)
    assert mean_ratio([]) is None


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([10.0, 10.1], [9.0, 9.1], "faster"),
        ([10.0, 10.1], [10.1, 10.2], "same"),
        ([10.0, 10.1], [11.0, 11.2], "slower"),
        ([10.0, 12.0], [10.5, 12.5], "unclear"),
    ],
)
def test_compare(tmp_path, before, after, verdict):
    paths = []
    for name, times in (("a", before), ("b", after)):
        run = Record(dict(STAMP), [made_row("toy", "c", "triton", times, fwdbwd=times)])
        run.save(tmp_path / name / "toy.json")
        paths.append(tmp_path / name)
    changes = comparison.compare(*paths)
    assert [change.verdict for change in changes] == [verdict] * 2
    assert math.isclose(changes[0].ratio, after[0] / before[0])
    assert comparison.worse(changes) is (verdict == "slower")
    assert [c.verdict for c in comparison.compare(paths[0] / "toy.json", paths[1] / "toy.json")] == [verdict] * 2


def test_compare_sees_broken_and_missing_rows(tmp_path):
    ok, other = made_row("toy", "c", "triton", [1.0]), made_row("toy", "d", "triton", [1.0])
    Record(dict(STAMP), [ok, other]).save(tmp_path / "a.json")
    Record(dict(STAMP), [ok | {"status": "failed", "reason": "assert"}]).save(tmp_path / "b.json")
    changes = comparison.compare(tmp_path / "a.json", tmp_path / "b.json")
    assert [c.verdict for c in changes] == ["unclear"] * 4 and comparison.worse(changes)
    assert changes[0].note == "ok → failed (assert)" and changes[2].note == "only in the first run"
    assert not comparison.worse(comparison.compare(tmp_path / "b.json", tmp_path / "a.json"))


def test_compare_needs_something_in_common(tmp_path):
    """Other families' files and a card's ceilings; a file beside a folder is compared with its own name's there."""
    one, other = tmp_path / "one", tmp_path / "other"
    Record(dict(STAMP), [made_row("toy", "c", "triton", [1.0])]).save(one / "toy.json")
    Record(dict(STAMP), [made_row("tin", "c", "triton", [1.0])]).save(one / "tin.json")
    Record(dict(STAMP), [made_row("toy", "c", "triton", [1.0])]).save(other / "toy.json")
    Record(dict(STAMP), [{"kind": "copy"}]).save(other / "ceilings.json")
    assert len(comparison.compare(one / "toy.json", other)) == len(comparison.compare(other, one / "toy.json")) == 2
    with pytest.raises(record.RecordError, match=r"toy.json and .*tin.json have no row in common"):
        comparison.compare(one / "toy.json", one / "tin.json")
    with pytest.raises(record.RecordError, match="a card's own measurements"):
        comparison.compare(other / "ceilings.json", other / "ceilings.json")
    with pytest.raises(record.RecordError, match="no family's rows"):
        verdicts.verdict(other / "ceilings.json")
    (other / "toy.json").unlink()
    assert verdicts.verdict(other) == []


def test_compare_refuses_two_schemas(tmp_path, monkeypatch):
    Record(dict(STAMP), [made_row("toy", "c", "triton", [1.0])]).save(tmp_path / "a.json")
    monkeypatch.setattr(record, "SCHEMA", 2)
    Record(dict(STAMP), [made_row("toy", "c", "triton", [1.0])]).save(tmp_path / "b.json")
    with pytest.raises(MixedSchemas, match="schema 1 and 2"):
        comparison.compare(tmp_path / "a.json", tmp_path / "b.json")
    assert len(comparison.compare(tmp_path / "a.json", tmp_path / "b.json", foreign=True)) == 2


def test_compare_says_what_else_differs(tmp_path):
    arms = [("eager", 1.02), ("compile", 1.04), ("triton", 1.5)]
    Record(dict(STAMP), [made_row("toy", "c", b, [1.0]) for b, _ in arms]).save(tmp_path / "a.json")
    meta = {**STAMP, "torch": "2", "git_dirty": True}
    Record(meta, [made_row("toy", "c", b, [time]) for b, time in arms]).save(tmp_path / "b.json")
    changes = comparison.compare(tmp_path / "a.json", tmp_path / "b.json")
    assert comparison.differences(tmp_path / "a.json", tmp_path / "b.json", changes) == [
        "torch: 1 → 2",
        "first run: stale kernels",
        "second run: dirty tree",
        "second run: stale kernels",
        "PyTorch's own arms: median ratio 1.030 over 4 times",
    ]
    assert comparison.summary(changes) == "0 faster, 4 same, 2 slower, 0 unclear; 33.3% moved"


def test_a_step_of_the_clock_is_no_change(tmp_path):
    """Two readings of a short kernel differ by a tick or two; a tenth is more than that."""
    for name, time in (("a", 1.216), ("b", 1.28), ("c", 1.216 * 1.1)):
        Record(dict(STAMP), [made_row("toy", "c", "triton", [time], fwdbwd=[time])]).save(tmp_path / f"{name}.json")
    found = [comparison.compare(tmp_path / "a.json", tmp_path / f"{name}.json")[0].verdict for name in "bc"]
    assert found == ["same", "slower"]


def test_compare_refuses_two_cards(tmp_path):
    for name, gpu in (("a", "NVIDIA Test"), ("b", "NVIDIA Other")):
        Record({**STAMP, "gpu": gpu}, [made_row("toy", "c", "triton", [1.0])]).save(tmp_path / f"{name}.json")
    with pytest.raises(ForeignGpu, match="NVIDIA Other and NVIDIA Test"):
        comparison.compare(tmp_path / "a.json", tmp_path / "b.json")
    assert len(comparison.compare(tmp_path / "a.json", tmp_path / "b.json", foreign=True)) == 2
