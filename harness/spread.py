"""A sweep over Dask workers: what is missing goes out a case at a time, and each case is on disk as soon as it is back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

from distributed import CancelledError, Client, Future, KilledWorker
from distributed.comm import CommClosedError

from harness import cluster, remote, stamp, sweeper
from harness.book import Book
from harness.cluster import GPU_LAB, PATIENCE_S, Echo, Group
from harness.measure import BACKENDS
from harness.record import Record, Row
from harness.remote import Cards, Task
from harness.sweeper import Selection
from kernels.registry import Op, families


class LostScheduler(RuntimeError):
    """The scheduler went away and did not come back; finished cases are kept, and the same command goes on."""


@dataclass
class Work:
    """One group's records and the cases that are still to be measured."""

    group: Group
    books: dict[str, Book]
    todo: deque[Task]
    known: dict[str, Any] = field(default_factory=dict)
    # Cases whose worker died.
    again: set[Task] = field(default_factory=set)


@dataclass
class Job:
    """What one sweep over workers was asked for."""

    lab: str
    selections: Mapping[str, Selection]
    out: Path | None
    retry: bool
    echo: Echo
    members: frozenset[str] | None = None


def sweep(
    workers: str | int,
    family: str | None = None,
    dtype: str = "fp16",
    out: str | Path | None = None,
    *,
    case: str = "*",
    op: str | None = None,
    backends: Sequence[str] = BACKENDS,
    jobs: int | None = None,
    retry: bool = False,
    allow_busy: bool = False,
    echo: Echo = print,
    lab: str = GPU_LAB,
    chosen: Mapping[str, Sequence[Op]] | None = None,
    found: Sequence[str] | None = None,
    patience_s: float = PATIENCE_S,
) -> list[Path]:
    """Measures what is missing on many GPUs, and returns a folder of records for each group of like cards.

    Args:
        workers: how many GPUs of this machine, or the address of a Dask scheduler ("tcp://host:8786").
        family, dtype, case, op, backends, jobs, retry, allow_busy, echo: as in `sweeper.sweep`.
        out: the folder, with a folder for each group in it where there are several; data/<gpu> by default.
        lab: what measures in the workers' processes.
        chosen: the families' ops; the registry's by default.
        found: what CUDA_VISIBLE_DEVICES calls this machine's GPUs.
        patience_s: how long to wait for a scheduler that does not answer, and for a full disk.

    Raises:
        NoWorkers, LostScheduler, OSError where the records could not be written to the end, or a RecordError.
    """
    chosen = chosen or families()
    wanted = {name: ops for name, ops in chosen.items() if family in (None, name)}
    selections = {
        name: Selection(tuple(o for o in ops if op in (None, o.name)), stamp.dtype_names(dtype), tuple(backends), case)
        for name, ops in wanted.items()
    }
    job = Job(lab, selections, Path(out) if out else None, retry, echo)
    with cluster.connect(workers, found, patience_s) as client:
        if client.dashboard_link:
            echo(f"dashboard: {client.dashboard_link}")
        work = _prepare(client, job, allow_busy, jobs)
        _run(client, job, work, None if str(workers).isdigit() else str(workers), patience_s)
    return [_folder(job, each.group, len(work)) for each in work]


