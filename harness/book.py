"""A record that outlives a full disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.record import Record, Row

Echo = Callable[[str], None]


@dataclass
class Book:
    """A record that is written after each case; where that fails its rows wait in memory for the next time."""

    path: Path
    run: Record
    unsaved: bool = False

    def put(self, rows: Sequence[Row], echo: Echo) -> None:
        """Adds rows and writes the file."""
        self.run.put(rows)
        self.save(echo)

    def save(self, echo: Echo) -> bool:
        """Whether the file now holds every row; on a full disk the old file stays whole."""
        try:
            self.run.save(self.path)
        except OSError as error:
            self.unsaved = True
            echo(f"{self.path}: {error.strerror or error}; its rows are kept in memory, and written with the next case")
            return False
        self.unsaved = False
        return True
