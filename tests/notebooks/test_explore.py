"""Exploring a case: costs and floors by the formula, small errors on the CPU, measuring with progress and cancel."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading

import pytest

from harness.explore import ROUNDS, Explore, _Live
from harness.generated import Generated
from harness.markup import FRAMES
from harness.record import Record, blank_row
from kernels.registry import ops

CEILINGS = {
    "read_gbps": 1000.0,
    "triad_gbps": 1000.0,
    "copy_gbps": 1000.0,
    "write_gbps": 1000.0,
    "matmul_tflops": {"fp16": 100.0},
}


@pytest.fixture
def run():
    rows = []
    for name in ("lora", "lora_bypass"):
        op = ops()[name]
        case = op.cases[0]
        cost = op.cost(case.dims, 2)
        for backend in ("eager", "triton"):
            row = blank_row(name, case.name, "fp16", backend, case.dims)
            sizes = {"bytes_read": cost.bytes_read, "bytes_written": cost.bytes_written, "flops": cost.flops}
            rows.append(row | sizes | {"status": "ok", "floor_us": 2.0, "fwd": {"dev_us": [4.0, 5.0]}})
    return Record({"gpu": "Test card", "started": "2026-01-02", "ceilings": CEILINGS}, rows)


def live(explore):
    import ipywidgets as W

    return _Live(explore, W)


def test_cost_is_the_formulas(run):
    point = Explore(run, "lora").cost("lora", {"O": 1000, "I": 500, "R": 10}, "fp16")
    assert point.bytes_moved == 2 * (1000 * 10 + 10 * 500 + 1000 * 500)
    assert point.flops == 2 * 1000 * 500 * 10
    assert point.floor_us == pytest.approx(point.bytes_moved / 1e6)


def test_image_words_and_table(run):
    frame = Explore(run, "lora").frame("lora", "fp16", "triton")
    assert "1 cases, 50% to 50% of the floor's rate" in frame.alt
    assert "<td>50%</td>" in frame.table


def test_export_switches_op_and_backend(run, monkeypatch):
    monkeypatch.setenv(FRAMES, "1")
    data, _ = Explore(run, "lora")._repr_mimebundle_()
    packed = re.search(r'<script type="application/gzip">(.*?)</script>', data["text/html"])[1]
    tree = json.loads(gzip.decompress(base64.b64decode(packed)))["tree"]
    assert set(tree) == {"lora", "lora_bypass"} and set(tree["lora"]["fp16"]) == {"eager", "triton"}


def test_sizes_of_ones_own_move_the_point(run):
    tool = live(Explore(run, "lora"))
    before = tool.drawn.value
    tool.sizes.children[0].value = 12345
    assert tool.drawn.value != before and tool.dims["O"] == 12345


def test_sizes_that_make_no_call_say_so(run):
    tool = live(Explore(run, "lora"))
    for box in tool.sizes.children:
        box.value = 0
    assert "no call" in tool.said.value
    for box in tool.sizes.children:
        box.value = 16
    assert not tool.said.value


def test_small_error_is_checked_on_the_cpu_and_a_big_one_refused(run):
    explore = Explore(run, "lora")
    assert explore.error("lora", {"O": 16, "I": 16, "R": 4}, "fp32", "eager").startswith("ULP against float64: output")
    if explore.measure is None:
        assert "only small sizes" in explore.error("lora", {"O": 4096, "I": 4096, "R": 16}, "fp32", "eager")


def test_run_measures_and_adds_the_point(run):
    row = {"status": "ok", "fwd": {"dev_us": [7.5]}}
    tool = live(Explore(run, "lora", measure=lambda *what: row))
    assert not tool.run.disabled
    tool.run.click()
    tool.thread.join(60)
    assert tool.progress.value == ROUNDS and "7.50 µs" in tool.said.value
    assert "here, O 640, I 640, R 4: measured" in tool.drawn.value and not tool.run.disabled
    # It stays beside the next choice, once however often it is measured, and only where it belongs.
    tool.run.click()
    tool.thread.join(60)
    tool.sizes.children[0].value = 12345
    assert tool.drawn.value.count("<th scope=row>here, O 640") == 1 and "<th scope=row>chosen" in tool.drawn.value
    tool.backend.value = "eager"
    assert "here, O 640" not in tool.drawn.value


def test_cancel_stops_between_rounds(run):
    going, calls = threading.Event(), []

    def measure(*what):
        calls.append(what)
        going.set()
        tool.stop.wait(60)
        return {"status": "ok", "fwd": {"dev_us": [7.5]}}

    tool = live(Explore(run, "lora", measure=measure))
    tool.run.click()
    assert going.wait(60)
    tool.cancel.click()
    tool.thread.join(60)
    assert len(calls) == 1 and "cancelled after 1 of" in tool.said.value


def test_a_failed_measurement_is_shown(run):
    tool = live(Explore(run, "lora", measure=lambda *what: {"status": "failed", "reason": "planted"}))
    tool.run.click()
    tool.thread.join(60)
    assert tool.said.value == "failed: planted"


def test_unknown_op_is_an_error(run):
    with pytest.raises(ValueError, match="nothing"):
        Explore(run, "nothing")


def test_code_of_the_chosen_call_is_shown_with_registers(run):
    made = [Generated("kernel<1>", 2, 40, 0, 1024, {"TTGIR": "module {a < b}"})]
    asked = []
    tool = live(Explore(run, "lora", code=lambda *what: asked.append(what) or made))
    tool.show.click()
    tool.thread.join(60)
    assert asked == [("lora", tool.dims, "fp16", "triton")]
    assert "<td>40</td><td>0</td><td>1024</td>" in tool.code.value and "a &lt; b" in tool.code.value
    assert not tool.show.disabled


def test_why_there_is_no_code_is_shown(run):
    tool = live(Explore(run, "lora", backend="eager"))
    tool.show.click()
    tool.thread.join(60)
    assert "no code to show: eager runs PyTorch" in tool.code.value
