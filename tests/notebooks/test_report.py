"""The README's table is the recorded runs' verdict, formulas become MathML, and a refresh settles a notebook."""

from __future__ import annotations

import nbformat
import pytest

from harness import record, report, show, stamp
from kernels.registry import families


def test_readme_shows_the_recorded_verdict():
    (found,) = report.TABLE.finditer(report.README.read_text(encoding="utf-8"))
    assert found[0] == found[1] + report.readme_table() + found[2], "run `make refresh`"


def test_readme_has_rows_of_recorded_families_only():
    recorded = {
        family for folder in stamp.recorded_dirs() for family in families() if (folder / f"{family}.json").exists()
    }
    table = report.readme_table()
    for family, ops in families().items():
        assert all((f"| {op.name} |" in table) == (family in recorded) for op in ops)


@pytest.mark.parametrize(
    ("text", "formulas"),
    [("$x$ and $$y^2$$", 2), ("costs $5 and $6", 0), ("`$x$` and\n```\n$y$\n```", 0), (r"$\Delta W_{[O,I]}$", 1)],
)
def test_formulas_become_mathml(text, formulas):
    made = report.to_mathml(text)
    assert made.count("<math") == formulas
    assert formulas or made == text


def test_settling_keeps_what_shows_and_drops_what_a_kernel_needs():
    output = nbformat.v4.new_output("display_data", {"image/png": "AAAA", report.WIDGET_VIEW: {"model_id": "1"}})
    cell = nbformat.v4.new_code_cell("1", outputs=[output], metadata={"execution": {"started": "now"}})
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    settled = report.settle(notebook)
    assert settled.cells[0].outputs[0].data == {"image/png": "AAAA"}
    assert settled.cells[0].metadata == {} and "widgets" not in settled.metadata


def test_source_is_read_without_importing():
    shown = show.source("lora", "triton", "_merge_kernel").data
    assert "@triton.jit\ndef _merge_kernel(" in shown and "def _pair_kernel(" not in shown


def test_source_that_is_not_there_is_an_error():
    with pytest.raises(LookupError, match="no_such_kernel: in 0 of"):
        show.source("lora", "triton", "no_such_kernel")


def test_published_figures_name_what_they_measured():
    import json

    published = json.loads(show.PUBLISHED.read_text(encoding="utf-8"))
    assert "published" in published["label"]
    swapped = {row["op"]: row["compares_with"] for row in published["rows"]}
    assert swapped["lora"] == "loha" and swapped["lora_bypass"] == "loha_bypass"
    assert all(there == here for there, here in swapped.items() if not there.startswith("lora"))


def test_summary_shows_every_op_and_clock():
    from harness.statistic import Ratio
    from harness.summary import CLOCKS, draw_summary
    from harness.verdicts import RATIOS, Verdict

    ratios = dict.fromkeys(RATIOS, Ratio(2.0, 1.5, 2.5, 4))
    made = [Verdict({"op": op, "backend": b}, ratios, ()) for op in ("lora", "oft") for b in ("triton", "tilelang")]
    figure = draw_summary(made, {"gpu": "Test card", "started": "2026-01-02"})
    assert [axis.get_title() for axis in figure.axes] == list(CLOCKS.values())
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["lora", "oft"]
    for axis in figure.axes:
        values = [line.get_xdata()[0] for line in axis.lines if len(line.get_xdata()) == 1]
        assert values == [2.0] * 8


def test_runs_are_named_by_card_and_day(tmp_path, monkeypatch):
    for gpu in ("Card A", "Card B"):
        for name in ("lora", "ceilings"):
            record.Record({"gpu": gpu, "started": "2026-01-02T00:00:00"}, []).save(
                tmp_path / stamp.slug(gpu) / f"{name}.json"
            )
    monkeypatch.setattr(stamp, "DATA", tmp_path)
    assert list(show.runs("lora")) == ["Card A, 2026-01-02", "Card B, 2026-01-02"]
    monkeypatch.setattr(stamp, "environment", lambda: {"gpu": "Card B"})
    assert list(show.runs("lora")) == ["Card B, 2026-01-02", "Card A, 2026-01-02"]


def test_two_cards_of_a_kind_are_two_runs(tmp_path, monkeypatch):
    for folder in ("card", "card-2"):
        for name in ("lora", "ceilings"):
            meta = {"gpu": "Card", "started": "2026-01-02T00:00:00", "kernels_sha256": "a", "git_dirty": False}
            record.Record(meta, [record.blank_row("lora", "a", "fp16", "eager", {})]).save(
                tmp_path / folder / f"{name}.json"
            )
    monkeypatch.setattr(stamp, "DATA", tmp_path)
    assert list(show.runs("lora")) == ["Card, 2026-01-02", "Card, 2026-01-02 (card-2)"]
    assert list(show.cards()) == ["Card", "Card (card-2)"]


def test_intervals_are_the_verdicts():
    from harness.verdicts import verdicts

    run = record.load(stamp.DATA / "nvidia-h200" / "lora.json")
    table = show.intervals(run)
    (judged,) = [v for v in verdicts(run) if (v.values["op"], v.values["backend"]) == ("lora", "triton")]
    ratio = judged.ratios["dev_eager"]
    assert table.loc[("lora", "triton"), "dev_eager"] == f"{ratio.value:.2f} [{ratio.low:.2f}–{ratio.high:.2f}]"
    assert not [backend for _, backend in table.index if backend.endswith("graphed")]
