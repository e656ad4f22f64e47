"""What stands beside a recorded run: its card's own measurements, and the run before it. Tables for notebooks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pandas as pd

from harness import ceilings, comparison, crosscheck, hostprofile, record
from harness.record import Record, RecordError


def limits(run: Record) -> pd.DataFrame:
    """The ceilings that were measured with a run."""
    measured = run.meta["ceilings"]
    rows = [(f"{name} bandwidth", measured[f"{name}_gbps"], "GB/s") for name in ceilings.WRITE_SHARE]
    rows += [(f"{name} matrix product", rate, "TFLOP/s") for name, rate in measured["matmul_tflops"].items()]
    return pd.DataFrame(rows, columns=("ceiling", "measured", "unit")).set_index("ceiling").round(0)


def crosschecks(run: Record) -> pd.DataFrame:
    """Device time three ways, side by side with why they differ; `run` is a card's ceilings.json.

    profiler: the sum of the kernels; events: around a batch; graph: the batch replayed as a CUDA graph; µs a call.
    """
    lines = []
    for row in run.rows:
        if row.get("kind") == crosscheck.KIND:
            found = crosscheck.times(row) or dict.fromkeys(crosscheck.WAYS)
            about = (row["op"], row["case"], row["arm"], row["phase"], row.get("launches"))
            lines.append((*about, *(found[way] for way in crosscheck.WAYS), crosscheck.explain(row, run.meta)))
    names = ("op", "case", "backend", "phase", "launches", *crosscheck.WAYS, "explained by")
    return pd.DataFrame(lines, columns=names).round(2).set_index(["op", "case", "backend", "phase"])


def hosts(run: Record) -> pd.DataFrame:
    """Where the host's time goes in one call, µs a step (see harness/hostprofile.py); `run` is a card's ceilings.json.

    ratio: the host's time to issue one forward, in bare launches of the DSL.
    """
    lines = []
    for row in run.rows:
        if row.get("kind") == hostprofile.KIND:
            found = hostprofile.times(row)
            steps = (found[step] for step in (*hostprofile.STEPS, *hostprofile.SCALE))
            lines.append((row["op"], row["backend"], row["launches"], *steps, hostprofile.ratio(row)))
    names = ("op", "backend", "launches", *hostprofile.STEPS, *hostprofile.SCALE, "ratio")
    return pd.DataFrame(lines, columns=names).round(2).set_index(["op", "backend"])


def beside(run: Record) -> Record:
    """What was measured of the card itself: its ceilings.json; the cross-check and the host's steps are in it.

    run: one of `cards()`, or a family's own.
    """
    if run.path is None:
        raise ValueError("a record that was not loaded from a file has nothing beside it")
    return record.load((run.path if run.path.is_dir() else run.path.parent) / "ceilings.json")


def before(run: Record) -> list[str]:
    """Which run the sweep that made this one set aside, and what else is not the same in both.

    [] where there was none; the reason alone where it can't be compared (another card's, another schema, not readable).
    """
    both = _then_and_now(run)
    if both is None:
        return []
    try:
        found, metas = comparison.compare(*both), [record.load(path).meta for path in both]
    except RecordError as error:
        return [f"not compared: {error}"]
    when = [f"{str(meta.get('started'))[:16]} of revision {meta.get('git_revision')}" for meta in metas]
    # The first run's kernels are not today's, as a rule: that is why it was set aside.
    differences = [line for line in comparison.differences(*both, found) if line != "first run: stale kernels"]
    return [" → ".join(when), *comparison.alone(found), *differences]


def changes(run: Record) -> pd.DataFrame:
    """Device times, forward and with backward, against the run before it (see `before`): how many moved.

    ratio: the median of now over then, below 1 is faster. Rows that only one of the runs has are left out.
    """
    both = _then_and_now(run)
    found: list[comparison.Change] = []
    with suppress(RecordError):
        found = comparison.compare(*both) if both else []
    lines = [(c.key[0], c.key[2], c.key[3], c.verdict, c.ratio) for c in found if not c.alone]
    table = pd.DataFrame(lines, columns=["op", "dtype", "backend", "verdict", "ratio"])
    groups = table.groupby(["op", "dtype", "backend"], sort=False)
    counts = {name: groups.verdict.agg(lambda found, name=name: (found == name).sum()) for name in comparison.VERDICTS}
    return pd.DataFrame({**counts, "ratio": groups.ratio.median()}).round(2)


def _then_and_now(run: Record) -> tuple[Path, Path] | None:
    """The files of the run that was set aside and of this one; None where there is no such pair."""
    if run.path is None:
        return None
    aside = run.path.parent / comparison.PREVIOUS / run.path.name
    return (aside, run.path) if aside.is_file() else None
