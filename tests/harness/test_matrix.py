"""The table across cards: each card's own means, gaps where a card has no record, two records of one kind told apart."""

from __future__ import annotations

import math

import pytest
from fakes import STAMP, made_row

from harness import matrix
from harness.record import Record


@pytest.fixture
def folders(tmp_path):
    def card(name, gpu, ops, speed):
        rows = [
            made_row(op, case, b, [t])
            for op in ops
            for case in ("a", "b")
            for b, t in (("eager", 4.0), ("compile", 3.0), ("triton", speed), ("tilelang", 2 * speed))
        ]
        Record({**STAMP, "gpu": gpu}, rows).save(tmp_path / name / "toy.json")
        return tmp_path / name

    return [
        card("nvidia-one", "NVIDIA One", ("lora", "lora_bypass"), 2.0),
        card("nvidia-two", "NVIDIA Two", ("lora",), 1.0),
        card("nvidia-two-abcd", "NVIDIA Two", ("lora",), 0.5),
    ]


def test_table(folders):
    table = matrix.matrix("dev_eager", folders=folders)
    assert list(table.columns) == ["NVIDIA One", "NVIDIA Two", "NVIDIA Two (nvidia-two-abcd)"]
    assert list(table.loc["lora", "triton"]) == pytest.approx([2.0, 4.0, 8.0])
    assert list(table.loc["lora", "tilelang"]) == pytest.approx([1.0, 2.0, 4.0])
    assert table.loc["lora_bypass", "triton"].iloc[0] == pytest.approx(2.0)
    assert all(math.isnan(value) for value in table.loc["lora_bypass", "triton"].iloc[1:])


def test_figure_shows_every_op_and_card(folders):
    figure = matrix.draw_matrix("fbdev_compile", folders=folders)
    figure.canvas.draw()
    axes = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title("left") for axis in axes] == ["lora", "lora_bypass"]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == [
        "NVIDIA One",
        "NVIDIA Two",
        "NVIDIA Two (nvidia-\ntwo-abcd)",
    ]
    # An interval and a mark for each backend of each card, and the line at 1.
    assert [len(axis.lines) for axis in axes] == [3 * 2 * 2 + 1, 2 * 2 + 1]


def test_view_across_cards(folders, monkeypatch):
    view = matrix.Matrix("dev_eager", folders=folders)
    frame = view.frame("dev_eager", "fp16")
    assert "3 cards: NVIDIA One, NVIDIA Two" in frame.alt and "lora triton 2.00" in frame.alt
    assert frame.table.count("<th scope=col>NVIDIA") == 3 and frame.table.count("<td>–</td>") == 4
    assert "<td>4.00 [4.00–4.00]</td>" in frame.table
    bar, drawn = view._live().children
    before = drawn.value
    bar.children[0].value = "fbdev_compile"
    assert drawn.value != before and "fbdev against compile" in drawn.value
    data, metadata = view._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == frame.alt and data["image/png"]
    monkeypatch.setenv("HARNESS_PANEL_FRAMES", "1")
    assert set(view._repr_mimebundle_()[0]) == {"text/plain", "text/html"}


def test_view_of_one_card_says_so(folders):
    frame = matrix.Matrix("dev_eager", folders=folders[:1]).frame("dev_eager", "fp16")
    assert "on one recorded card, NVIDIA One" in frame.alt


def test_graphed_arms_stay_out_of_the_view(tmp_path):
    rows = [made_row("lora", "a", b, [2.0]) for b in ("eager", "triton", "eager_graphed", "triton_graphed")]
    Record({**STAMP, "gpu": "One"}, rows).save(tmp_path / "one" / "toy.json")
    frame = matrix.Matrix(folders=[tmp_path / "one"]).frame("dev_eager", "fp16")
    assert "triton" in frame.table and "graphed" not in frame.table + frame.svg
    assert ("lora", "triton_graphed") in matrix.matrix(folders=[tmp_path / "one"]).index


def test_unknown_metric(folders, tmp_path):
    with pytest.raises(ValueError, match="metric: got 'speed'"):
        matrix.matrix("speed", folders=folders)
    with pytest.raises(ValueError, match="metric: got 'ulp'"):
        matrix.draw_matrix("ulp", folders=folders)
    for what in ({"metric": "ulp"}, {"dtype": "fp32"}):
        with pytest.raises(ValueError, match="Matrix: got"):
            matrix.Matrix(**what, folders=folders)
    with pytest.raises(FileNotFoundError):
        matrix.matrix(folders=[])
