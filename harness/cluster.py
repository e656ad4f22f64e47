"""Sweeps over many GPUs and hosts with Dask: which workers there are, which cards, and who measures together.

Dask schedules, retries and shows (its dashboard); this module says what a task is and keeps what comes back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import dask
from distributed import Client, KilledWorker, Nanny, Scheduler, SpecCluster

from harness import comparison, remote, stamp
from harness.record import Row
from harness.remote import Cards, Task
from harness.statistic import geometric_mean

GPU_LAB = "harness.lab:GpuLab"
# A wall that moves by more than this once the host's other GPUs are busy is marked.
SHARED = 0.10
# How many cases are tried for one that every card can run.
PROBES = 3
# How long a client waits for a scheduler and its first worker.
PATIENCE_S = 60.0
Echo = Callable[[str], None]


class NoWorkers(RuntimeError):
    """No worker answers or can measure, or there are fewer GPUs than workers were asked for."""


@dataclass(frozen=True)
class Card:
    """One worker's card."""

    address: str
    gpu: str
    uuid: str
    host: str
    stamps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass
class Group:
    """Cards whose rows may stand in one record: one kind, one software, and `compare` sees no difference."""

    name: str
    resource: str
    cards: list[Card]


def devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU of this machine that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch

    # Counted without making a context, which would take memory on the first card.
    return [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def connect(workers: str | int, found: Sequence[str] | None = None, patience_s: float = PATIENCE_S) -> Iterator[Client]:
    """A client of the scheduler at an address, or of a scheduler of its own with a worker for each of N GPUs.

    found: the GPUs' names for CUDA_VISIBLE_DEVICES; this machine's by default. Raises NoWorkers.
    """
    if not str(workers).isdigit():
        with attach(str(workers), patience_s) as client:
            yield client
        return
    found = devices() if found is None else found
    wanted = int(workers)
    if not 1 <= wanted <= len(found):
        raise NoWorkers(f"--workers {wanted}: this machine has {len(found)} GPUs that PyTorch can use")
    spec = {
        index: {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                # A worker's own memory is small; Dask's limit would only kill a case that is legitimately large.
                "memory_limit": 0,
                "resources": {"GPU": 1},
                "env": {"CUDA_VISIBLE_DEVICES": name},
                "silence_logs": 50,
            },
        }
        for index, name in enumerate(found[:wanted])
    }
    # Loopback: nobody else is to reach this scheduler.
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}}
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        with SpecCluster(workers=spec, scheduler=scheduler, silence_logs=50) as cluster, Client(cluster) as client:
            client.wait_for_workers(wanted, timeout=patience_s)
            yield client


def attach(address: str, patience_s: float = PATIENCE_S) -> Client:
    """A client of a running scheduler that has a worker; NoWorkers where it has none or does not answer."""
    client = None
    try:
        client = Client(address, timeout=patience_s)
        client.wait_for_workers(1, timeout=patience_s)
        client.run_on_scheduler(_report_deaths)
    except (OSError, TimeoutError) as error:
        if client is not None:
            client.close(timeout=1)
        raise NoWorkers(f"{address}: no scheduler with a worker answers within {patience_s:.0f} s") from error
    return client


def _report_deaths(dask_scheduler: Any) -> None:
    """A case whose worker died comes back at once; given to a busy worker, it could die of that one's case."""
    dask_scheduler.allowed_failures = 0


def resources(client: Client) -> dict[str, dict[str, float]]:
    """Each worker's resources."""
    found: dict[str, dict[str, float]] = client.run_on_scheduler(_resources)
    return found


def _resources(dask_scheduler: Any) -> dict[str, dict[str, float]]:
    return {address: dict(worker.resources) for address, worker in dask_scheduler.workers.items()}


def ask(client: Client, lab: str, addresses: Sequence[str], method: str, *arguments: Any) -> dict[str, Any]:
    """Each worker's answer, asked at the same time."""
    futures = [
        client.submit(remote.ask, lab, method, *arguments, workers=[each], resources={"GPU": 1}, pure=False)
        for each in addresses
    ]
    try:
        return dict(zip(addresses, client.gather(futures), strict=True))
    except (RuntimeError, KilledWorker) as error:
        raise NoWorkers(f"a worker cannot measure: {error}") from error


def survey(client: Client, lab: str, families: Sequence[str], allow_busy: bool) -> list[Card]:
    """Which card each worker has; the workers' resources name it from now on."""
    client.register_plugin(Cards(lab), name=Cards.name)
    addresses = list(resources(client))
    found = ask(client, lab, addresses, "identity")
    stamps = ask(client, lab, addresses, "stamps", tuple(families), allow_busy)
    cards = sorted((Card(each, stamps=stamps[each], **found[each]) for each in addresses), key=lambda card: card.uuid)
    doubled = {card.uuid for card in cards if [other.uuid for other in cards].count(card.uuid) > 1}
    if doubled:
        raise NoWorkers(f"several workers share the card {', '.join(sorted(doubled))}: start one per GPU")
    return cards


