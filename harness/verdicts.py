"""The verdict of a recorded run: per op and backend, how much better than eager and torch.compile, over all cases."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import record, stamp
from harness.record import Record, Row
from harness.statistic import Ratio, geometric_mean, mean_ratio, row_ratio
from harness.steps import SUFFIX, is_graphed
from kernels.registry import ops

BASELINES = ("eager", "compile")
# What an arm is compared with; a graphed arm has shed its dispatch, so has the eager arm that it is held against.
_GRAPHED_BASELINES = {"eager": f"eager{SUFFIX}"}
# Name -> (the row's phase and samples, the baseline).
RATIOS = {
    "dev_eager": ("fwd", "dev_us", "eager"),
    "dev_compile": ("fwd", "dev_us", "compile"),
    "fbdev_eager": ("fwdbwd", "dev_us", "eager"),
    "fbdev_compile": ("fwdbwd", "dev_us", "compile"),
    "fb_eager": ("fwdbwd", "wall_us", "eager"),
    "fb_compile": ("fwdbwd", "wall_us", "compile"),
}
COLUMNS = ("op", "backend", "dtype", "n", "n_ok", *RATIOS, "vram", "ulp", "eager_ulp", "worst_case")


@dataclass(frozen=True)
class Verdict:
    """One op on one backend: `values` hold COLUMNS, `ratios` the means with their intervals.

    notes: what the means leave out, and which rows are noisy or ties. rows: each case's own ratios, bootstrapped over
    its windows.
    """

    values: dict[str, Any]
    ratios: dict[str, Ratio | None]
    notes: tuple[str, ...]
    rows: dict[str, dict[str, Ratio]] = field(default_factory=dict)


def baselines(backend: str) -> dict[str, str]:
    """The arm that stands for each of BASELINES beside this backend; nothing stands for "compile" beside a graph."""
    return dict(_GRAPHED_BASELINES) if is_graphed(backend) else {name: name for name in BASELINES}


def is_baseline(backend: str) -> bool:
    """Whether others are compared with this arm, so that it has no verdict of its own."""
    return backend in BASELINES or backend in _GRAPHED_BASELINES.values()


def judge(rows: Sequence[Row], op: str, backend: str, dtype: str, cases: Sequence[str] = ()) -> Verdict:
    """The verdict over one op's rows; each mean takes the cases in which both sides are ok.

    cases: what the full sweep holds; a case without a row counts in n.
    """
    found = {(row["case"], row["backend"]): row for row in rows if row["op"] == op and row["dtype"] == dtype}
    names = tuple(dict.fromkeys([*cases, *(case for case, _ in found)]))
    ok = {key: row for key, row in found.items() if row["status"] == "ok"}
    mine = {case: ok[case, backend] for case in names if (case, backend) in ok}
    arms = baselines(backend)
    base = {b: {case: ok[case, arm] for case in mine if (case, arm) in ok} for b, arm in arms.items()}

    pairs = {
        name: {case: (row[phase][kind], mine[case][phase][kind]) for case, row in base.get(b, {}).items()}
        for name, (phase, kind, b) in RATIOS.items()
    }
    ratios = {name: mean_ratio(list(samples.values())) for name, samples in pairs.items()}
    each = {name: {case: row_ratio(*sides) for case, sides in samples.items()} for name, samples in pairs.items()}
    eager = base["eager"]
    values: dict[str, Any] = {"op": op, "backend": backend, "dtype": dtype, "n": len(names), "n_ok": len(mine)}
    values |= {name: None if ratio is None else ratio.value for name, ratio in ratios.items()}
    values["vram"] = _mean(eager[case]["vram_fwdbwd"] / mine[case]["vram_fwdbwd"] for case in eager)
    values["ulp"] = _mean(row["ulp"] for row in mine.values())
    values["eager_ulp"] = _mean(row["ulp"] for row in eager.values())
    values["worst_case"] = _worst(mine, base)
    return Verdict(values, ratios, (*_notes(names, mine, base, found, backend), *_ties(each)), each)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return geometric_mean(found) if found else None


def _worst(mine: dict[str, Row], base: dict[str, dict[str, Row]]) -> str | None:
    """The case with the lowest device ratio, forward or with backward, against either baseline."""
    least: dict[str, float] = {}
    for phase, kind, b in RATIOS.values():
        if kind == "dev_us":
            for case, other in base.get(b, {}).items():
                ratio = min(other[phase][kind]) / min(mine[case][phase][kind])
                least[case] = min(ratio, least.get(case, ratio))
    return min(least, key=lambda case: least[case]) if least else None


def _notes(
    names: Sequence[str], mine: dict[str, Row], base: dict[str, dict[str, Row]], found: dict[Any, Row], backend: str
) -> Iterable[str]:
    for case in names:
        row = found.get((case, backend))
        if row is None:
            yield f"{case}: not measured"
        elif row["status"] != "ok":
            yield f"{case}: {row['status']}: {row['reason']}"
    for baseline, rows in base.items():
        absent = [case for case in mine if case not in rows]
        if absent:
            yield f"against {baselines(backend)[baseline]}: without {', '.join(absent)}"
    for flag in ("noisy", "throttled", "wall_contended"):
        marked = [case for case, row in mine.items() if row.get(flag)]
        if marked:
            yield f"{flag}: {', '.join(marked)}"


def _ties(rows: Mapping[str, Mapping[str, Ratio]]) -> Iterable[str]:
    """The cases whose own interval contains 1, by ratio of device times: a wall is noisier than any difference."""
    for name, ratios in rows.items():
        cases = [case for case, ratio in ratios.items() if ratio.tie]
        if cases and RATIOS[name][1] == "dev_us":
            yield f"tie {name.replace('_', '/')}: {', '.join(cases)}"


def verdicts(source: str | Path | Record | None = None, dtype: str = "fp16") -> list[Verdict]:
    """One verdict per op and kernel backend of a folder of recorded runs (data/<gpu>), of a file, or of a loaded run.

    source: None means the only recorded folder under data/, or this card's.
    """
    order = list(ops())
    made = []
    for run in _runs(source):
        rows = [row for row in run.rows if row["dtype"] == dtype]
        for op in dict.fromkeys(row["op"] for row in rows):
            cases = [case.name for case in ops()[op].cases] if op in ops() else []
            backends = dict.fromkeys(row["backend"] for row in rows if row["op"] == op)
            made += [judge(rows, op, b, dtype, cases) for b in backends if not is_baseline(b)]
    return sorted(made, key=lambda v: order.index(v.values["op"]) if v.values["op"] in order else len(order))


def _runs(source: str | Path | Record | None) -> list[Record]:
    if isinstance(source, Record):
        return [source]
    return list(record.load_families(source if source is not None else default_dir()).values())


def default_dir() -> Path:
    """This card's recorded folder where there is one, else the first of data/; FileNotFoundError without any."""
    found = stamp.recorded_dirs()
    if not found:
        raise FileNotFoundError("there is no recorded run under data/: sweep makes one on a GPU")
    gpu = stamp.environment()["gpu"]
    return next((path for path in found if gpu and path.name == stamp.slug(gpu)), found[0])


