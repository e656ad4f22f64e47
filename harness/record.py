"""Recorded runs: `{"schema": 1, "meta": {...}, "rows": [...]}`, strict JSON, written atomically.

A row is one (op, case, dtype, backend); `blank_row` lists its keys. What was not measured is null, never NaN.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
STATUSES = ("ok", "unsupported", "failed", "invalid")
KEY = ("op", "case", "dtype", "backend")
Row = dict[str, Any]


class RecordError(RuntimeError):
    """A file that is not a recorded run; the message says what is wrong with it."""


class TruncatedRecord(RecordError):
    """A file that ends before its JSON does."""


class FutureSchema(RecordError):
    """A file that a newer version of this project wrote."""


class ForeignGpu(RecordError):
    """A file that another card's run wrote."""


class MixedSchemas(RecordError):
    """Files of two schemas, which are not to be set side by side unawares."""


@dataclass
class Record:
    """One recorded run: what it depends on, its rows, and the schema that its file was written in."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    path: Path | None = None
    schema: int = SCHEMA

    def find(self, key: tuple[str, ...]) -> Row | None:
        """The row of (op, case, dtype, backend), or None."""
        return next((row for row in self.rows if row_key(row) == key), None)

    def put(self, rows: Iterable[Row]) -> None:
        """Adds rows, each in place of an older one with the same key."""
        index = {row_key(row): i for i, row in enumerate(self.rows)}
        for row in rows:
            at = index.get(row_key(row))
            if at is None:
                index[row_key(row)] = len(self.rows)
                self.rows.append(row)
            else:
                self.rows[at] = row

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all: a reader or a crash never meets half of one."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(dumps(self))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def row_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """(op, case, dtype, backend)."""
    return tuple(row[name] for name in KEY)


def blank_row(op: str, case: str, dtype: str, backend: str, dims: Mapping[str, int]) -> Row:
    """A row with every key, nothing measured yet.

    `ulp` is the worst over the output (`ulp_out`) and every gradient (`ulp_grads`).
    """
    row: Row = {"op": op, "case": case, "dtype": dtype, "backend": backend, "dims": dict(dims)}
    names = (
        "status reason fwd fwdbwd vram_fwd vram_fwdbwd bytes_read bytes_written flops floor_us l2_resident "
        "ulp ulp_out ulp_grads rel_err clock_mhz throttled noisy tf32"
    )
    return {**row, **dict.fromkeys(names.split())}


def strict(value: Any) -> Any:
    """The value as strict JSON can hold it: NaN and infinities become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def dumps(record: Record) -> str:
    """The file's text: indented meta and one line a row, so that a diff shows which rows changed."""
    meta = json.dumps(strict(record.meta), indent=1, allow_nan=False)
    rows = ",\n".join(json.dumps(strict(row), allow_nan=False) for row in record.rows)
    return f'{{"schema": {SCHEMA},\n"meta": {meta},\n"rows": [\n{rows}\n]}}\n'


def load(path: str | os.PathLike[str], *, gpu: str | None = None) -> Record:
    """Reads a recorded run.

    Args:
        path: the file.
        gpu: refuse a file of any other card.

    Raises:
        FileNotFoundError, TruncatedRecord, FutureSchema, ForeignGpu, or RecordError for any other bad file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not a text file: {error}") from error
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) - 1 or not text.rstrip().endswith("}"):
            raise TruncatedRecord(
                f"{path}: ends in the middle of its JSON (line {error.lineno}); restore or delete it"
            ) from error
        raise RecordError(f"{path}: not JSON: {error}") from error
    except ValueError as error:
        raise RecordError(f"{path}: not strict JSON: {error}") from error
    _check(path, data)
    if gpu is not None and data["meta"].get("gpu") != gpu:
        raise ForeignGpu(f"{path}: recorded on {data['meta'].get('gpu')}, this is {gpu}; the two are never merged")
    return Record(data["meta"], data["rows"], path, data["schema"])


def load_dir(folder: str | os.PathLike[str]) -> dict[str, Record]:
    """Every recorded run of a folder by its file's stem ("lora", "ceilings"); FileNotFoundError where there is none."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise FileNotFoundError(f"{folder}: holds no recorded run (*.json)")
    return {path.stem: load(path) for path in paths}


def load_families(path: str | os.PathLike[str]) -> dict[str, Record]:
    """Families' runs by name: a folder's, without its ceilings.json, or a file's own.

    Raises what `load` and `load_dir` do, and RecordError for a file of a card's own measurements.
    """
    path = Path(path)
    if not path.is_file():
        return {name: run for name, run in load_dir(path).items() if name != "ceilings"}
    run = load(path)
    if any("op" not in row or "backend" not in row for row in run.rows):
        raise RecordError(f"{path}: holds a card's own measurements, and no family's rows")
    return {path.stem: run}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not strict JSON")


def _check(path: Path, data: Any) -> None:
    if not isinstance(data, dict) or "schema" not in data:
        raise RecordError(f"{path}: not a recorded run: no schema")
    schema = data["schema"]
    if not isinstance(schema, int) or schema < 1:
        raise RecordError(f"{path}: schema {schema!r}, wanted {SCHEMA}")
    if schema > SCHEMA:
        raise FutureSchema(f"{path}: schema {schema}, this version reads up to {SCHEMA}; update the project")
    if not isinstance(data.get("meta"), dict) or not isinstance(data.get("rows"), list):
        raise RecordError(f"{path}: not a recorded run: needs meta and rows")
