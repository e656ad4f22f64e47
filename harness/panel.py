"""A figure of recorded runs with controls: live in Jupyter, a plain image elsewhere, self-contained HTML in a report.

One object serves all three, so a notebook's cell ends in `Panel(...)` and no more:

- with a kernel, each control redraws the figure and the table of exact numbers beneath it;
- in a viewer without one, the image of the default choice shows, with a description as its alternative text;
- with HARNESS_PANEL_FRAMES set (an export), every combination of the controls, drawn ahead, and a few lines of script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness import stamp
from harness.figure import METRICS, Metric, draw, ordered, plain
from harness.markup import Frame, body, mimebundle, page, png, svg
from harness.readings import Readings, describe, readings, table, words
from harness.record import Record, Row
from kernels.registry import ops as all_ops

# Controls in the order in which a choice narrows the ones after it.
LEVELS = {
    "run": "Recorded run",
    "metric": "Metric",
    "op": "Operation",
    "dtype": "dtype",
    "cases": "Cases",
    "clock": "Time",
    "scale": "Axis",
}
ALL = "all"
# A report carries every combination as a figure. Past MAX_FRAMES, the options of a control after its first are drawn
# only where the controls named with it stand at theirs; in this order, until they fit. So no option is ever lost.
MAX_FRAMES = 48
THINNING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("scale", ("cases",)),
    ("clock", ("cases",)),
    ("scale", ("cases", "clock")),
    ("cases", ("clock", "scale", "dtype")),
    ("scale", ("cases", "clock", "dtype")),
    ("clock", ("cases", "scale", "dtype")),
)

Choice = dict[str, str]


class Panel:
    """Figures of one or more recorded runs, chosen by controls.

    Args:
        runs: one recorded run, or several by the label under which a reader chooses them.
        metric: a name of `METRICS`, or several to choose from; all of them by default.
        ops: the ops to choose from, in this order; those of the runs by default.
        **start: the first choice of any control, for example `op="lora_bypass"`, `scale="log"`.

    Raises:
        ValueError: no row to draw, or an unknown metric, op or control.
    """

    def __init__(
        self,
        runs: Record | Mapping[str, Record],
        metric: str | Sequence[str] | None = None,
        *,
        ops: Sequence[str] | None = None,
        **start: str,
    ) -> None:
        self.runs = {run_label(runs): runs} if isinstance(runs, Record) else dict(runs)
        self.metrics = [metric] if isinstance(metric, str) else list(metric or METRICS)
        unknown = [name for name in self.metrics if name not in METRICS] + [
            name for name in start if name not in LEVELS
        ]
        if unknown:
            raise ValueError(
                f"Panel: got {unknown[0]!r}, wanted a metric or a control: {', '.join([*METRICS, *LEVELS])}"
            )
        self.ops = list(ops) if ops is not None else None
        self.start = start
        self._drawn: dict[tuple[str, ...], Frame] = {}
        if not any(self._rows(label) for label in self.runs):
            raise ValueError("Panel: nothing recorded to draw")

    def options(self, level: str, chosen: Choice) -> list[str]:
        """What a control offers, given the choices of the controls before it."""
        if level == "run":
            return [label for label in self.runs if self._rows(label)]
        if level == "metric":
            return self.metrics
        rows = self._rows(chosen["run"])
        if level == "op":
            found = list(dict.fromkeys(row["op"] for row in rows))
            return [op for op in self.ops if op in found] if self.ops else found
        rows = [row for row in rows if row["op"] == chosen["op"]]
        if level == "dtype":
            return list(dict.fromkeys(row["dtype"] for row in rows))
        if level == "cases":
            return [ALL, *_groups(list(dict.fromkeys(row["case"] for row in rows)))]
        if level == "clock":
            return ["device", "wall"] if METRICS[chosen["metric"]].faint_name == "wall" else ["device"]
        return ["log", "linear"] if METRICS[chosen["metric"]].log else ["linear", "log"]

    def complete(self, wanted: Mapping[str, str]) -> Choice:
        """A choice of every control: the wanted one where it is on offer, else the first."""
        chosen: Choice = {}
        for level in LEVELS:
            offered = self.options(level, chosen)
            chosen[level] = wanted[level] if wanted.get(level) in offered else offered[0]
        return chosen

    def frame(self, wanted: Mapping[str, str] | None = None, arms: Sequence[str] | None = None) -> Frame:
        """The figure of one choice, drawn once; `arms` are the backends to show, without the graphed ones by default."""
        chosen = self.complete(self.start if wanted is None else wanted)
        some = plain(self.backends(chosen)) if arms is None else arms
        key = (*chosen.values(), *some)
        if key not in self._drawn:
            metric, rows, shown, numbers = self._content(chosen, some)
            image = svg(self._figure(chosen, some), words(metric, shown, numbers))
            alt = describe(metric, shown, numbers, chosen["run"])
            self._drawn[key] = Frame(image, alt, table(metric, shown, numbers))
        return self._drawn[key]

    def still(self) -> str:
        """The figure of the first choice as base64 of a PNG."""
        chosen = self.complete(self.start)
        return png(self._figure(chosen, plain(self.backends(chosen))))

    def backends(self, chosen: Choice) -> list[str]:
        """The arms that the chosen rows hold."""
        return ordered(row["backend"] for row in self._chosen_rows(chosen))

    def combinations(self) -> list[Choice]:
        """Every choice that an export carries: all of them, or what THINNING leaves where they pass MAX_FRAMES."""
        found = list(self._expand({}))
        for level, others in THINNING:
            if len(found) <= MAX_FRAMES:
                break
            found = [
                chosen for chosen in found if self._first(chosen, level) or all(self._first(chosen, o) for o in others)
            ]
        return found

    def _first(self, chosen: Choice, level: str) -> bool:
        """Whether a control stands at the option that it starts with."""
        return chosen[level] == self._offered(level, chosen)[0]

    def _offered(self, level: str, chosen: Choice) -> list[str]:
        """A control's options, the one that it starts with first."""
        first = self.start.get(level)
        return sorted(self.options(level, chosen), key=lambda option: option != first)

    def _expand(self, chosen: Choice) -> Iterator[Choice]:
        if len(chosen) == len(LEVELS):
            yield chosen
            return
        level = list(LEVELS)[len(chosen)]
        for option in self._offered(level, chosen):
            yield from self._expand({**chosen, level: option})

    def _rows(self, label: str) -> list[Row]:
        return [row for row in self.runs[label].rows if self.ops is None or row["op"] in self.ops]

    def _chosen_rows(self, chosen: Choice) -> list[Row]:
        return [
            row
            for row in self._rows(chosen["run"])
            if row["op"] == chosen["op"]
            and row["dtype"] == chosen["dtype"]
            and (chosen["cases"] == ALL or chosen["cases"] in _parts(row["case"]))
        ]

    def _content(self, chosen: Choice, arms: Sequence[str]) -> tuple[Metric, list[Row], list[Row], Readings]:
        """The metric, the chosen rows, those of `arms`, and their numbers, for which the other arms may be needed."""
        metric, rows = variant(chosen), self._chosen_rows(chosen)
        return metric, rows, [row for row in rows if row["backend"] in arms], readings(metric, rows)

    def _figure(self, chosen: Choice, arms: Sequence[str]) -> Any:
        rows, meta = self._chosen_rows(chosen), self.runs[chosen["run"]].meta
        if chosen["op"] in all_ops():
            meta = stamp.of_family(meta, all_ops()[chosen["op"]].family)
        what: dict[str, Any] = {"op": chosen["op"], "dtype": chosen["dtype"], "backends": arms, "meta": meta}
        return draw(variant(chosen), rows, meta.get("ceilings"), **what)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return mimebundle(self.frame(), self.still, self._live, self.html)

    def _live(self) -> Any:
        """The controls over the figure and its table; each redraws both, and narrows the controls after it."""
        import ipywidgets as W

        chosen = self.complete(self.start)
        arms = self.backends(chosen)
        style = {"description_width": "initial"}
        controls = {
            level: W.Dropdown(options=self.options(level, chosen), value=value, description=LEVELS[level], style=style)
            for level, value in chosen.items()
        }
        pick = W.SelectMultiple(
            options=arms, value=plain(arms), description="Backends", rows=min(len(arms), 7), style=style
        )
        drawn = W.HTML()
        busy = False

        def redraw(_: Any = None) -> None:
            nonlocal busy
            if busy:  # a control that this very redraw adjusted
                return
            busy = True
            try:
                now = self.complete({level: control.value for level, control in controls.items()})
                for level, control in controls.items():
                    offered = self.options(level, now)
                    if list(control.options) != offered:
                        control.options = offered
                    control.value = now[level]
                    control.layout.display = "" if len(offered) > 1 else "none"
                found = self.backends(now)
                if list(pick.options) != found:
                    pick.options, pick.value = found, plain(found)
                drawn.value = body(self.frame(now, pick.value or None))
            finally:
                busy = False

        for control in (*controls.values(), pick):
            control.layout.width = "auto"
            control.observe(redraw, "value")
        redraw()
        bar = W.HBox([*controls.values(), pick], layout=W.Layout(flex_flow="row wrap"))
        return W.VBox([bar, drawn], layout=W.Layout(align_items="flex-start"))

    def html(self) -> str:
        """Every combination with its controls, as HTML that needs neither a kernel nor a network."""
        tree: dict[str, Any] = {}
        for chosen in self.combinations():
            *path, last = chosen.values()
            node = tree
            for value in path:
                node = node.setdefault(value, {})
            node[last] = self.frame(chosen, self.backends(chosen))
        everything = {row["backend"] for label in self.runs for row in self._rows(label)}
        return page(self.frame(), list(LEVELS.values()), tree, sorted(everything - set(plain(everything))))


def run_label(run: Record) -> str:
    """How a recorded run is named in a control: its card and day."""
    return f"{run.meta.get('gpu') or 'CPU'}, {str(run.meta.get('started'))[:10]}"


def variant(chosen: Choice) -> Metric:
    """The metric of a choice, with the wall in place of device time and the axis as chosen."""
    metric = replace(METRICS[chosen["metric"]], log=chosen["scale"] == "log")
    if chosen["clock"] == "device":
        return metric
    return replace(
        metric, bold=metric.faint, faint=metric.bold, bold_name=metric.faint_name, faint_name=metric.bold_name
    )


def _parts(case: str) -> tuple[str, str]:
    """A case's name is its shape and its last axis: ("dit_qkv", "r16") of "dit_qkv_r16"."""
    shape, _, last = case.rpartition("_")
    return shape, last


def _groups(cases: Sequence[str]) -> list[str]:
    """What several cases, but not all, have in common: a shape, or a value of the last axis."""
    names = [part for place in (1, 0) for part in dict.fromkeys(_parts(case)[place] for case in cases)]
    return [name for name in names if 1 < sum(name in _parts(case) for case in cases) < len(cases)]
