"""Two recorded runs row by row: is the second faster, the same or slower, or do the windows not tell?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import record, stamp
from harness.record import ForeignGpu, MixedSchemas, Record, RecordError, Row, row_key
from harness.statistic import row_ratio
from harness.steps import plain

# A change inside this band is the same. In the middle between no change and the 10 % that has to be found, less what the
# windows of a run scatter by (3 % in the noisiest of the rows recorded on an H200).
BAND = 0.04
# The profiler's clock steps by 32 ns, and a time is a difference of two readings: that much is no change either.
RESOLUTION_US = 0.064
PHASES = ("fwd", "fwdbwd")
VERDICTS = ("faster", "same", "slower", "unclear")
PREVIOUS = "previous"  # the folder beside a card's records where a sweep sets aside the run that it replaces
# Arms that are PyTorch's own: where they moved, the card or the software did.
CONTROL = ("eager", "compile")


@dataclass(frozen=True)
class Change:
    """One row's phase in both runs.

    ratio: the second's best device time over the first's, below 1 is faster; low, high: its 95 % interval.
    broken: the row was ok and no longer is. alone: "first" or "second", where only that run has the row.
    """

    key: tuple[str, ...]
    phase: str
    verdict: str
    ratio: float | None = None
    note: str = ""
    broken: bool = False
    low: float | None = None
    high: float | None = None
    alone: str = ""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"  {self.ratio:.3f}"
        span = "" if self.low is None or self.high is None else f" [{self.low:.3f}–{self.high:.3f}]"
        note = f"  {self.note}" if self.note else ""
        return f"{self.verdict:8}{' '.join(self.key)} {self.phase}{ratio}{span}{note}"


def compare(a: str | Path, b: str | Path, *, foreign: bool = False) -> list[Change]:
    """Every row of two runs, files or folders of them; a file beside a folder is compared with the one of its name there.

    Raises:
        ForeignGpu: runs of two cards, unless `foreign` is set. MixedSchemas: files of two schemas, likewise. RecordError:
            no row is in both, or a file that holds no run's rows.
    """
    first, second = _both(a, b)
    changes: list[Change] = []
    for name in dict.fromkeys([*first, *second]):
        one, two = first.get(name, Record({})), second.get(name, Record({}))
        if not foreign:
            _refuse_unlike(name, [run for run in (one, two) if run.meta])
        changes += compare_rows(one.rows, two.rows)
    if all(change.alone for change in changes):
        raise RecordError(f"{a} and {b} have no row in common")
    return changes


def _refuse_unlike(name: str, runs: Sequence[Record]) -> None:
    cards = sorted({str(run.meta["gpu"]) for run in runs})
    if len(cards) > 1:
        raise ForeignGpu(f"{name}: runs of {' and '.join(cards)}; --foreign compares all the same")
    schemas = sorted({run.schema for run in runs})
    if len(schemas) > 1:
        both = " and ".join(map(str, schemas))
        raise MixedSchemas(f"{name}: files of schema {both}, which may mean other things by a key; --foreign compares")


def compare_rows(a: Iterable[Row], b: Iterable[Row]) -> list[Change]:
    """Every row of two runs, by its key."""
    rows_a, rows_b = ({row_key(row): row for row in rows} for rows in (a, b))
    keys = dict.fromkeys([*rows_a, *rows_b])
    return [_change(key, phase, rows_a.get(key), rows_b.get(key)) for key in keys for phase in PHASES]


def _both(a: str | Path, b: str | Path) -> tuple[dict[str, Record], dict[str, Record]]:
    """Runs by the name to match them by: of two files, which may be called differently, the first's."""
    first, second = Path(a), Path(b)
    if first.is_file() and second.is_file():
        (other,) = record.load_families(second).values()
        return record.load_families(first), {first.stem: other}
    if first.is_file():
        second /= first.name
    elif second.is_file():
        first /= second.name
    return record.load_families(first), record.load_families(second)


def _change(key: tuple[str, ...], phase: str, a: Row | None, b: Row | None) -> Change:
    if a is None or b is None:
        which = "second" if a is None else "first"
        return Change(key, phase, "unclear", note=f"only in the {which} run", alone=which)
    if a["status"] != "ok" or b["status"] != "ok":
        note = f"{a['status']} → {b['status']}" + (f" ({b['reason']})" if b["reason"] else "")
        return Change(key, phase, "unclear", note=note, broken=a["status"] == "ok")
    before, after = a[phase]["dev_us"], b[phase]["dev_us"]
    found = row_ratio(after, before)
    band = max(BAND, RESOLUTION_US / min(before))
    flags = [flag for flag in ("noisy", "throttled") if a[flag] or b[flag]]
    verdict = classify(found.value, found.low, found.high, band)
    return Change(key, phase, verdict, found.value, ", ".join(flags), low=found.low, high=found.high)


def classify(ratio: float, low: float, high: float, band: float = BAND) -> str:
    """low, high: the ratio's interval; a change counts where all of it lies outside the band around 1."""
    if high < 1 - band:
        return "faster"
    if low > 1 + band:
        return "slower"
    if 1 - band <= ratio <= 1 + band:
        return "same"
    return "unclear"


def differences(a: str | Path, b: str | Path, changes: Iterable[Change]) -> list[str]:
    """What else is not the same in the two runs: software, sources, the state of their trees, PyTorch's own arms."""
    runs = [list(found.values()) for found in _both(a, b)]
    lines = []
    for name in ("gpu", *(name for name in stamp.IDENTITY if name not in ("gpu", "kernels_sha256"))):
        both = [", ".join(sorted({str(run.meta.get(name)) for run in some})) for some in runs]
        if both[0] != both[1]:
            lines.append(f"{name}: {both[0]} → {both[1]}")
    for which, some in zip(("first", "second"), runs, strict=True):
        found = dict.fromkeys(label for run in some for label in stamp.labels(run.meta))
        lines += [f"{which} run: {label}" for label in found]
    control = [c.ratio for c in changes if c.ratio is not None and plain(c.key[-1]) in CONTROL]
    if control:
        lines.append(f"PyTorch's own arms: median ratio {median(control):.3f} over {len(control)} times")
    return lines


def report(changes: Iterable[Change]) -> list[str]:
    """A line for each change, and the `alone` ones."""
    changes = list(changes)
    return [str(change) for change in changes if not change.alone] + alone(changes)


def alone(changes: Sequence[Change]) -> list[str]:
    """A line for the times that only the first of the runs has, and one for the second's."""
    lines = []
    for which in ("first", "second"):
        kinds = [change.key[2] for change in changes if change.alone == which]
        if kinds:
            lines.append(f"{len(kinds)} times only in the {which} run ({', '.join(dict.fromkeys(kinds))})")
    return lines


def summary(changes: Iterable[Change]) -> str:
    """How many of each of the times that both runs have, and the share that moved of those that could be told."""
    verdicts = [change.verdict for change in changes if not change.alone]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in VERDICTS)
    moved = verdicts.count("faster") + verdicts.count("slower")
    told = len(verdicts) - verdicts.count("unclear")
    return f"{counts}; {moved / told:.1%} moved" if told else counts


def worse(changes: Iterable[Change]) -> bool:
    """Whether a row became slower, or was ok and no longer is."""
    return any(change.verdict == "slower" or change.broken for change in changes)
