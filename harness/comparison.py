"""Two recorded runs row by row: is the second faster, the same or slower, or do the windows not tell?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import record
from harness.record import ForeignGpu, Record, Row, row_key

# A change inside this band is the same: repeated sweeps of unchanged kernels move by about this much.
BAND = 0.03
PHASES = ("fwd", "fwdbwd")


@dataclass(frozen=True)
class Change:
    """One row's phase in both runs; `ratio` is the second's best device time over the first's, below 1 is faster."""

    key: tuple[str, ...]
    phase: str
    verdict: str
    ratio: float | None = None
    note: str = ""
    broken: bool = False

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"  {self.ratio:.3f}"
        return f"{self.verdict:8}{' '.join(self.key)} {self.phase}{ratio}{'  ' + self.note if self.note else ''}"


def compare(a: str | Path, b: str | Path, *, foreign: bool = False) -> list[Change]:
    """Every row of two runs, files or folders of them; ForeignGpu for two cards' runs unless `foreign` is set."""
    first, second = _runs(a), _runs(b)
    changes: list[Change] = []
    for name in dict.fromkeys([*first, *second]):
        one, two = first.get(name, Record({})), second.get(name, Record({}))
        cards = {run.meta["gpu"] for run in (one, two) if run.meta}
        if len(cards) > 1 and not foreign:
            raise ForeignGpu(
                f"{name}: runs of {' and '.join(sorted(map(str, cards)))}; --foreign compares all the same"
            )
        changes += compare_rows(one.rows, two.rows)
    return changes


def compare_rows(a: Iterable[Row], b: Iterable[Row]) -> list[Change]:
    """Every row of two runs, by its key."""
    rows_a, rows_b = ({row_key(row): row for row in rows} for rows in (a, b))
    keys = dict.fromkeys([*rows_a, *rows_b])
    return [_change(key, phase, rows_a.get(key), rows_b.get(key)) for key in keys for phase in PHASES]


def _runs(path: str | Path) -> dict[str, Record]:
    """A file's run or a folder's, without ceilings; one of two files has no name to match by, so it gets none."""
    path = Path(path)
    if path.is_file():
        return {"run": record.load(path)}
    return {name: run for name, run in record.load_dir(path).items() if name != "ceilings"}


def _change(key: tuple[str, ...], phase: str, a: Row | None, b: Row | None) -> Change:
    if a is None or b is None:
        return Change(key, phase, "unclear", note=f"only in the {'second' if a is None else 'first'} run")
    if a["status"] != "ok" or b["status"] != "ok":
        note = f"{a['status']} → {b['status']}" + (f" ({b['reason']})" if b["reason"] else "")
        return Change(key, phase, "unclear", note=note, broken=a["status"] == "ok")
    before, after = a[phase]["dev_us"], b[phase]["dev_us"]
    ratio = min(after) / min(before)
    low, high = min(after) / max(before), max(after) / min(before)
    return Change(key, phase, classify(ratio, low, high), ratio)


def classify(ratio: float, low: float, high: float) -> str:
    """low, high: the extreme ratios of the two runs' windows."""
    if high < 1 - BAND:
        return "faster"
    if low > 1 + BAND:
        return "slower"
    if 1 - BAND <= ratio <= 1 + BAND:
        return "same"
    return "unclear"


def summary(changes: Iterable[Change]) -> str:
    """How many of each."""
    verdicts = [change.verdict for change in changes]
    return ", ".join(f"{verdicts.count(name)} {name}" for name in ("faster", "same", "slower", "unclear"))


def worse(changes: Iterable[Change]) -> bool:
    """Whether a row became slower, or was ok and no longer is."""
    return any(change.verdict == "slower" or change.broken for change in changes)
