"""The panels: what they show, and that the same rows give the same bytes."""

from __future__ import annotations

import pytest
from fakes import CEILINGS, STAMP, bad_row, made_row

from harness import figures
from harness.figure import COLOURS, MARKERS, METRICS, colour, draw
from harness.record import Record

FACTOR = {"eager": 4.0, "compile": 3.0, "triton": 1.0, "tilelang": 2.0}


def rows():
    made = [
        made_row("toy", case, backend, [factor * size], l2_resident=case == "small", floor_us=0.5 * size)
        for case, size in (("small", 2.0), ("large", 20.0))
        for backend, factor in FACTOR.items()
    ]
    made += [made_row("toy_bypass", "one", backend, [factor]) for backend, factor in FACTOR.items()]
    made[3] = bad_row("toy", "small", "tilelang", "failed", "assert")
    return made


def lines(axis, colour):
    """The faint and the bold line of one colour."""
    return [list(line.get_xdata()) for line in axis.get_lines() if line.get_color() == colour]


def test_six_panels():
    assert list(METRICS) == ["forward", "fwdbwd", "bandwidth", "speedup", "memory", "ulp"]


@pytest.mark.parametrize("metric", METRICS)
def test_one_axis_an_op(metric):
    axes = draw(metric, rows(), CEILINGS).axes
    assert [axis.get_title(loc="left").split(":")[0] for axis in axes] == ["toy", "toy_bypass"]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["small", "large"]
    assert len(draw(metric, rows(), CEILINGS, op="toy_bypass").axes) == 1


def test_values_and_ceilings():
    axis = draw("forward", rows(), op="toy").axes[0]
    assert lines(axis, COLOURS["triton"]) == [[100.0, 100.0], [2.0, 20.0]]
    assert lines(axis, "crimson") == [[1.0, 10.0]]
    axis = draw("speedup", rows(), op="toy").axes[0]
    assert lines(axis, COLOURS["triton"])[1] == [4.0, 4.0] and lines(axis, "crimson") == [[8.0, 8.0]]
    axis = draw("bandwidth", rows(), op="toy").axes[0]
    total = ((1 << 20) + (1 << 22)) / 1e3
    assert lines(axis, COLOURS["compile"])[1] == [total / 6, total / 60]


def test_marks():
    axis = draw("forward", rows(), op="toy").axes[0]
    assert [text.get_text() for text in axis.texts] == ["tilelang: failed"]
    assert len(axis.patches) == 1
    assert len(set(MARKERS.values())) == 4 and len(set(COLOURS.values())) == len(COLOURS)


def test_caption_and_backends():
    figure = draw("ulp", rows(), meta=STAMP, backends=("eager", "triton"))
    assert figure.get_supxlabel().startswith("NVIDIA Test, 2026-01-02, fp16. STALE KERNELS. Bold")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["eager", "triton"] and "tilelang" not in labels


def test_graphed_arms_are_drawn_where_they_are_asked_for():
    more = [*rows(), *(made_row("toy", case, "triton_graphed", [1.0]) for case in ("small", "large"))]
    more += [made_row("toy", case, "eager_graphed", [3.0]) for case in ("small", "large")]
    plain = [text.get_text() for text in draw("speedup", more, op="toy").legends[0].get_texts()]
    assert not any("graphed" in label for label in plain)
    axis = draw("speedup", more, op="toy", backends=("triton", "triton_graphed")).axes[0]
    assert lines(axis, colour("triton_graphed"))[1] == [3.0, 3.0]
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_equal_values_stand_side_by_side():
    axis = draw("ulp", rows(), op="toy").axes[0]
    bold = [line for line in axis.get_lines() if str(line.get_gid()).endswith(":bold")]
    heights = [line.get_ydata()[1] for line in bold]
    assert len(heights) == 4 and len(set(heights)) == 4 and all(abs(height - 1) < 0.5 for height in heights)


@pytest.mark.parametrize("metric", METRICS)
def test_no_text_is_cut_off(metric):
    """At half a page's width, with the longest caption."""
    meta = {**STAMP, "gpu": "NVIDIA GeForce RTX 4090 Laptop GPU", "git_dirty": True}
    figure = draw(metric, rows(), CEILINGS, meta=meta)
    figure.draw_without_rendering()
    texts = [*figure.legends[0].get_texts(), figure._supxlabel]
    for axis in figure.axes:
        texts += [axis.xaxis.label, axis._left_title, *axis.get_yticklabels(), *axis.texts]
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height, text


@pytest.mark.parametrize(
    ("what", "says"), [({"metric": "nothing"}, "metric: got 'nothing'"), ({"op": "x"}, "no rows of")]
)
def test_bad_arguments(what, says):
    with pytest.raises(ValueError, match=says):
        draw(**{"metric": "ulp", "rows": rows(), **what})


def test_redrawn_identically(tmp_path):
    Record({**STAMP, "ceilings": CEILINGS}, rows()).save(tmp_path / "run" / "toy.json")
    first = figures(tmp_path / "run", tmp_path / "one")
    second = figures(tmp_path / "run", tmp_path / "two")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(f"toy_fp16_{metric}.{kind}" for metric in METRICS for kind in ("png", "svg"))
    for name in names:
        data = (first / name).read_bytes()
        assert data == (second / name).read_bytes() and len(data) > 5000
    assert b"<dc:date>" not in (first / "toy_fp16_ulp.svg").read_bytes()