def verdict(source: str | Path | Record | None = None, dtype: str = "fp16", *, format: str = "rows") -> Any:
    """The verdict as a list of dicts ("rows"), or as a string: "json", "markdown" or "text".

    Ratios are geometric means over the cases; above 1 this backend is better. dev: forward device time, fbdev: forward
    and backward device time, fb: forward and backward wall, vram: peak memory with backward. An arm that replays CUDA
    graphs is compared with eager_graphed, ulp and vram too, and not with torch.compile.
    """
    made = verdicts(source, dtype)
    rows = [v.values for v in made]
    if format == "rows":
        return rows
    if format == "json":
        return json.dumps(record.strict(rows), indent=1, allow_nan=False)
    if format == "markdown":
        return "\n".join(_table(made))
    if format == "text":
        sources = dict.fromkeys(stamp.cite(run.meta) for run in _runs(source))
        return "\n".join([*_text(made, dtype), "", "To cite:", *sources])
    raise ValueError(f"format: got {format!r}, wanted rows, json, markdown or text")


def _cell(v: Verdict, name: str) -> str:
    value = v.values[name]
    if value is None:
        return "–"
    ratio = v.ratios.get(name)
    if ratio is not None:
        return f"{value:.2f}{' (tie)' if ratio.tie else ''}"
    return f"{value:.2f}" if name == "vram" else f"{value:.1f}"


def _cells(v: Verdict) -> list[str]:
    numbers = [_cell(v, name) for name in (*RATIOS, "vram", "ulp", "eager_ulp")]
    counts = f"{v.values['n_ok']}/{v.values['n']}"
    return [v.values["op"], v.values["backend"], counts, *numbers, v.values["worst_case"] or "–"]


HEADER = ["op", "backend", "ok", *(name.replace("_", "/") for name in RATIOS), "vram", "ULP", "eager ULP", "worst case"]


def _table(made: Sequence[Verdict]) -> list[str]:
    rule = ["---"] * 2 + ["---:"] * (len(HEADER) - 3) + ["---"]
    return ["| " + " | ".join(cells) + " |" for cells in [HEADER, rule, *(_cells(v) for v in made)]]


def _text(made: Sequence[Verdict], dtype: str) -> Iterable[str]:
    rows = [HEADER, *(_cells(v) for v in made)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    yield f"{dtype}: geometric means over the cases; above 1 this backend is better; a tie's 95 % interval contains 1"
    for index, row in enumerate(rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if index:
            v = made[index - 1]
            spans = [f"{n.replace('_', '/')} {r.low:.2f}–{r.high:.2f}" for n, r in v.ratios.items() if r is not None]
            yield f"    95 %: {', '.join(spans) or 'no case'}"
            yield from (f"    {note}" for note in v.notes)
    if not made:
        yield "no rows of this dtype"
