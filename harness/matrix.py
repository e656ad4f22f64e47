"""The same op on every recorded card: one table and one figure across data/<gpu>."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import record, stamp
from harness.figure import COLOURS, GRAPHED, MARKERS, STYLE
from harness.markup import Frame, body, mimebundle, page, png, svg
from harness.statistic import Ratio
from harness.verdicts import RATIOS, Verdict, verdicts

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

WIDTH = 3.5  # inches: half a page
CAPTION: dict[str, Any] = {"fontsize": 5.5, "color": "#555555", "x": 0.02, "ha": "left"}
LABELS = ("Ratio", "dtype")


def cards(folders: Sequence[str | Path] | None = None) -> dict[str, Path]:
    """{card: folder} of recorded runs, data/'s by default; a card measured by itself also shows its folder's name."""
    found: dict[str, Path] = {}
    for folder in map(Path, folders) if folders is not None else stamp.recorded_dirs():
        gpu = str(next(iter(record.load_dir(folder).values())).meta["gpu"])
        found[gpu if gpu not in found and folder.name == stamp.slug(gpu) else f"{gpu} ({folder.name})"] = folder
    return found


def matrix(
    metric: str = "fbdev_eager", dtype: str = "fp16", folders: Sequence[str | Path] | None = None
) -> pandas.DataFrame:
    """Rows (op, backend), a column per card: the verdict's geometric mean, above 1 where the backend is better.

    metric: one of verdicts.RATIOS, "vram", "ulp" or "eager_ulp". NaN where a card has no record of the op.
    """
    import pandas

    made = _made(dtype, folders)
    known = (*RATIOS, "vram", "ulp", "eager_ulp")
    if metric not in known:
        raise ValueError(f"metric: got {metric!r}, wanted one of {', '.join(known)}")
    columns = {card: {_key(v): v.values[metric] for v in found} for card, found in made.items()}
    keys = list(dict.fromkeys(key for column in columns.values() for key in column))
    index = pandas.MultiIndex.from_tuples(keys, names=["op", "backend"])
    cells = {card: [column.get(key) for key in keys] for card, column in columns.items()}
    return pandas.DataFrame(cells, index=index, dtype=float)


def draw_matrix(
    metric: str = "fbdev_eager", dtype: str = "fp16", folders: Sequence[str | Path] | None = None
) -> Figure:
    """A panel per op: a row per card, a mark per backend with its interval; to the right of 1 the backend is better.

    Graphed arms are left out.
    """
    if metric not in RATIOS:
        raise ValueError(f"metric: got {metric!r}, wanted one of {', '.join(RATIOS)}")
    return _figure(_plain(_made(dtype, folders)), metric, dtype)


class Matrix:
    """The same op on every recorded card: a figure and its numbers, by ratio and dtype.

    Args:
        metric: the ratio that shows first, one of verdicts.RATIOS; dtype: the same of the dtypes.
        folders: recorded runs, data/'s by default.

    Raises:
        ValueError: an unknown ratio, or no row of that dtype; FileNotFoundError: nothing recorded.
    """

    def __init__(
        self, metric: str = "fbdev_eager", dtype: str = "fp16", folders: Sequence[str | Path] | None = None
    ) -> None:
        self.made = {name: _plain(_made(name, folders)) for name in stamp.DTYPES}
        self.dtypes = [name for name, made in self.made.items() if any(made.values())]
        if metric not in RATIOS or dtype not in self.dtypes:
            wanted = f"one of {', '.join(RATIOS)}, and of {', '.join(self.dtypes)}"
            raise ValueError(f"Matrix: got {metric!r}, {dtype!r}, wanted {wanted}")
        self.start = (metric, dtype)

    def frame(self, metric: str, dtype: str) -> Frame:
        """The figure of one ratio and dtype, in words too, and its numbers with their intervals."""
        made = {card: found for card, found in self.made[dtype].items() if found}
        whole = f"{len(made)} cards: {', '.join(made)}" if len(made) > 1 else f"one recorded card, {next(iter(made))}"
        each = "; ".join(
            f"{v.values['op']} {v.values['backend']} {_number(v.ratios[metric])} on {card}"
            for card, found in made.items()
            for v in found
        )
        alt = f"{metric.replace('_', ' against ')}, {dtype}, on {whole}. {each}."
        return Frame(svg(_figure(made, metric, dtype)), alt, _table(made, metric, dtype))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        metric, dtype = self.start
        made = {card: found for card, found in self.made[dtype].items() if found}
        return mimebundle(self.frame(*self.start), lambda: png(_figure(made, metric, dtype)), self._live, self._page)

    def _page(self) -> str:
        order = sorted(RATIOS, key=lambda name: name != self.start[0])
        kinds = sorted(self.dtypes, key=lambda name: name != self.start[1])
        tree = {metric: {dtype: self.frame(metric, dtype) for dtype in kinds} for metric in order}
        return page(self.frame(*self.start), LABELS, tree)

    def _live(self) -> Any:
        import ipywidgets as W

        drawn = W.HTML()
        chosen = [
            W.Dropdown(options=list(options), value=value, description=label, style={"description_width": "initial"})
            for options, value, label in zip((RATIOS, self.dtypes), self.start, LABELS, strict=True)
        ]

        def redraw(_: Any = None) -> None:
            drawn.value = body(self.frame(*(control.value for control in chosen)))

        for control in chosen:
            control.layout.width = "auto"
            control.observe(redraw, "value")
        redraw()
        bar = W.HBox(chosen, layout=W.Layout(flex_flow="row wrap"))
        return W.VBox([bar, drawn], layout=W.Layout(align_items="flex-start"))


def _figure(made: Mapping[str, Sequence[Verdict]], metric: str, dtype: str) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ops = list(dict.fromkeys(v.values["op"] for found in made.values() for v in found))
    names = list(made)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.7 + len(ops) * (0.3 + 0.22 * len(names))), layout="constrained")
        axes = figure.subplots(max(1, len(ops)), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axis, op in zip(axes, ops, strict=False):
            for y, card in enumerate(names):
                _draw(axis, y, {v.values["backend"]: v.ratios[metric] for v in made[card] if v.values["op"] == op})
            axis.axvline(1, color="#777777", lw=0.8)
            axis.set_xscale("log")
            axis.set_title(op, loc="left", pad=2)
            axis.set_yticks(range(len(names)), ["\n".join(textwrap.wrap(name, 22)) for name in names])
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(axis="x", lw=0.3, alpha=0.5)
        axes[-1].set_xlabel("×")
        backends = dict.fromkeys(v.values["backend"] for found in made.values() for v in found)
        handles = [_handle(backend) for backend in backends]
        figure.legend(handles=handles, loc="outside upper center", ncols=max(1, len(handles)), frameon=False)
        figure.supxlabel(f"{metric.replace('_', ' / ')}, {dtype}. Geometric means with 95 % intervals.", **CAPTION)
    return figure


def _made(dtype: str, folders: Sequence[str | Path] | None) -> dict[str, list[Verdict]]:
    found = cards(folders)
    if not found:
        raise FileNotFoundError("there is no recorded run under data/: sweep makes one on a GPU")
    return {card: verdicts(folder, dtype) for card, folder in found.items()}


def _plain(made: Mapping[str, Sequence[Verdict]]) -> dict[str, list[Verdict]]:
    return {card: [v for v in found if not v.values["backend"].endswith(GRAPHED)] for card, found in made.items()}


def _number(ratio: Ratio | None) -> str:
    return "not measured" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f}–{ratio.high:.2f}]"


def _table(made: Mapping[str, Sequence[Verdict]], metric: str, dtype: str) -> str:
    """A row an op and backend, a column a card; a dash where the card has no record of it."""
    cells = {card: {_key(v): v.ratios[metric] for v in found} for card, found in made.items()}
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in ("op", "backend", *cells))
    lines = []
    for op, backend in dict.fromkeys(key for column in cells.values() for key in column):
        numbers = "".join(
            f"<td>{_number(column[op, backend]) if (op, backend) in column else '–'}</td>" for column in cells.values()
        )
        lines.append(f"<tr><th scope=row>{html.escape(op)}</th><th scope=row>{html.escape(backend)}</th>{numbers}</tr>")
    caption = f"{metric.replace('_', ' / ')}, {dtype}, ×; in brackets the 95 % interval"
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _key(verdict: Verdict) -> tuple[str, str]:
    return verdict.values["op"], verdict.values["backend"]


def _draw(axis: Any, y: int, ratios: Mapping[str, Ratio | None]) -> None:
    for at, (backend, ratio) in enumerate(ratios.items()):
        if ratio is not None:
            height = y + 0.2 * (at - (len(ratios) - 1) / 2)
            colour = COLOURS.get(backend, "#333333")
            axis.plot([ratio.low, ratio.high], [height, height], color=colour, lw=1)
            axis.plot([ratio.value], [height], MARKERS.get(backend, "o"), color=colour, ms=4)


def _handle(backend: str) -> Any:
    from matplotlib.lines import Line2D

    colour = COLOURS.get(backend, "#333333")
    return Line2D([], [], color=colour, marker=MARKERS.get(backend, "o"), ls="none", ms=4, label=backend)
