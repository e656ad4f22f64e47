"""What notebooks show besides figures: a kernel's source, and tables made from cases and recorded rows."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from harness import ceilings, generated, precision, quickcheck, record, stamp, verdicts
from harness.besides import before, beside, changes, crosschecks, hosts, limits
from harness.figure import GRAPHED, ordered
from harness.panel import run_label
from harness.record import Record, Row
from harness.stamp import DATA, DTYPES, ROOT
from harness.statistic import Ratio, geometric_mean
from kernels import UnsupportedCase
from kernels.registry import families, ops

__all__ = [
    "before",
    "beside",
    "cards",
    "changes",
    "checks",
    "code",
    "costs",
    "crosschecks",
    "dtypes",
    "failures",
    "floors",
    "graphed",
    "hosts",
    "intervals",
    "limits",
    "losses",
    "published",
    "rounding",
    "runs",
    "short_writes",
    "source",
    "targets",
    "verdict",
]

# Characters of a kernel's generated code that a notebook keeps.
CODE = 12_000
PUBLISHED = DATA / "published" / "rtx4090.json"
DTYPE_COLUMNS = ("dev_eager", "dev_compile", "fbdev_eager", "fbdev_compile", "ulp", "eager_ulp")


def source(family: str, part: str, *names: str) -> Any:
    """The source of functions of a family's `<part>*.py`, highlighted; read, not imported, so the DSL may be absent.

    Raises:
        LookupError: a function that no such file has, or more than one.
    """
    from IPython.display import Markdown

    found: dict[str, list[str]] = {name: [] for name in names}
    for path in sorted((ROOT / "kernels" / family).glob(f"{part}*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in found:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[node.name].append("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    for name, texts in found.items():
        if len(texts) != 1:
            raise LookupError(f"{name}: in {len(texts)} of kernels/{family}/{part}*.py, wanted one")
    return Markdown("```python\n" + "\n\n\n".join(text for (text,) in found.values()) + "\n```")


def code(op: str, case: str, backend: str, dtype: str = "fp16") -> Any:
    """A case's forward as its compiler makes it: registers, spills and, folded away, TTGIR or CUDA source; or why not."""
    from IPython.display import HTML, Markdown

    dims = next(each.dims for each in ops()[op].cases if each.name == case)
    try:
        kernels = generated.generated(op, dims, dtype, backend, backward=False)
    except UnsupportedCase as reason:
        return Markdown(f"No code of {backend} to show here: {reason}")
    return HTML(generated.as_html(kernels, only=("TTGIR", "CUDA"), most=CODE))


def costs(family: str, cases: Sequence[str], dtype: str = "fp16") -> pd.DataFrame:
    """The least that a call has to move and compute, of the cases named, forward and forward + backward."""
    rows = []
    for op in families()[family]:
        for case in op.cases:
            if case.name in cases:
                forward, both = (op.cost(case.dims, DTYPES[dtype].itemsize, backward=back) for back in (False, True))
                moved = [(cost.bytes_read + cost.bytes_written) / 1e6 for cost in (forward, both)]
                rows.append((op.name, case.name, *moved, forward.flops / 1e9, both.flops / 1e9))
    names = ("op", "case", "MB fwd", "MB fwd+bwd", "GFLOP fwd", "GFLOP fwd+bwd")
    return pd.DataFrame(rows, columns=names).round(2).set_index(["op", "case"])


