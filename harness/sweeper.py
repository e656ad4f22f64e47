"""The full sweep: ceilings first, then every case of every family, written after each so that it can be resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from harness import ceilings as limits
from harness import crosscheck, hostprofile, prebuild, record, stamp, throttle
from harness.comparison import PREVIOUS
from harness.delimiters import make_delimiters
from harness.measure import DeadContext, Plan, make_bench, measure_case
from harness.record import Record, Row
from harness.steps import ARMS
from kernels.registry import Case, Op, families
from kernels.registry import ops as all_ops

Echo = Callable[[str], None]
Measure = Callable[[Op, Case, str, Sequence[str]], list[Row]]


class NoGpu(RuntimeError):
    """A sweep was asked for on a machine without a CUDA GPU."""


@dataclass(frozen=True)
class Selection:
    """Which rows a sweep is to fill: ops, dtypes, backends, and cases by a shell pattern."""

    ops: tuple[Op, ...]
    dtypes: tuple[str, ...]
    backends: tuple[str, ...] = ARMS
    pattern: str = "*"

    def cases(self) -> Iterable[tuple[Op, Case, str]]:
        """Every (op, case, dtype), in the order in which they are measured."""
        for dtype in self.dtypes:
            for op in self.ops:
                for case in op.cases:
                    if fnmatch(case.name, self.pattern):
                        yield op, case, dtype


def require_gpu() -> None:
    """Raises NoGpu, saying what a sweep needs and which recorded runs there are."""
    if torch.cuda.is_available():
        return
    found = [path.relative_to(stamp.ROOT).as_posix() for path in stamp.recorded_dirs()]
    recorded = f"recorded runs: {', '.join(found)}" if found else "there is no recorded run under data/ yet"
    raise NoGpu(
        "sweep needs an NVIDIA GPU that PyTorch can use (torch.cuda.is_available() is False here); "
        f"{recorded}; quick, verdict, figures and compare work without one"
    )


def resume(path: Path, meta: dict[str, Any], echo: Echo) -> Record:
    """The record to go on with: the file's rows where they came from the same card, software and kernel sources.

    A file of other software or sources is set aside in the folder `previous`; ForeignGpu where it is another card's.
    """
    if not path.exists():
        return Record(meta)
    old = record.load(path, gpu=meta["gpu"])
    changed = [name for name in stamp.IDENTITY if old.meta.get(name) != meta.get(name)]
    if not changed:
        return old
    aside = _set_aside(path, old)
    echo(
        f"{path.name}: {', '.join(changed)} changed since it was recorded; measuring again, the old run is {PREVIOUS}/{aside.name}"
    )
    return Record(meta)


def _set_aside(path: Path, run: Record) -> Path:
    """Moves a run that is about to be replaced to `previous`; one with fewer rows than what is there goes beside that."""
    aside = path.parent / PREVIOUS / path.name
    aside.parent.mkdir(exist_ok=True)
    with suppress(FileNotFoundError, record.RecordError):
        if len(record.load(aside).rows) > len(run.rows):
            aside = aside.with_name(f"{aside.name}.unfinished")
    return path.replace(aside)


def missing(run: Record, selection: Selection, retry: bool) -> list[tuple[Op, Case, str, tuple[str, ...]]]:
    """The cases to measure, each with the backends that have no row yet; with `retry`, also failed and invalid ones."""
    done = {record.row_key(row) for row in run.rows if not retry or row["status"] in ("ok", "unsupported")}
    todo = []
    for op, case, dtype in selection.cases():
        backends = tuple(b for b in selection.backends if (op.name, case.name, dtype, b) not in done)
        if backends:
            todo.append((op, case, dtype, backends))
    return todo


def fill(run: Record, path: Path, todo: Sequence[Any], measure: Measure, echo: Echo) -> None:
    """Measures each missing case and writes the file after it; what was written stays whatever happens next."""
    started = time.monotonic()
    for number, (op, case, dtype, backends) in enumerate(todo, 1):
        try:
            rows = measure(op, case, dtype, backends)
        except DeadContext as error:
            run.put(error.rows)
            run.save(path)
            raise
        run.put(rows)
        run.save(path)
        echo(f"[{number:3}/{len(todo)}] {progress(rows)}  {time.monotonic() - started:6.1f} s")


def progress(rows: Sequence[Row]) -> str:
    """One line about a case: forward / forward + backward device µs of each arm, or why there is none."""
    first = rows[0]
    parts = []
    for row in rows:
        if row["status"] == "ok":
            times = " / ".join(f"{min(row[phase]['dev_us']):.1f}" for phase in ("fwd", "fwdbwd"))
        else:
            times = f"{row['status']} ({row['reason']})"
        parts.append(f"{row['backend']} {times}")
    return f"{first['op']} {first['case']} {first['dtype']}: " + " · ".join(parts)


def sweep(
    family: str | None = None,
    dtype: str = "fp16",
    out: str | Path | None = None,
    *,
    case: str = "*",
    op: str | None = None,
    backends: Sequence[str] = ARMS,
    jobs: int | None = None,
    retry: bool = False,
    allow_busy: bool = False,
    plan: Plan | None = None,
    echo: Echo = print,
) -> Path:
    """Measures ceilings, then every missing row of a family (or of all), and returns the folder of the records.

    Args:
        family: one of kernels.registry.FAMILIES, or None for all.
        dtype: "fp16", "bf16", "fp32" or "all".
        out: the folder; data/<gpu> by default.
        case: measure only cases whose name matches this shell pattern.
        op: measure only this op.
        backends: the arms; those that replay CUDA graphs are among them by default.
        jobs: processes that compile kernels beforehand; the number of CPUs by default, 0 for none.
        retry: measure failed and invalid rows again.
        allow_busy: measure on a card that is busy with other work.
        plan: how many windows, calls and rounds.
        echo: gets one line of progress per case.

    Raises:
        NoGpu, BusyGpu, a RecordError for a file that can't be resumed, or DeadContext where only a new process can go
        on (the rows so far are written).
    """
    require_gpu()
    chosen = {family: families()[family]} if family else families()
    throttle.refuse_busy(allow_busy)
    device = torch.device("cuda", torch.cuda.current_device())
    folder = Path(out) if out else stamp.data_dir()
    work = []
    for name, ops in chosen.items():
        wanted = tuple(each for each in ops if op in (None, each.name))
        selected = Selection(wanted, stamp.dtype_names(dtype), tuple(backends), case)
        path = folder / f"{name}.json"
        run = resume(path, stamp.environment(name), echo)
        work.append((name, path, run, missing(run, selected, retry)))
    todo = [item for *_, items in work for item in items]
    if not todo:
        echo(f"{folder}: every row is there already")
        return folder
    echo(f"{stamp.environment()['gpu']}: {len(todo)} cases to measure into {folder}")
    if jobs != 0:
        prebuild.prebuild([(o.name, c.name, d, b) for o, c, d, bs in todo for b in bs], jobs=jobs, echo=echo)
    delimiters = make_delimiters(device)
    measured = _ceilings(folder, device, delimiters, resumed=any(run.rows for _, _, run, _ in work), echo=echo)
    bench = make_bench(measured, plan or Plan(), delimiters)
    for _, path, run, items in work:
        run.meta.setdefault("ceilings", measured)
        fill(run, path, items, lambda *what: measure_case(bench, *what), echo)
    return folder


def _ceilings(folder: Path, device: torch.device, delimiters: Any, *, resumed: bool, echo: Echo) -> limits.Ceilings:
    """Measures the ceilings, or takes them from the same sweep that is being resumed."""
    path = folder / "ceilings.json"
    meta = stamp.environment()
    run = resume(path, meta, echo)
    if resumed and run.rows:
        return run.meta["ceilings"]
    started = time.monotonic()
    measured, rows = limits.measure(device, delimiters)
    if path.exists():
        _set_aside(path, run)
    kept = [row for row in run.rows if row["kind"] in (crosscheck.KIND, hostprofile.KIND)]
    Record({**meta, "ceilings": measured}, [*rows, *kept]).save(path)
    echo(f"ceilings: {limits.describe(measured)}  {time.monotonic() - started:.1f} s")
    return measured


def crosscheck_into(out: str | Path | None = None, dtype: str = "fp16") -> Record:
    """Measures the cross-check of device times and puts its rows into the folder's ceilings.json, in place of older ones.

    Returns the new rows, with what the file says of the card.

    Raises:
        NoGpu; FileNotFoundError without ceilings.json; ForeignGpu where it is another card's.
    """

    def measure(device: torch.device) -> list[Row]:
        return crosscheck.measure(device, make_delimiters(device), crosscheck.choose(all_ops().values()), dtype)

    return _into_ceilings(out, dtype, crosscheck.KIND, measure)


def host_into(out: str | Path | None = None, dtype: str = "fp16") -> list[Row]:
    """Measures the host's steps in one call of each op's quick case; the rest as `crosscheck_into`."""

    def measure(device: torch.device) -> list[Row]:
        return hostprofile.measure(device, [(op, op.quick) for op in all_ops().values()], dtype)

    return _into_ceilings(out, dtype, hostprofile.KIND, measure).rows


def _into_ceilings(
    out: str | Path | None, dtype: str, kind: str, measure: Callable[[torch.device], list[Row]]
) -> Record:
    require_gpu()
    path = (Path(out) if out else stamp.data_dir()) / "ceilings.json"
    run = record.load(path, gpu=torch.cuda.get_device_name())
    rows = measure(torch.device("cuda", torch.cuda.current_device()))
    kept = [row for row in run.rows if row["kind"] != kind or row["dtype"] != dtype]
    Record(run.meta, [*kept, *rows]).save(path)
    return Record(run.meta, rows)