def _prepare(client: Client, job: Job, allow_busy: bool, jobs: int | None) -> list[Work]:
    """Which cards measure together, what each group still lacks, and each card's ceilings."""
    cards = cluster.survey(client, job.lab, tuple(job.selections), allow_busy)
    apart = cluster.other_software(cards)
    work = _open(job, cluster.groups(cards, apart))
    todo = [task for each in work for task in each.todo]
    if not todo:
        job.echo("every row is there already")
        return work
    hosts = {card.host: card.address for card in reversed(cards)}
    if jobs != 0:
        kernels = [(t.op, t.case, t.dtype, backend) for t in dict.fromkeys(todo) for backend in t.backends]
        counts = cluster.ask(client, job.lab, list(hosts.values()), "prebuild", kernels, jobs)
        job.echo(f"prebuild: {next(iter(counts.values()))} on each of {len(hosts)} hosts")
    known = {uuid: ceilings for each in work for uuid, ceilings in each.known.items()}
    measured = cluster.ask(client, job.lab, [c.address for c in cards if c.uuid not in known], "ceilings")
    rows = {card.uuid: measured[card.address][1] for card in cards if card.address in measured}
    known |= {card.uuid: measured[card.address][0] for card in cards if card.address in measured}
    shared: dict[str, dict[str, Any]] = {}
    if len(cards) > 1:
        busy, shared = cluster.probe(client, job.lab, cards, known, todo)
        differing = cluster.differing([card for card in cards if card.uuid not in apart], busy)
        if differing:
            apart |= differing
            work = _open(job, cluster.groups(cards, apart))
        for uuid, why in apart.items():
            job.echo(f"{uuid} measures by itself: {why}")
        for host, ratios in shared.items():
            job.echo(f"{host}, {ratios['gpus']} GPUs busy: wall × {ratios['wall']:.2f}, device × {ratios['dev']:.2f}")
    # A card that joins later was not compared with its kind, so it gets no case.
    job.members = frozenset(card.uuid for card in cards if card.uuid not in apart)
    client.register_plugin(Cards(job.lab, job.members), name=Cards.name)
    for each in work:
        _note(job, each, known, rows, shared, len(work))
    return work


def _folder(job: Job, group: Group, count: int) -> Path:
    if job.out is None:
        return stamp.DATA / group.name
    return job.out if count == 1 else job.out / group.name


def _open(job: Job, groups: Sequence[Group]) -> list[Work]:
    """Each group's records, resumed where they are there already."""
    made = []
    for group in groups:
        work = Work(group, {}, deque())
        for name, selection in job.selections.items():
            path = _folder(job, group, len(groups)) / f"{name}.json"
            run = sweeper.resume(path, {**group.cards[0].stamps[name], "argv": stamp.argv()}, job.echo)
            work.books[name] = Book(path, run)
            if run.rows:
                cards = run.meta.get("cards", {})
                work.known |= {uuid: card["ceilings"] for uuid, card in cards.items()}
            for op, case, dtype, backends in sweeper.missing(run, selection, job.retry):
                work.todo.append(Task(name, op.name, case.name, tuple(case.dims.items()), dtype, backends))
        made.append(work)
    return made


def _note(
    job: Job, work: Work, known: Mapping[str, Any], rows: Mapping[str, list[Row]], shared: Mapping[str, Any], count: int
) -> None:
    """Writes which cards and hosts a record's rows come from, and the ceilings' own record."""
    cards = work.group.cards
    work.known = dict(known)
    first = known[cards[0].uuid]
    for book in work.books.values():
        for card in cards:
            book.run.meta.setdefault("cards", {})[card.uuid] = {"host": card.host, "ceilings": known[card.uuid]}
        book.run.meta.setdefault("ceilings", first)
        hosts = {card.host for card in cards}
        book.run.meta["contention"] = {host: found for host, found in shared.items() if host in hosts}
    found = [{**row, "uuid": card.uuid} for card in cards for row in rows.get(card.uuid, ())]
    path = _folder(job, work.group, count) / "ceilings.json"
    if found or not path.exists():
        meta = {**next(iter(work.books.values())).run.meta, "ceilings": first}
        meta.pop("kernels_sha256", None)
        new = {row["uuid"] for row in found}
        before = [row for row in sweeper.resume(path, meta, job.echo).rows if row.get("uuid") not in new]
        Book(path, Record(meta, [*before, *found])).save(job.echo)


def _run(client: Client, job: Job, work: Sequence[Work], address: str | None, patience_s: float) -> None:
    """Sends out and takes in until nothing is missing; a scheduler that comes back is sent what it lost."""
    try:
        while not _post(client, job, work, patience_s):
            if address is None:
                raise LostScheduler("the scheduler is gone; the same command goes on from here")
            job.echo("the scheduler is gone: finished cases are kept, waiting for it to come back")
            client.close(timeout=1)
            client = _again(address, job, patience_s)
    finally:
        if address is not None:
            client.close(timeout=1)
        _settle(job, work, patience_s)


