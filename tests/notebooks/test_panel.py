"""A panel narrows its choices, redraws, reads out exact numbers, and exports whole."""

from __future__ import annotations

import base64
import gzip
import html
import io
import json
import re
import time

import pytest
from PIL import Image, ImageColor

from harness.figure import COLOURS, METRICS, draw
from harness.markup import DPI, FRAMES, png
from harness.panel import LEVELS, MAX_FRAMES, Panel
from harness.readings import readings
from harness.record import Record, blank_row

CASES = {"lora": ("small_r4", "small_r16", "large_r4", "large_r16"), "lora_bypass": ("small_t77", "small_t1024")}
SPEED = {"eager": 30.0, "triton": 10.0}


def make_row(op, case, backend):
    scale = 1.0 + len(case)
    phase = {"dev_us": [SPEED[backend] * scale, SPEED[backend] * scale + 1], "wall_us": [500.0, 700.0], "floor_us": 5.0}
    measured = {"status": "ok", "fwd": phase, "fwdbwd": phase, "vram_fwd": 2**20, "vram_fwdbwd": 2**21, "ulp": 2.0}
    sizes = {"bytes_read": 1000, "bytes_written": 1000, "floor_us": 5.0, "ulp_out": 1.0, "l2_resident": False}
    return blank_row(op, case, "fp16", backend, {"O": 8, "I": 8}) | measured | sizes


@pytest.fixture
def run():
    rows = [make_row(op, case, backend) for op, cases in CASES.items() for case in cases for backend in SPEED]
    return Record({"gpu": "Test card", "started": "2026-01-02T03:04:05+00:00", "ceilings": {"copy_gbps": 100.0}}, rows)


