"""The same op on every recorded card: one table and one figure across data/<gpu>."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import record, stamp
from harness.figure import COLOURS, MARKERS, STYLE
from harness.statistic import Ratio
from harness.verdicts import RATIOS, Verdict, verdicts

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

WIDTH = 7.0


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
    """A panel per op: a row per card, a mark per backend with its interval; to the right of 1 the backend is better."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if metric not in RATIOS:
        raise ValueError(f"metric: got {metric!r}, wanted one of {', '.join(RATIOS)}")
    made = _made(dtype, folders)
    ops = list(dict.fromkeys(v.values["op"] for found in made.values() for v in found))
    names = list(made)
    with matplotlib.rc_context(STYLE):
        rows = max(1, -(-len(ops) // 2))
        figure = Figure(figsize=(WIDTH, 0.7 + rows * (0.6 + 0.3 * len(names))), layout="constrained")
        axes = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat
        for axis, op in zip(axes, ops, strict=False):
            for y, card in enumerate(names):
                _draw(axis, y, {v.values["backend"]: v.ratios[metric] for v in made[card] if v.values["op"] == op})
            axis.axvline(1, color="#777777", lw=0.8)
            axis.set(xscale="log", title=op)
            axis.set_yticks(range(len(names)), names)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(axis="x", lw=0.3, alpha=0.5)
        for axis in list(axes)[len(ops) :]:
            axis.set_visible(False)
        backends = dict.fromkeys(v.values["backend"] for found in made.values() for v in found)
        handles = [_handle(backend) for backend in backends]
        figure.legend(handles=handles, loc="outside upper center", ncols=max(1, len(handles)), frameon=False)
        figure.supxlabel(f"{metric.replace('_', ' / ')}, {dtype}, × with 95 % intervals", fontsize=7)
    return figure


def _made(dtype: str, folders: Sequence[str | Path] | None) -> dict[str, list[Verdict]]:
    found = cards(folders)
    if not found:
        raise FileNotFoundError("there is no recorded run under data/: sweep makes one on a GPU")
    return {card: verdicts(folder, dtype) for card, folder in found.items()}


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