def _again(address: str, job: Job, patience_s: float) -> Client:
    """A new client of the scheduler, whose workers say their cards again; the old one can't be told what was lost."""
    try:
        client = cluster.attach(address, patience_s)
    except cluster.NoWorkers as error:
        raise LostScheduler(f"{error}; the same command goes on from here") from error
    client.register_plugin(Cards(job.lab, job.members), name=Cards.name)
    return client


def _settle(job: Job, work: Sequence[Work], patience_s: float) -> None:
    """Writes what a full disk refused, waiting for room; OSError where there is none."""
    for book in (book for each in work for book in each.books.values() if book.unsaved):
        end = time.monotonic() + patience_s
        while not book.save(job.echo):
            if time.monotonic() > end:
                raise OSError(f"{book.path} could not be written; the cases since its last write are lost")
            time.sleep(min(1.0, patience_s / 4))


def _post(client: Client, job: Job, work: Sequence[Work], patience_s: float) -> bool:
    """Keeps every worker at one case; False where the scheduler was lost, with all that is missing back in `todo`."""
    active: dict[Future, tuple[Work, Task]] = {}
    news = Event()
    total = sum(len(each.todo) for each in work)
    started = seen = time.monotonic()
    count = 0
    try:
        while active or any(each.todo for each in work):
            held = cluster.resources(client)
            if held or active:
                seen = time.monotonic()
            elif time.monotonic() - seen > patience_s:
                raise cluster.NoWorkers("no worker is left; finished cases are kept")
            for each in work:
                _send(client, job, each, active, news, sum(r.get(each.group.resource, 0) > 0 for r in held.values()))
            # The timeout is for what no future tells: a worker that joined, a scheduler that is gone.
            news.wait(timeout=1)
            news.clear()
            for future in [future for future in active if future.status != "pending"]:
                if future.status in ("cancelled", "lost"):
                    return False
                each, task = active[future]
                rows = _rows(future, each, task)
                del active[future]
                if rows is None:
                    each.again.add(task)
                    each.todo.append(task)
                    job.echo(f"{task.op} {task.case}: its worker died; once more elsewhere")
                    continue
                each.books[task.family].put(rows, job.echo)
                count += 1
                spent = time.monotonic() - started
                left = f"{spent:6.1f} s, about {spent / count * (total - count):.0f} s left"
                where = f"{rows[0].get('host', '?')} {str(rows[0].get('uuid', '?'))[:12]}"
                job.echo(f"[{count:3}/{total}] {sweeper.progress(rows)}  {where}  {left}")
    except (CommClosedError, CancelledError, TimeoutError) as error:
        if client.status == "running" and isinstance(error, TimeoutError):
            raise
        return False
    finally:
        for each, task in active.values():
            each.todo.appendleft(task)
        if client.status == "running":
            client.cancel(list(active))
    return True


def _send(
    client: Client, job: Job, work: Work, active: dict[Future, tuple[Work, Task]], news: Event, workers: int
) -> None:
    """One case a worker and no more: a worker that dies takes nothing else with it."""
    out = sum(each is work for each, _ in active.values())
    while work.todo and out < workers:
        task = work.todo.popleft()
        wanted = {"GPU": 1, work.group.resource: 1}
        name = f"{task.op} {task.case} {task.dtype}"
        future = client.submit(
            remote.measure, job.lab, work.known, task, resources=wanted, pure=False, key=f"{name} {uuid4().hex}"
        )
        future.add_done_callback(lambda _: news.set())
        active[future] = (work, task)
        out += 1


def _rows(future: Future, work: Work, task: Task) -> list[Row] | None:
    """The case's rows, marked where other GPUs' work lengthens the host's walls; failed ones where it came to nothing.

    None where its worker died for the first time.
    """
    error = future.exception() if future.status == "error" else None
    if isinstance(error, KilledWorker):
        if task not in work.again:
            return None
        return task.failed(task.backends, "the worker died while it measured this, and so did the next one")
    if error is not None:
        return task.failed(task.backends, str(error))
    rows: list[Row] = future.result()
    for row in rows:
        shared = work.books[task.family].run.meta.get("contention", {}).get(row["host"])
        row["wall_contended"] = bool(shared and shared["differs"])
    return rows
