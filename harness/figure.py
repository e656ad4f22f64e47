"""The panels of a recorded run: one row of points per case, bold for device time, faint for the wall.

Everything is drawn from rows, so a figure needs no GPU, and the same rows give the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import ceilings as limits
from harness import record, stamp, verdicts
from harness.record import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, without the vermilion that crimson ceilings could be taken for; a graphed arm has a lighter one.
COLOURS = {
    "eager": "#000000",
    "compile": "#E69F00",
    "triton": "#0072B2",
    "tilelang": "#009E73",
    "eager_graphed": "#8C8C8C",
    "compile_graphed": "#F0C869",
    "triton_graphed": "#56B4E9",
    "tilelang_graphed": "#7CCBA2",
}
MARKERS = {"eager": "s", "compile": "D", "triton": "o", "tilelang": "^"}
# An arm replayed from a CUDA graph: shown beside the plain ones when asked for, and hollow and dashed.
GRAPHED = "_graphed"
OTHER = "#CC79A7"
CEILING = "crimson"
WIDTH = 3.5  # inches: half a page, so that what is legible here is legible there
CAPTION = 74  # characters of a caption's line, which fit WIDTH
DODGE = 0.16  # of a case's height between two arms, so that equal values show side by side
STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "harness",
    "svg.fonttype": "path",
}
Value = Callable[[Row, Mapping[str, Row]], float | None]


@dataclass(frozen=True)
class Metric:
    """One panel: the bold and the faint value of a row (with the case's other arms beside it), and its ceiling."""

    title: str
    unit: str
    bold: Value
    faint: Value
    faint_name: str
    bold_name: str = "device time"
    ceiling: Value | None = None
    ceiling_name: str = ""
    log: bool = True
    # The phase of a ratio of eager's time to the row's own, whose interval is bootstrapped over both sides' samples.
    ratio: str = ""

    @property
    def timed(self) -> bool:
        """Whether its values come from windows or rounds."""
        return "wall" in (self.faint_name, self.bold_name)

    @property
    def samples(self) -> str:
        """Which of a row's samples its bold values come from."""
        return "wall_us" if self.bold_name == "wall" else "dev_us"


def _best(phase: str, kind: str) -> Value:
    return lambda row, arms: min(row[phase][kind]) if row[phase] and row[phase][kind] else None


def _floor(phase: str) -> Value:
    return lambda row, arms: row["floor_us"] if phase == "fwd" else (row["fwdbwd"] or {}).get("floor_us")


def _over(top: Value, bottom: Value) -> Value:
    def ratio(row: Row, arms: Mapping[str, Row]) -> float | None:
        high, low = top(row, arms), bottom(row, arms)
        return high / low if high is not None and low else None

    return ratio


def _eager(value: Value) -> Value:
    """Of the eager arm that the row's arm is compared with."""

    def of_eager(row: Row, arms: Mapping[str, Row]) -> float | None:
        eager = arms.get(verdicts.baselines(row["backend"])["eager"])
        return value(eager, arms) if eager is not None and eager["status"] == "ok" else None

    return of_eager


def _kilobytes(row: Row, arms: Mapping[str, Row]) -> float | None:
    return None if row["bytes_read"] is None else (row["bytes_read"] + row["bytes_written"]) / 1e3


def _mib(key: str) -> Value:
    return lambda row, arms: row[key] / 2**20 if row[key] else None


_DEVICE, _WALL = _best("fwd", "dev_us"), _best("fwd", "wall_us")
METRICS: dict[str, Metric] = {
    "forward": Metric("forward latency", "µs", _DEVICE, _WALL, "wall", ceiling=_floor("fwd"), ceiling_name="floor"),
    "fwdbwd": Metric(
        "forward + backward latency",
        "µs",
        _best("fwdbwd", "dev_us"),
        _best("fwdbwd", "wall_us"),
        "wall",
        ceiling=_floor("fwdbwd"),
        ceiling_name="floor",
    ),
    "bandwidth": Metric(
        "forward bandwidth",
        "GB/s",
        _over(_kilobytes, _DEVICE),
        _over(_kilobytes, _WALL),
        "wall",
        ceiling=_over(_kilobytes, _floor("fwd")),
        ceiling_name="ceiling of the row's mix",
        log=False,
    ),
    "speedup": Metric(
        "forward speedup against eager",
        "×",
        _over(_eager(_DEVICE), _DEVICE),
        _over(_eager(_WALL), _WALL),
        "wall",
        ceiling=_over(_eager(_DEVICE), _floor("fwd")),
        ceiling_name="at the floor",
        ratio="fwd",
    ),
    "memory": Metric("peak memory", "MiB", _mib("vram_fwdbwd"), _mib("vram_fwd"), "forward alone", "with backward"),
    "ulp": Metric(
        "error against float64",
        "ULP",
        lambda row, arms: row["ulp"],
        lambda row, arms: row["ulp_out"],
        "output alone",
        "worst of output and gradients",
    ),
}


def colour(arm: str) -> str:
    """An arm's colour; one for all arms that this module does not know."""
    return COLOURS.get(arm, OTHER)


def marker(arm: str) -> str:
    """An arm's marker, its plain arm's where it is graphed."""
    return MARKERS.get(arm.removesuffix(GRAPHED), "v")


def look(arm: str) -> dict[str, Any]:
    """An arm's line and marker as matplotlib's keywords."""
    graphed = arm.endswith(GRAPHED)
    return {
        "color": colour(arm),
        "lw": 1.6,
        "ls": (0, (3, 1)) if graphed else "-",
        "marker": marker(arm),
        "ms": 3.5,
        "mfc": "white" if graphed else colour(arm),
        "mec": colour(arm) if graphed else "white",
        "mew": 0.8 if graphed else 0.4,
    }


def ordered(arms: Iterable[str]) -> list[str]:
    """Arms as figures and controls list them: the known ones in their order, then any others."""
    found = set(arms)
    return [arm for arm in COLOURS if arm in found] + sorted(found - COLOURS.keys())


def plain(arms: Iterable[str]) -> list[str]:
    """The arms that show unless others are asked for: without the graphed ones, which would crowd a figure."""
    known = ordered(arms)
    return [arm for arm in known if not arm.endswith(GRAPHED)] or known


def draw(
    metric: str | Metric,
    rows: Sequence[Row],
    ceilings: limits.Ceilings | None = None,
    *,
    op: str | None = None,
    dtype: str = "fp16",
    backends: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Figure:
    """One panel as a matplotlib figure.

    Args:
        metric: a key of METRICS, or a variant of one of its values.
        rows: a record's rows.
        ceilings: the record's `meta["ceilings"]`; adds the copy bandwidth to the bandwidth panel.
        op: only this op; None stacks every op of the rows.
        dtype: which rows.
        backends: which arms; all but the graphed ones by default.
        meta: the record's meta, for the card and the date in the caption.
    """
    import matplotlib
    from matplotlib.figure import Figure

    if isinstance(metric, str):
        if metric not in METRICS:
            raise ValueError(f"metric: got {metric!r}, wanted one of {', '.join(METRICS)}")
        metric = METRICS[metric]
    chosen = [row for row in rows if row["dtype"] == dtype and op in (None, row["op"])]
    if not chosen:
        raise ValueError(f"no rows of op {op}, dtype {dtype}")
    names = list(dict.fromkeys(row["op"] for row in chosen))
    counts = [len({row["case"] for row in chosen if row["op"] == name}) for name in names]
    found = ordered(row["backend"] for row in chosen)
    arms = plain(found) if backends is None else [arm for arm in found if arm in backends]
    with matplotlib.rc_context(STYLE):
        height = 1.0 + sum(0.45 + 0.15 * max(count, 3) for count in counts)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(len(names), 1, squeeze=False, height_ratios=[max(count, 3) + 2 for count in counts])
        for axis, name in zip(axes[:, 0], names, strict=True):
            _panel(axis, metric, [row for row in chosen if row["op"] == name], arms)
            if metric.unit == "GB/s" and ceilings:
                copy = ceilings["copy_gbps"]
                axis.axvline(copy, color=CEILING, lw=0.6, ls=":")
                axis.set_xlim(right=max(axis.get_xlim()[1], 1.04 * copy))
                # At the top, where the small cases are far from it.
                where = {"transform": axis.get_xaxis_transform(), "rotation": 90, "va": "top", "ha": "right"}
                axis.text(copy, 0.98, f"copy {copy:.0f}", color=CEILING, fontsize=6, **where)
            axis.set_title(f"{name}: {metric.title}", loc="left")
        legend = figure.legend(handles=_handles(metric, arms), loc="outside upper center", ncols=3, frameon=False)
        for arm, handle, text in zip(arms, legend.legend_handles, legend.get_texts(), strict=False):
            for part in (handle, text):
                if part is not None:
                    part.set_gid(f"arm:{arm}:legend")
        figure.supxlabel(_caption(metric, meta, dtype), fontsize=5.5, color="#555555", x=0.02, ha="left")
    return figure


def _panel(axis: Axes, metric: Metric, rows: Sequence[Row], arms: Sequence[str]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    table: dict[str, dict[str, Row]] = {case: {} for case in cases}
    for row in rows:
        table[row["case"]][row["backend"]] = row
    for place, arm in enumerate(arms):
        bold, faint = ([_value(value, table[case], arm) for case in cases] for value in (metric.bold, metric.faint))
        aside = min(DODGE, 0.8 / len(arms)) * (place - (len(arms) - 1) / 2)
        at = [y + aside for y in range(len(cases))]
        dots: dict[str, Any] = {"marker": marker(arm), "ms": 1.5} if len(cases) < 3 else {}
        # By these names a page switches an arm off and a point tells its number.
        axis.plot(faint, at, color=colour(arm), lw=0.7, alpha=0.35, gid=f"arm:{arm}:faint", **dots)
        axis.plot(bold, at, gid=f"arm:{arm}:bold", **look(arm))
    for y, case in enumerate(cases):
        bad = [f"{arm}: {row['status']}" for arm, row in table[case].items() if arm in arms and row["status"] != "ok"]
        if bad:
            axis.text(0.01, y, ", ".join(bad), transform=axis.get_yaxis_transform(), va="center", fontsize=5)
        if any(row["l2_resident"] for row in table[case].values()):
            axis.axhspan(y - 0.5, y + 0.5, color="#000000", alpha=0.07, lw=0)
    if metric.ceiling is not None:
        limits_of = [[metric.ceiling(row, table[case]) for row in table[case].values()] for case in cases]
        limit = [next((value for value in values if value), float("nan")) for values in limits_of]
        axis.plot(limit, range(len(cases)), color=CEILING, lw=1.1, ls="--", zorder=1)
    if metric.unit == "×":
        axis.axvline(1, color="#777777", lw=0.7)
    if metric.log:
        _log_axis(axis)
    else:
        axis.set_xlim(left=0)
    axis.set_yticks(range(len(cases)), cases)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlabel(metric.unit)
    axis.grid(axis="x", lw=0.3, alpha=0.5)


def _log_axis(axis: Axes) -> None:
    """A logarithmic axis labelled 1, 10, 100, or 1, 2, 5, 10 where it spans too little for that."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.xaxis.set_major_locator(LogLocator(subs=(1,) if high > 30 * low else (1, 1.5, 2, 3, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())


def _value(value: Value, arms: Mapping[str, Row], arm: str) -> float:
    row = arms.get(arm)
    found = value(row, arms) if row is not None and row["status"] == "ok" else None
    return float("nan") if found is None else found


def _handles(metric: Metric, arms: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Line2D([], [], label=arm.replace(GRAPHED, ", graphed"), **look(arm)) for arm in arms]
    handles.append(Line2D([], [], color="#000000", lw=0.7, alpha=0.35, label=f"faint: {metric.faint_name}"))
    if metric.ceiling is not None:
        handles.append(Line2D([], [], color=CEILING, lw=1.1, ls="--", label=metric.ceiling_name))
    return [*handles, Patch(color="#000000", alpha=0.07, lw=0, label="fits in L2")]


def _caption(metric: Metric, meta: Mapping[str, Any] | None, dtype: str) -> str:
    card, date = (meta or {}).get("gpu") or "card not recorded", str((meta or {}).get("started") or "")[:10]
    best = " Best of the windows, cold L2." if metric.timed else ""
    text = f"{card}, {date or 'no date'}, {dtype}.{stamp.warning(meta or {})} Bold: {metric.bold_name}.{best}"
    return "\n".join(textwrap.wrap(text, CAPTION))


def save(figure: Figure, path: Path) -> None:
    """Writes <path>.png and <path>.svg; the same figure gives the same bytes."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path.with_suffix(".png"), dpi=200, metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def figures(source: str | Path | None = None, out: str | Path = "out/figures") -> Path:
    """Draws every panel of a folder of recorded runs, as <family>_<dtype>_<metric>.png and .svg."""
    folder, target = Path(source) if source is not None else verdicts.default_dir(), Path(out)
    for name, run in record.load_families(folder).items():
        for dtype in dict.fromkeys(row["dtype"] for row in run.rows):
            for metric in METRICS:
                drawn = draw(metric, run.rows, run.meta.get("ceilings"), dtype=dtype, meta=run.meta)
                save(drawn, target / f"{name}_{dtype}_{metric}")
    return target
