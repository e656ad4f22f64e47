"""Any size of an op: what it costs, where it sits on the roofline beside the recorded cases, and its time here and now."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from harness import ceilings as limits
from harness import precision
from harness.figure import plain
from harness.generated import Generated, as_html, generated
from harness.markup import Frame, body, mimebundle, page, png, svg
from harness.measure import Plan, make_bench, measure_case
from harness.record import Record, Row
from harness.roofline import Point, draw_roofline, point, roofline_table
from harness.stamp import DTYPES
from harness.steps import BACKENDS
from kernels import UnsupportedCase
from kernels.registry import Case, Dims, Op, ops

LABELS = ("Operation", "dtype", "Backend")
# The interpreter and the float64 oracle take seconds at this many elements times inner steps.
CPU_LIMIT = 2**22
ROUNDS = 3
_NO_CALL = "these sizes make no call: "
Measure = Callable[[Op, Case, str, str], Row]


class Explore:
    """Sizes, dtype and backend of one call, over a recorded run.

    Args:
        run: the recorded run whose card and cases stand beside the chosen call.
        op, dtype, backend: the first choice.
        measure: times one case and returns its row; this machine's GPU by default, None without one.
        code: compiles one call and returns its kernels.

    Raises:
        ValueError: the run has no row of that op.
    """

    def __init__(
        self,
        run: Record,
        op: str,
        dtype: str = "fp16",
        backend: str = "triton",
        *,
        measure: Measure | None = None,
        code: Callable[[str, Dims, str, str], list[Generated]] = generated,
    ) -> None:
        self.run, self.code = run, code
        self.ops = list(dict.fromkeys(row["op"] for row in run.rows))
        if op not in self.ops:
            raise ValueError(f"Explore: got op {op!r}, wanted one of {', '.join(self.ops)}")
        self.start = (op, dtype, backend)
        self.measure = measure or (_measure_here if torch.cuda.is_available() else None)

    def cost(self, op: str, dims: Dims, dtype: str, name: str = "chosen") -> Point:
        """The forward's compulsory bytes, its flops and its floor on the run's card."""
        least = ops()[op].cost(dims, DTYPES[dtype].itemsize)
        floor = limits.floor_us(
            self.run.meta.get("ceilings"), least.bytes_read, least.bytes_written, least.flops, dtype
        )
        return Point(name, least.bytes_read + least.bytes_written, least.flops, floor)

    def frame(self, op: str, dtype: str, backend: str, chosen: tuple[Point, ...] = ()) -> Frame:
        """The roofline of one op, dtype and backend, with the chosen calls ringed."""
        rows = [r for r in self.run.rows if (r["op"], r["dtype"], r["backend"]) == (op, dtype, backend)]
        points = [point(row) for row in rows]
        title = f"{op}, {dtype}, {backend}"
        shares = [p.floor_us / p.dev_us for p in points if p.floor_us and p.dev_us]
        reached = f"{min(shares):.0%} to {max(shares):.0%} of the floor's rate" if shares else "nothing recorded"
        words = {backend: [f"{p.case}: {p.tflops(p.dev_us):.4g} TFLOP/s" for p in points if p.tflops(p.dev_us)]}
        return Frame(
            svg(self._figure(op, dtype, backend, chosen), words),
            f"Roofline of {title}: {len(points)} cases, {reached}.",
            roofline_table([*chosen, *points]),
        )

    def _figure(self, op: str, dtype: str, backend: str, chosen: tuple[Point, ...] = ()) -> Any:
        rows = [r for r in self.run.rows if (r["op"], r["dtype"], r["backend"]) == (op, dtype, backend)]
        return draw_roofline(
            [point(row) for row in rows],
            chosen,
            self.run.meta["ceilings"],
            title=f"{op}, {dtype}, {backend}",
            backend=backend,
            kind=dtype,
            meta=self.run.meta,
        )

    def error(self, op: str, dims: Dims, dtype: str, backend: str) -> str:
        """The worst error against float64 of the output and each gradient, on this machine, or why there is none."""
        each = ops()[op]
        on_gpu = torch.cuda.is_available()
        work = prod(each.out_shape(dims)) + sum(prod(shape) for shape in each.shapes(dims).values())
        if not on_gpu and max(work, each.flops(dims)[1]) > CPU_LIMIT:
            return "without a GPU only small sizes are checked: try O = 48, I = 80"
        try:
            truth = precision.make_truth(each, dims, DTYPES[dtype], torch.device("cuda" if on_gpu else "cpu"), 0)
            found = precision.check(each, truth, backend)
        except UnsupportedCase as reason:
            return f"unavailable: {reason}"
        errors = ", ".join(f"{name} {ulp:.2f}" for name, ulp in found.ulps.items() if ulp is not None)
        return f"ULP against float64: {errors}" + (f" ({found.reason})" if found.reason else "")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return mimebundle(self.frame(*self.start), lambda: png(self._figure(*self.start)), self._live, self._page)

    def _page(self) -> str:
        tree: dict[str, Any] = {}
        for op, dtype, backend in self._recorded():
            tree.setdefault(op, {}).setdefault(dtype, {})[backend] = self.frame(op, dtype, backend)
        return page(self.frame(*self.start), LABELS, tree)

    def _recorded(self) -> Iterator[tuple[str, str, str]]:
        kept = set(plain(row["backend"] for row in self.run.rows))
        found = dict.fromkeys((r["op"], r["dtype"], r["backend"]) for r in self.run.rows if r["backend"] in kept)
        yield from sorted(found, key=lambda each: (each[0] != self.start[0], each[2] != self.start[2]))

    def _live(self) -> Any:
        import ipywidgets as W

        return _Live(self, W).box


class _Live:
    """The widgets of one Explore."""

    def __init__(self, explore: Explore, W: Any) -> None:
        op, dtype, backend = explore.start
        self.explore, self.W, self.busy = explore, W, False
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        # What was measured here, by op, dtype and backend: it stays in the plot beside what is chosen next.
        self.measured: dict[tuple[str, str, str], list[Point]] = {}
        self.op = W.Dropdown(options=explore.ops, value=op, description=LABELS[0])
        self.case = W.Dropdown(options=self._cases(), description="Case")
        self.dtype = W.Dropdown(options=list(DTYPES), value=dtype, description=LABELS[1])
        self.backend = W.Dropdown(options=BACKENDS, value=backend, description=LABELS[2])
        self.sizes = W.HBox(layout=W.Layout(flex_flow="row wrap"))
        self.check = W.Button(description="Check error")
        self.run = W.Button(description="Run", disabled=explore.measure is None)
        self.cancel = W.Button(description="Cancel", disabled=True)
        self.show = W.Button(description="Show code")
        self.progress = W.IntProgress(max=ROUNDS, layout=W.Layout(visibility="hidden"))
        self.said, self.drawn, self.code = W.HTML(), W.HTML(), W.HTML()
        if explore.measure is None:
            self.run.tooltip = "measuring needs a GPU"
            self.said.value = "No GPU here: costs, floors and small errors, no times."
        self.op.observe(self._new_op, "value")
        self.case.observe(self._new_case, "value")
        for control in (self.dtype, self.backend):
            control.observe(self._redraw, "value")
        self.check.on_click(self._check)
        self.run.on_click(self._run)
        self.cancel.on_click(lambda _: self.stop.set())
        self.show.on_click(self._show)
        self._new_case()
        row = W.Layout(flex_flow="row wrap")
        controls = W.HBox([self.op, self.case, self.dtype, self.backend], layout=row)
        buttons = W.HBox([self.check, self.run, self.cancel, self.show, self.progress], layout=row)
        self.box = W.VBox(
            [controls, self.sizes, buttons, self.said, self.drawn, self.code], layout=W.Layout(align_items="flex-start")
        )

    @property
    def dims(self) -> dict[str, int]:
        """The sizes as they stand in their boxes."""
        return {box.description: box.value for box in self.sizes.children}

    def _cases(self) -> list[tuple[str, Case]]:
        return [(case.name, case) for case in ops()[self.op.value].cases]

    def _new_op(self, _: Any = None) -> None:
        self.case.options = self._cases()
        self._new_case()

    def _new_case(self, _: Any = None) -> None:
        boxes = [
            self.W.IntText(value=v, description=axis, layout=self.W.Layout(width="12em"))
            for axis, v in self.case.value.dims.items()
        ]
        for box in boxes:
            box.observe(self._redraw, "value")
        self.sizes.children = boxes
        self._redraw()

    def _point(self) -> Point:
        return self.explore.cost(self.op.value, self.dims, self.dtype.value)

    def _redraw(self, _: Any = None) -> None:
        what = (self.op.value, self.dtype.value, self.backend.value)
        try:
            now, done = self._point(), self.measured.get(what, [])
            here = any((p.bytes_moved, p.flops) == (now.bytes_moved, now.flops) for p in done)
            self.drawn.value = body(self.explore.frame(*what, (*(() if here else (now,)), *done)))
        except (ValueError, ArithmeticError) as error:
            self.said.value = f"{_NO_CALL}{error}"
        else:
            if self.said.value.startswith(_NO_CALL):
                self.said.value = ""

    def _check(self, _: Any) -> None:
        self.said.value = self.explore.error(self.op.value, self.dims, self.dtype.value, self.backend.value)

    def _show(self, _: Any) -> None:
        self.show.disabled, self.code.value = True, "compiling, in seconds for Triton and tens of them for TileLang …"
        what = (self.op.value, self.dims, self.dtype.value, self.backend.value)
        self.thread = threading.Thread(target=self._generate, args=what, daemon=True)
        self.thread.start()

    def _generate(self, op: str, dims: Dims, dtype: str, backend: str) -> None:
        try:
            self.code.value = as_html(self.explore.code(op, dims, dtype, backend))
        except Exception as error:  # shown where the reader looks, since a thread's traceback is not
            self.code.value = f"no code to show: {html.escape(str(error))}"
        finally:
            self.show.disabled = False

    def _run(self, _: Any) -> None:
        self.stop.clear()
        self.run.disabled, self.cancel.disabled = True, False
        self.progress.value, self.progress.layout.visibility = 0, "visible"
        what = (ops()[self.op.value], Case("chosen", self.dims), self.dtype.value, self.backend.value)
        self.thread = threading.Thread(target=self._measure, args=what, daemon=True)
        self.thread.start()

    def _measure(self, op: Op, case: Case, dtype: str, backend: str) -> None:
        measure, least, times = self.explore.measure, self.explore.cost(op.name, case.dims, dtype), []
        assert measure is not None
        try:
            for done in range(ROUNDS):
                if self.stop.is_set():
                    self.said.value = f"cancelled after {done} of {ROUNDS} rounds"
                    break
                row = measure(op, case, dtype, backend)
                if row["status"] != "ok":
                    self.said.value = f"{row['status']}: {row['reason']}"
                    break
                times += row["fwd"]["dev_us"]
                self.progress.value = done + 1
                self.said.value = (
                    f"forward {min(times):.2f} µs on the device, {least.floor_us or 0:.2f} µs at the floor"
                )
            if times:
                name = f"here, {', '.join(f'{axis} {size}' for axis, size in case.dims.items())}"
                now = Point(name, least.bytes_moved, least.flops, least.floor_us, min(times))
                kept = self.measured.setdefault((op.name, dtype, backend), [])
                kept[:] = [*(other for other in kept if other.case != name), now]
                self._redraw()
        except Exception as error:  # shown where the reader looks, since a thread's traceback is not
            self.said.value = f"failed: {type(error).__name__}: {error}"
        finally:
            self.run.disabled, self.cancel.disabled = False, True
            self.progress.layout.visibility = "hidden"


def _measure_here(op: Op, case: Case, dtype: str, backend: str) -> Row:
    bench = make_bench(None, Plan(windows=1, calls=20, rounds=5, extra=0))
    return measure_case(bench, op, case, dtype, (backend,))[0]
