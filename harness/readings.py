"""The exact numbers behind a figure: each arm's value of a metric with its interval, in words and as a table.

A ratio's interval is the bootstrapped one that the verdict has; a time's is the range of its windows or rounds.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from harness.figure import Metric, ordered
from harness.record import Row
from harness.statistic import row_ratio
from harness.verdicts import baselines


@dataclass(frozen=True)
class Reading:
    """One number of a figure and its interval; None where it was not measured."""

    value: float | None
    low: float | None
    high: float | None
    status: str

    def __str__(self) -> str:
        if self.value is None:
            return self.status if self.status != "ok" else "–"
        spread = "" if self.low is None or self.low == self.high else f" [{self.low:.4g}–{self.high:.4g}]"
        return f"{self.value:.4g}{spread}"


Readings = dict[tuple[str, str], Reading]


def readings(metric: Metric, rows: Sequence[Row]) -> Readings:
    """The metric of every (case, backend), with its interval."""
    arms: dict[str, dict[str, Row]] = {}
    for row in rows:
        arms.setdefault(row["case"], {})[row["backend"]] = row
    found: Readings = {}
    for row in rows:
        beside = arms[row["case"]]
        value = metric.bold(row, beside) if row["status"] == "ok" else None
        low, high = _interval(metric, row, beside) if value is not None else (None, None)
        found[row["case"], row["backend"]] = Reading(value, low, high, row["status"])
    return found


def _interval(metric: Metric, row: Row, beside: dict[str, Row]) -> tuple[float | None, float | None]:
    if metric.ratio:
        eager = beside[baselines(row["backend"])["eager"]]
        if eager is row:
            return None, None
        found = row_ratio(eager[metric.ratio][metric.samples], row[metric.ratio][metric.samples])
        return found.low, found.high
    each = [metric.bold(one, beside) for one in _samples(row)]
    known = [number for number in each if number is not None]
    return min(known, default=None), max(known, default=None)


def _samples(row: Row) -> list[Row]:
    """The row as each of its windows, or rounds, alone would have recorded it."""
    phases = [row[phase] for phase in ("fwd", "fwdbwd") if row[phase]]
    count = max((len(phase[kind]) for phase in phases for kind in ("dev_us", "wall_us")), default=0)
    made = []
    for at in range(count):
        one = dict(row)
        for name in ("fwd", "fwdbwd"):
            if row[name]:
                one[name] = {**row[name], **{kind: row[name][kind][at : at + 1] for kind in ("dev_us", "wall_us")}}
        made.append(one)
    return made


def describe(metric: Metric, rows: Sequence[Row], numbers: Readings, run: str) -> str:
    """What a figure of one op's rows shows, in words: the metric, and each arm's range over the cases of that run."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    ranges = []
    for backend in ordered(row["backend"] for row in rows):
        found = [numbers[case, backend].value for case in cases if (case, backend) in numbers]
        values = [value for value in found if value is not None]
        ranges.append(f"{backend} {min(values):.3g} to {max(values):.3g}" if values else f"{backend} not measured")
    about = f"{rows[0]['op']}, {rows[0]['dtype']}, {len(cases)} cases, {run}"
    return f"{metric.title} in {metric.unit} ({metric.bold_name}): {about}. {'; '.join(ranges)}."


def table(metric: Metric, rows: Sequence[Row], numbers: Readings) -> str:
    """The figure's numbers as an HTML table, a row a case and a column an arm."""
    backends = ordered(row["backend"] for row in rows)
    marks = {name: f' data-arm="{html.escape(name)}"' for name in backends}
    head = "<th scope=col>case</th>" + "".join(
        f"<th scope=col{marks[name]}>{html.escape(name)}</th>" for name in backends
    )
    body = "".join(
        f"<tr><th scope=row>{html.escape(case)}</th>"
        + "".join(f"<td{marks[name]}>{numbers.get((case, name), '')}</td>" for name in backends)
        + "</tr>"
        for case in dict.fromkeys(row["case"] for row in rows)
    )
    bracket = "; in brackets the range over windows or rounds" if metric.timed else ""
    if metric.ratio:
        bracket = "; in brackets the 95 % interval, bootstrapped over windows or rounds"
    caption = html.escape(f"{metric.title}, {metric.unit}, {metric.bold_name}{bracket}")
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def words(metric: Metric, rows: Sequence[Row], numbers: Readings) -> dict[str, list[str]]:
    """What each point of a figure says, by arm, in the order of the cases; a case without a value has no point."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    return {
        arm: [
            f"{case}, {arm}: {reading} {metric.unit}"
            for case in cases
            if (reading := numbers.get((case, arm))) is not None and reading.value is not None
        ]
        for arm in ordered(row["backend"] for row in rows)
    }