def groups(cards: Sequence[Card], apart: Mapping[str, str]) -> list[Group]:
    """Cards of one kind together, each card of `apart` by itself."""
    made: dict[str, Group] = {}
    for card in cards:
        alone = card.uuid in apart
        name = stamp.slug(card.gpu) + (f"-{card.uuid.removeprefix('GPU-')[:8]}" if alone else "")
        resource = remote.single(card.uuid) if alone else remote.kind(card.gpu)
        made.setdefault(name, Group(name, resource, [])).cards.append(card)
    return list(made.values())


def other_software(cards: Sequence[Card]) -> dict[str, str]:
    """{UUID: why} of cards whose driver, packages or kernel sources are not those of the first of their kind."""
    first: dict[str, Card] = {}
    apart = {}
    for card in cards:
        base = first.setdefault(card.gpu, card)
        changed = [
            name
            for family, meta in card.stamps.items()
            for name in stamp.IDENTITY
            if meta.get(name) != base.stamps[family].get(name)
        ]
        if changed:
            apart[card.uuid] = f"another {', '.join(dict.fromkeys(changed))} than {base.uuid}"
    return apart


def differing(cards: Sequence[Card], rows: Mapping[str, list[Row]]) -> dict[str, str]:
    """{UUID: why} of cards that `compare` sees faster, or slower, than the first of their kind on the same case.

    On most arms and phases: one short kernel's windows alone can differ by chance.
    """
    first: dict[str, Card] = {}
    apart = {}
    for card in cards:
        base = first.setdefault(card.gpu, card)
        changes = comparison.compare_rows(rows[base.uuid], rows[card.uuid])
        told = [change.verdict for change in changes if change.verdict in ("faster", "slower")]
        if any(2 * told.count(verdict) > len(changes) for verdict in set(told)):
            apart[card.uuid] = f"against {base.uuid}: {comparison.summary(changes)}"
    return apart


def contention(alone: Sequence[Row], busy: Sequence[Row]) -> dict[str, float] | None:
    """How much longer the same case takes with all GPUs busy: geometric means over arms and phases, by clock."""
    before = {row["backend"]: row for row in alone if row["status"] == "ok"}
    pairs = [
        (before[row["backend"]][phase], row[phase])
        for row in busy
        if row["status"] == "ok" and row["backend"] in before
        for phase in comparison.PHASES
    ]
    if not pairs:
        return None
    return {
        "wall": geometric_mean([median(b["wall_us"]) / median(a["wall_us"]) for a, b in pairs]),
        "dev": geometric_mean([min(b["dev_us"]) / min(a["dev_us"]) for a, b in pairs]),
    }


def probe(
    client: Client, lab: str, cards: Sequence[Card], known: Mapping[str, Any], tasks: Sequence[Task]
) -> tuple[dict[str, list[Row]], dict[str, dict[str, Any]]]:
    """One case alone on each host and then on every card at once: {UUID: rows}, and each host's contention.

    The first of some cases that comes to a time on every card; the compile arm is left out, since it takes longest and
    what is compared is cards and hosts.
    """
    firsts = {card.host: card for card in reversed(cards)}
    for task in tasks[:PROBES]:
        light = replace(task, backends=tuple(b for b in task.backends if b != "compile") or task.backends)
        alone = _measure(client, lab, list(firsts.values()), known, light)
        busy = _measure(client, lab, cards, known, light)
        if all(any(row["status"] == "ok" for row in rows) for rows in busy.values()):
            break
    shared = {}
    for host, card in firsts.items():
        count = sum(each.host == host for each in cards)
        ratios = contention(alone[card.uuid], busy[card.uuid]) if count > 1 else None
        if ratios is not None:
            differs = abs(ratios["wall"] - 1) > SHARED
            shared[host] = {**ratios, "gpus": count, "case": f"{task.op} {task.case}", "differs": differs}
    return busy, shared


def _measure(
    client: Client, lab: str, cards: Sequence[Card], known: Mapping[str, Any], task: Task
) -> dict[str, list[Row]]:
    """The case's rows on each of these cards at the same time; none where its worker died."""
    futures = {
        # By its card, since a worker that starts again has another address.
        card.uuid: client.submit(
            remote.measure, lab, known, task, resources={"GPU": 1, remote.single(card.uuid): 1}, pure=False
        )
        for card in cards
    }
    return {uuid: [] if future.exception() else future.result() for uuid, future in futures.items()}
