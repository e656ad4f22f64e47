"""Compiles kernels in many processes before anything is timed, so that the sweep finds them in the disk caches.

Workers take (op, case, dtype, backend) from one queue and run each once, forward alone and with backward. What a worker
can't run is only counted here: the sweep meets it again and makes it a row.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

import torch

from harness.stamp import DTYPES
from harness.steps import plain

# A CUDA context and the largest case's tensors.
WORKER_BYTES = 2 * 2**30
Task = tuple[str, str, str, str]


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prebuild(tasks: Sequence[Task], *, jobs: int | None = None, echo: Callable[[str], None] = print) -> dict[str, int]:
    """Runs every task once in `jobs` processes (the number of CPUs by default); {"built", "failed", "lost"} counts.

    A worker that dies takes only its task with it: those kernels are compiled when the sweep meets them.
    """
    # A graphed arm runs its plain arm's kernels.
    tasks = [task for task in dict.fromkeys((*task[:3], plain(task[3])) for task in tasks) if task[3] != "eager"]
    tasks = _ordered(tasks)
    jobs = max(1, min(jobs or cpu_count(), len(tasks), _room()))
    started = time.monotonic()
    outcomes = _in_processes(tasks, jobs) if jobs > 1 else [run_task(task, _device()) for task in tasks]
    counts = {
        "built": sum(outcome is None for outcome in outcomes),
        "failed": sum(outcome is not None for outcome in outcomes),
        "lost": len(tasks) - len(outcomes),
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing to build"
    echo(f"prebuild: {text} in {jobs} processes  {time.monotonic() - started:.1f} s")
    return counts


def _ordered(tasks: Sequence[Task]) -> list[Task]:
    """The cases that share no kernel first, torch.compile's next, and last those that share some with an earlier case.

    Two processes that compile one kernel at the same time both take its time; the second of them finds it in the cache
    where it comes later. Cases of one suffix (a rank, a block size) differ in shape alone.
    """
    kinds = set()
    first, rest = [], []
    for task in tasks:
        op, case, dtype, backend = task
        kind = (op, dtype, backend, case.rpartition("_")[2])
        if backend == "compile" or kind in kinds:
            rest.append(task)
        else:
            kinds.add(kind)
            first.append(task)
    return first + sorted(rest, key=lambda task: task[3] != "compile")


def run_task(task: Task, device: torch.device) -> str | None:
    """One forward, and one forward with backward; None, or why it failed."""
    from kernels.registry import ops

    name, case_name, dtype, backend = task
    try:
        op = ops()[name]
        case = next(case for case in (*op.cases, op.quick, op.tiny) if case.name == case_name)
        inputs = op.make(case.dims, DTYPES[dtype], device, 0, requires_grad=True)
        with torch.no_grad():
            op.run({key: value.detach() for key, value in inputs.items()}, backend)
        op.run(inputs, backend).backward(torch.ones(op.out_shape(case.dims), dtype=DTYPES[dtype], device=device))
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return f"{'/'.join(task)}: {type(error).__name__}: {error}"
    return None


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _room() -> int:
    """How many workers the card's free memory holds."""
    return torch.cuda.mem_get_info()[0] // WORKER_BYTES if torch.cuda.is_available() else cpu_count()


def _in_processes(tasks: Sequence[Task], jobs: int) -> list[str | None]:
    context = multiprocessing.get_context("spawn")
    work, done = context.Queue(), context.Queue()
    for task in (*tasks, *(None for _ in range(jobs))):
        work.put(task)
    workers = [context.Process(target=_worker, args=(work, done), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    outcomes: list[str | None] = []
    try:
        while len(outcomes) < len(tasks):
            try:
                outcomes.append(done.get(timeout=0.5))
            except Empty:
                if not any(worker.is_alive() for worker in workers):
                    break
    finally:
        work.cancel_join_thread()
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.terminate()
    return outcomes


def _worker(work: Any, done: Any) -> None:
    import torch._inductor.config as inductor

    # Every CPU has a worker already.
    torch.set_num_threads(1)
    inductor.compile_threads = 1
    # Sixteen processes on one card are no place to choose launches by their times: the sweep tunes what is compiled here
    # when it has the card to itself. (Of two sweeps on an H200, one had kept launches that took 1.9 times as long.)
    inductor.autotune_local_cache = False
    for task in iter(work.get, None):
        done.put(run_task(task, _device()))
        if task[3] == "compile":
            torch._dynamo.reset()
