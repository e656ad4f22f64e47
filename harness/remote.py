"""What runs inside a Dask worker: it keeps one measuring process and asks it, one question at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Worker, WorkerPlugin

from harness.child import Child, DeadCard
from harness.record import Row, blank_row

# A case takes well under a minute; one that takes this long hangs.
LIMIT_S = 1800.0
_children: dict[str, Child] = {}


@dataclass(frozen=True)
class Task:
    """One case with the arms to measure; plain values, so that it can be sent anywhere."""

    family: str
    op: str
    case: str
    dims: tuple[tuple[str, int], ...]
    dtype: str
    backends: tuple[str, ...]

    def failed(self, backends: tuple[str, ...], reason: str) -> list[Row]:
        """A row for each of these arms that says why there is no time."""
        rows = (blank_row(self.op, self.case, self.dtype, backend, dict(self.dims)) for backend in backends)
        return [row | {"status": "failed", "reason": reason} for row in rows]


def ask(lab: str, method: str, *arguments: Any) -> Any:
    """What this worker's measuring process answers; it is started where there is none."""
    return _children.setdefault(lab, Child(lab)).ask(method, *arguments, limit_s=LIMIT_S)


def measure(lab: str, known: Mapping[str, Any], task: Task) -> list[Row]:
    """The case's rows, each with the card that it comes from; `known` holds each card's ceilings by UUID.

    An arm that kills the card costs itself; the others go on in a new process. A crash of the process costs the case.
    """
    card = ask(lab, "identity")
    ceilings = known[card["uuid"]]
    rows: list[Row] = []
    wanted = task.backends
    while wanted:
        try:
            found = ask(lab, "measure", ceilings, task.op, task.case, task.dtype, wanted)
        except DeadCard as error:
            found = error.rows or task.failed(wanted, str(error))
        except RuntimeError as error:  # Died, or what the lab raised
            found = task.failed(wanted, str(error))
        rows += found
        there = {row["backend"] for row in found}
        wanted = tuple(backend for backend in wanted if backend not in there)
    for row in rows:
        row["uuid"], row["host"] = card["uuid"], card["host"]
    return rows


def kind(gpu: str) -> str:
    """The Dask resource of every worker with this kind of card."""
    return f"KIND {gpu}"


def single(uuid: str) -> str:
    """The Dask resource of the worker with this one card."""
    return f"CARD {uuid}"


class Cards(WorkerPlugin):
    """Gives each worker resources that name its card, also a worker that starts late or again.

    members: UUIDs of the cards that measure with the others of their kind; all by default.
    """

    name = "cards"
    idempotent = False

    def __init__(self, lab: str, members: frozenset[str] | None = None) -> None:
        self.lab = lab
        self.members = members

    async def setup(self, worker: Worker) -> None:
        """Asks the card who it is; the worker's event loop must go on meanwhile."""
        card = await asyncio.to_thread(ask, self.lab, "identity")
        together = int(self.members is None or card["uuid"] in self.members)
        before = dict.fromkeys(
            (each for each in worker.state.total_resources if each.startswith(("KIND ", "CARD "))), 0
        )
        await worker.set_resources(**{**before, "GPU": 1, kind(card["gpu"]): together, single(card["uuid"]): 1})

    def teardown(self, worker: Worker) -> None:
        """Ends the measuring process, unless the plugin's successor goes on with it."""
        if worker.status.name in ("closing", "closed", "closing_gracefully"):
            for child in _children.values():
                child.close()