def checks(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows of a quick check."""
    beside = {op: [row for row in rows if row["op"] == op] for op in dict.fromkeys(row["op"] for row in rows)}
    cells = [quickcheck.cells(row, beside[row["op"]]) for row in rows]
    return pd.DataFrame(cells, columns=quickcheck.COLUMNS).set_index(["op", "backend"])


def verdict(source: Record | Path, dtype: str = "fp16") -> pd.DataFrame:
    """The verdict of a recorded run, a row an op and kernel backend; `graphed` has the CUDA graphs' rows."""
    rows = [row for row in verdicts.verdict(source, dtype) if _kernel(row["backend"])]
    table = pd.DataFrame(rows, columns=verdicts.COLUMNS)
    return table.drop(columns="dtype").set_index(["op", "backend"]).astype(_numbers(table)).round(2)


def intervals(source: Record | Path, dtype: str = "fp16") -> pd.DataFrame:
    """The verdict's means with their 95 % intervals, and which of them are ties, because the interval holds 1."""
    lines = [
        (v.values["op"], v.values["backend"], *(_spread(v.ratios[name]) for name in verdicts.RATIOS))
        for v in verdicts.verdicts(source, dtype)
        if _kernel(v.values["backend"])
    ]
    return pd.DataFrame(lines, columns=("op", "backend", *verdicts.RATIOS)).set_index(["op", "backend"])


def _spread(ratio: Ratio | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio.value:.2f} [{ratio.low:.2f}–{ratio.high:.2f}]{' tie' if ratio.tie else ''}"


def _numbers(table: pd.DataFrame) -> dict[str, str]:
    return {name: "float64" for name in (*verdicts.RATIOS, "vram", "ulp", "eager_ulp") if name in table}


def graphed(run: Record, dtype: str = "fp16") -> pd.DataFrame:
    """What remains once dispatch is gone: eager's wall over each kernel's, both replayed from a CUDA graph.

    Geometric means over the cases; a row an op and backend, none where no graphed arm was recorded.
    """
    lines = []
    for op in dict.fromkeys(row["op"] for row in run.rows):
        rows = {(row["case"], row["backend"]): row for row in _all_ok(run.rows, op, dtype)}
        for backend in ordered(b for _, b in rows if b.endswith(GRAPHED) and _kernel(b.removesuffix(GRAPHED))):
            cases = [case for case, b in rows if b == backend and (case, f"eager{GRAPHED}") in rows]
            cells = []
            for phase in ("fwd", "fwdbwd"):
                pairs = [
                    (_wall(rows[case, f"eager{GRAPHED}"], phase), _wall(rows[case, backend], phase)) for case in cases
                ]
                ratios = [base[0] / mine[0] for base, mine in pairs if base and mine]
                cells.append(geometric_mean(ratios) if ratios else None)
            lines.append((op, backend, len(cases), *cells))
    table = pd.DataFrame(lines, columns=("op", "backend", "n", "fwd wall", "fwd+bwd wall"))
    return table.set_index(["op", "backend"]).astype({"fwd wall": "float64", "fwd+bwd wall": "float64"}).round(2)


def _wall(row: Row, phase: str) -> list[float]:
    return [min(row[phase]["wall_us"])] if row[phase] and row[phase]["wall_us"] else []


def _kernel(backend: str) -> bool:
    return backend not in verdicts.BASELINES and not backend.endswith(GRAPHED)


def failures(run: Record) -> pd.DataFrame:
    """Every row that is not ok, and why."""
    names = ("op", "case", "dtype", "backend", "status", "reason")
    return pd.DataFrame([[row[name] for name in names] for row in run.rows if row["status"] != "ok"], columns=names)


def floors(run: Record, op: str, dtype: str = "fp16", phase: str = "fwd") -> pd.DataFrame:
    """Predicted against measured: each case's floor in µs, and each arm's device time as a multiple of it."""
    table: dict[str, dict[str, Any]] = {}
    for row in _ok(run.rows, op, dtype):
        times = row[phase]
        line = table.setdefault(row["case"], {"floor µs": times["floor_us"], "in L2": row["l2_resident"]})
        if times["dev_us"] and not row["backend"].endswith(GRAPHED):
            line[row["backend"]] = min(times["dev_us"]) / times["floor_us"]
    return pd.DataFrame.from_dict(table, orient="index").rename_axis("case").round(2)


def rounding(run: Record, op: str, cases: Sequence[str], dtype: str = "fp16") -> pd.DataFrame:
    """The output's error in ULP, of each arm as recorded and of the exact result rounded once, which no arm can beat.

    That is computed here and now, in float64 on inputs of the same kind as the recorded ones, if not the same values.
    """
    entry, kind = ops()[op], DTYPES[dtype]
    table: dict[str, dict[str, Any]] = {}
    for case in (case for case in entry.cases if case.name in cases):
        inputs = entry.make(case.dims, kind, torch.device("cpu"), precision.seed(op, case.name, dtype, 0))
        exact = {precision.OUTPUT: entry.oracle(*(value.double() for value in inputs.values()), **entry.kwargs)}
        once = precision.compare({name: value.to(kind) for name, value in exact.items()}, exact, kind, None)
        table[case.name] = {"rounded once": once.ulps[precision.OUTPUT]}
    for row in _ok(run.rows, op, dtype):
        if row["case"] in table:
            table[row["case"]][row["backend"]] = row["ulp_out"]
    return pd.DataFrame.from_dict(table, orient="index").rename_axis("case").round(2)


def targets(verdict: pd.DataFrame, wanted: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Goals set beforehand against a verdict: {op: {ratio: the least it should be}}; a row an op, backend and ratio."""
    rows = [
        (op, backend, ratio, least, float(str(verdict.loc[(op, backend), ratio])))
        for op, goals in wanted.items()
        for backend in verdict.loc[op].index
        for ratio, least in goals.items()
    ]
    table = pd.DataFrame(rows, columns=("op", "backend", "ratio", "target", "measured"))
    return table.assign(met=table.measured >= table.target)


def losses(run: Record, dtype: str = "fp16", *, clock: str = "dev_us", below: float = 1.0) -> pd.DataFrame:
    """Every row under `below` times the speed of eager or torch.compile on that clock, of either phase; worst first."""
    found = []
    for op in dict.fromkeys(row["op"] for row in run.rows):
        rows = {(row["case"], row["backend"]): row for row in _ok(run.rows, op, dtype)}
        for (case, backend), row in rows.items():
            for baseline in verdicts.BASELINES:
                other = rows.get((case, baseline))
                if not _kernel(backend) or other is None:
                    continue
                for phase in ("fwd", "fwdbwd"):
                    ratio = min(other[phase][clock]) / min(row[phase][clock])
                    if ratio < below:
                        found.append((op, case, backend, f"{phase} against {baseline}", round(ratio, 2)))
    table = pd.DataFrame(found, columns=("op", "case", "backend", "lost", "ratio"))
    return table.sort_values(["ratio", "op", "case", "backend", "lost"]).reset_index(drop=True)


def short_writes(run: Record, op: str, dtype: str = "fp16") -> pd.DataFrame:
    """A merge's forward beside plain writes of ΔW's bytes on the same card (see harness/ceilings.py), µs of device time.

    constant: a constant is written, in the kernel that streams. loaded: values that come from the memory first, as a
    merge's operands do; where ΔW is small a kernel with fewer programs is sooner done. Both were taken for ΔW in 16 bits:
    other sizes have neither. `at the ceiling`: the time at the long stream's rate.
    """
    written: dict[int, dict[str, float]] = {}
    for row in beside(run).rows:
        if row["kind"] == ceilings.SHORT_WRITE and row["reason"] is None:
            written.setdefault(row["bytes"], {})[row["implementation"]] = min(row["dev_us"])
    table: dict[str, dict[str, Any]] = {}
    for row in _ok(run.rows, op, dtype):
        if row["fwd"]["dev_us"]:
            size = ops()[op].cost(row["dims"], DTYPES[dtype].itemsize).bytes_written
            start = {"MB": size / 1e6, "at the ceiling": size / run.meta["ceilings"]["write_gbps"] / 1e3}
            line = table.setdefault(row["case"], {**start, **written.get(size, {})})
            line[row["backend"]] = min(row["fwd"]["dev_us"])
    arms = dict.fromkeys(name for line in table.values() for name in line)
    columns = dict.fromkeys(("MB", "at the ceiling", *ceilings.SHORT_WRITE_ARMS, *arms))
    return pd.DataFrame.from_dict(table, orient="index", columns=list(columns)).rename_axis("case").round(2)


def runs(family: str) -> dict[str, Record]:
    """Every recorded run of a family by card and day, this machine's card first."""
    here = stamp.environment()["gpu"]
    paths = [path for folder in stamp.recorded_dirs() if (path := folder / f"{family}.json").exists()]
    found: dict[str, Record] = {}
    for path in paths:
        run = record.load(path)
        label = run_label(run)
        # Two cards of one kind, each with a folder of its own.
        found[label if label not in found else f"{label} ({path.parent.name})"] = run
    return dict(sorted(found.items(), key=lambda each: each[1].meta["gpu"] != here))


def cards() -> dict[str, Record]:
    """Every card with recorded runs: its label, and one record that holds the rows of all its families."""
    found = {}
    for folder in stamp.recorded_dirs():
        runs = record.load_dir(folder)
        rows = [row for name in families() if name in runs for row in runs[name].rows]
        if rows:
            ceilings_meta = runs["ceilings"].meta
            both = stamp.combined({name: runs[name].meta for name in families() if name in runs})
            labels = {name: both[name] for name in ("kernels_sha256", "git_dirty", "families")}
            gpu = str(ceilings_meta["gpu"])
            found[gpu if gpu not in found else f"{gpu} ({folder.name})"] = Record(
                {**ceilings_meta, **labels}, rows, folder
            )
    return found


def dtypes(run: Record, columns: Sequence[str] = DTYPE_COLUMNS) -> pd.DataFrame:
    """The verdict's ratios for every dtype that was recorded, side by side."""
    recorded = [name for name in DTYPES if any(row["dtype"] == name for row in run.rows)]
    if not recorded:
        raise ValueError("the run has no rows, so no dtype either")
    tables = {name: verdict(run, name)[list(columns)] for name in recorded}
    table = pd.concat(tables, axis=1, names=["dtype", "ratio"]).swaplevel(axis=1)
    return table[[(column, name) for column in columns for name in recorded]]


def published(run: Record, dtype: str = "fp16") -> pd.DataFrame:
    """The published figures and this run's, one above the other, cards named; `named there` is the op's name in the source."""
    theirs = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    mine = {(row["op"], row["backend"]): row for row in verdicts.verdict(run, dtype)}
    ratios = ("n", "dev_eager", "dev_compile", "fb_eager", "fb_compile", "vram", "ulp", "eager_ulp")
    there, here = f"{theirs['gpu']} (published)", f"{run.meta['gpu']} (here)"
    rows = []
    for row in sorted(theirs["rows"], key=lambda row: _place(row["compares_with"])):
        op, backend = row["compares_with"], row["backend"]
        ours: dict[str, Any] = mine.get((op, backend), {})
        rows.append((op, backend, there, row["op"], *(row[name] for name in ratios)))
        rows.append((op, backend, here, op, *(ours.get(name) for name in ratios)))
    table = pd.DataFrame(rows, columns=("op", "backend", "card", "named there", *ratios))
    return table.astype(dict.fromkeys(ratios, "float64")).set_index(["op", "backend", "card"]).round(2)


def _place(op: str) -> int:
    known = list(ops())
    return known.index(op) if op in known else len(known)


def _ok(rows: Iterable[Row], op: str, dtype: str) -> list[Row]:
    """The plain arms' good rows."""
    return [row for row in _all_ok(rows, op, dtype) if not row["backend"].endswith(GRAPHED)]


def _all_ok(rows: Iterable[Row], op: str, dtype: str) -> list[Row]:
    return [row for row in rows if row["op"] == op and row["dtype"] == dtype and row["status"] == "ok"]