def unpacked(text):
    """What an exported panel carries."""
    packed = re.search(r'<script type="application/gzip">(.*?)</script>', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def controls(panel):
    bar, drawn = panel._live().children
    return {control.description: control for control in bar.children}, drawn


def test_a_choice_narrows_the_next(run):
    panel = Panel(run, "forward")
    assert panel.options("op", panel.complete({})) == ["lora", "lora_bypass"]
    assert panel.options("cases", panel.complete({"op": "lora"})) == ["all", "r4", "r16", "small", "large"]
    assert panel.options("cases", panel.complete({"op": "lora_bypass"})) == ["all"]
    assert panel.complete({"op": "lora_bypass", "cases": "r16"})["cases"] == "all"


def test_cases_of_a_choice_are_those_in_the_table(run):
    found = re.findall(r"<th scope=row>(\w+)</th>", Panel(run, "forward").frame({"cases": "r16"}).table)
    assert found == ["small_r16", "large_r16"]


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_has_an_image_and_words(run, metric):
    data, metadata = Panel(run, metric)._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "eager" in data["text/plain"] and "triton" in data["text/plain"]
    assert metadata["image/png"]["alt"] == data["text/plain"]


def test_few_colours_keep_every_arms_own(run):
    """All arms on the same points, so that all but one show in the legend alone."""
    rows = [{**row, "backend": arm, "fwd": run.rows[0]["fwd"]} for row in run.rows[::2] for arm in COLOURS]
    drawn = draw("forward", rows, op="lora", backends=list(COLOURS))
    raw = io.BytesIO()
    drawn.savefig(raw, format="png", dpi=DPI)
    small = base64.b64decode(png(drawn))
    assert len(small) < len(raw.getvalue()) / 2
    image = Image.open(io.BytesIO(small)).convert("RGB")
    found = {color for _, color in image.getcolors(1 << 20)}
    for arm in COLOURS:
        wanted = ImageColor.getrgb(COLOURS[arm])
        assert min(sum(abs(a - b) for a, b in zip(color, wanted, strict=True)) for color in found) < 20, arm


def test_words_and_numbers_are_those_of_the_rows(run):
    frame = Panel(run, "speedup", op="lora").frame()
    assert "triton 3 to 3" in frame.alt and "Test card, 2026-01-02" in frame.alt
    value = readings(METRICS["forward"], run.rows)["small_r4", "triton"]
    assert (value.value, value.low, value.high) == (90.0, 90.0, 91.0)
    assert str(value) == "90 [90–91]"


def test_a_failure_shows_as_one(run):
    run.rows[0] |= {"status": "failed", "reason": "planted"}
    assert ">failed</td>" in Panel(run, "forward", op=run.rows[0]["op"]).frame().table


def test_wall_and_scale_change_the_figure_and_wall_the_numbers(run):
    panel = Panel(run, "forward")
    device, wall, linear = panel.frame({}), panel.frame({"clock": "wall"}), panel.frame({"scale": "linear"})
    assert len({device.svg, wall.svg, linear.svg}) == 3
    assert "500 [500–700]" in wall.table and wall.table != device.table == linear.table


def test_live_controls_redraw(run):
    found, drawn = controls(Panel(run, "forward"))
    before = drawn.value
    panel_time = time.perf_counter()
    found["Operation"].value = "lora_bypass"
    panel_time = time.perf_counter() - panel_time
    assert drawn.value != before and "small_t77" in drawn.value
    assert found["Cases"].options == ("all",) and found["Cases"].layout.display == "none"
    assert panel_time < 5, "half a second on a free machine; ten times that is wrong on any"


def test_live_backends_can_be_left_out(run):
    found, drawn = controls(Panel(run, "forward"))
    found["Backends"].value = ("triton",)
    assert ">triton</th>" in drawn.value and ">eager</th>" not in drawn.value


@pytest.fixture
def graphed(run):
    """The run with CUDA-graph replays of its arms, and in a second dtype."""
    more = [{**row, "backend": f"{row['backend']}_graphed"} for row in run.rows]
    more += [{**row, "dtype": "bf16"} for row in run.rows]
    return Record(run.meta, [*run.rows, *more])


def test_graphed_arms_are_offered_and_off_at_first(graphed):
    panel = Panel(graphed, "forward")
    found, drawn = controls(panel)
    arms = ("eager", "triton", "eager_graphed", "triton_graphed")
    assert found["Backends"].options == arms and found["Backends"].value == ("eager", "triton")
    assert "triton_graphed" not in drawn.value and "graphed" not in panel.frame().alt
    found["Backends"].value = arms
    assert all(f'data-arm="{arm}"' in drawn.value for arm in arms)
    found["dtype"].value = "bf16"
    assert found["Backends"].options == ("eager", "triton") and "bf16" in drawn.value


def test_export_carries_graphed_arms_hidden(graphed):
    text = Panel(graphed, "forward").html()
    data = unpacked(text)
    assert data["hidden"] == ["eager_graphed", "triton_graphed"]
    assert "triton_graphed" in json.dumps(data["tree"])


def test_an_arm_that_nobody_knows_is_drawn(run):
    for row in run.rows:
        row["backend"] = row["backend"].replace("triton", "helion")
    assert 'data-arm="helion"' in Panel(run, "forward").frame().svg


def test_points_say_their_numbers(run):
    run.rows[1] |= {"status": "failed", "reason": "planted"}
    svg = Panel(run, "forward").frame().svg
    said = re.findall(r"<title>([^<]*)</title>", svg)
    assert "small_r16, triton: 100 [100–101] µs" in said and "small_r4, eager: 270 [270–271] µs" in said
    assert len(said) == 7


def test_two_figures_share_no_name_but_equal_parts(run):
    first, second = (Panel(run, metric).frame().svg for metric in ("forward", "bandwidth"))
    for one in (first, second):
        assert set(re.findall(r"#(\w+)", re.sub(r"#[0-9a-f]{6}\b(?!\w)", "", one))) <= set(
            re.findall(r'id="(\w+)"', one)
        )
    assert not re.findall(r'id="(?![mp][0-9a-f]{10}")', first)


def test_export_holds_every_combination_and_loads_nothing(run, monkeypatch):
    panel = Panel(run, "forward")
    monkeypatch.setenv(FRAMES, "1")
    data, _ = panel._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html"}
    node = unpacked(data["text/html"])["tree"]
    for chosen in panel.combinations():
        leaf = node
        for value in chosen.values():
            leaf = leaf[value]
        frame = panel.frame(chosen, panel.backends(chosen))
        assert leaf == [frame.svg, frame.alt, frame.table]
    assert not re.search(r"(src|href)=.?(https?:)?//", html.unescape(data["text/html"]))


def test_export_is_capped_and_loses_no_option(run):
    more = [{**row, "dtype": dtype} for row in run.rows for dtype in ("fp16", "bf16", "fp32")]
    everything = Panel(Record(run.meta, more))
    carried, whole = everything.combinations(), list(everything._expand({}))
    assert len(carried) < len(whole) / 2 and len(whole) > MAX_FRAMES
    assert len({tuple(chosen.values()) for chosen in carried}) == len(carried)
    for level in LEVELS:
        assert {chosen[level] for chosen in carried} == {chosen[level] for chosen in whole}, level
    # What a reader sees first is there, with the axis and the clock to choose.
    for change in ({}, {"scale": "linear"}, {"clock": "wall"}, {"cases": "r16"}, {"dtype": "fp32"}):
        assert everything.complete({"metric": "forward", **change}) in carried


def test_a_small_export_holds_everything(run):
    panel = Panel(run, "forward")
    assert panel.combinations() == list(panel._expand({}))


def test_a_ratios_interval_is_the_verdicts(run):
    from harness.statistic import row_ratio

    rows = {(row["case"], row["backend"]): row for row in run.rows}
    eager, mine = (rows["small_r4", backend]["fwd"]["dev_us"] for backend in ("eager", "triton"))
    value, wanted = readings(METRICS["speedup"], run.rows)["small_r4", "triton"], row_ratio(eager, mine)
    assert (value.value, value.low, value.high) == pytest.approx((wanted.value, wanted.low, wanted.high))
    assert "95 % interval" in Panel(run, "speedup").frame().table
    assert "range over windows" in Panel(run, "forward").frame().table
    assert "in brackets" not in Panel(run, "ulp").frame().table


def test_several_runs_are_a_control(run):
    other = Record({**run.meta, "gpu": "Other card"}, run.rows)
    panel = Panel({"here": run, "there": other}, "forward", run="there")
    assert panel.options("run", {}) == ["here", "there"]
    assert "there" in panel.frame().alt


@pytest.mark.parametrize(("arguments", "said"), [({"metric": "speed"}, "speed"), ({"colour": "red"}, "colour")])
def test_what_it_does_not_know_is_an_error(run, arguments, said):
    with pytest.raises(ValueError, match=said):
        Panel(run, **arguments)


def test_nothing_recorded_is_an_error(run):
    with pytest.raises(ValueError, match="nothing recorded"):
        Panel(Record(run.meta))


def test_graphed_arms_have_a_table():
    from harness import show
    from harness.record import load
    from harness.stamp import DATA

    table = show.graphed(load(DATA / "nvidia-h200" / "lora.json"))
    assert set(table.index) == {(op, f"{b}_graphed") for op in ("lora", "lora_bypass") for b in ("triton", "tilelang")}
    assert (table["fwd+bwd wall"] > 1).all()
