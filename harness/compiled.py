"""Proof that the compile arm is compiled: torch.compile may run eagerly without a word, and eager is another arm.

Dynamo and Inductor are imported inside the functions: they import Triton, which has to come after
`stamp.interpret_without_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass
class Entries:
    """How often an Inductor graph was entered."""

    count: int = 0


def fresh() -> None:
    """Forgets every compiled graph and counter, so that a case cannot run on another's or hit the recompile limit."""
    counter_works()
    torch._dynamo.reset()
    _counters().clear()


def graphs() -> int:
    """Graphs that Dynamo captured since `fresh`."""
    return int(_counters()["stats"]["unique_graphs"])


@contextmanager
def counting() -> Iterator[Entries]:
    """Counts how often an Inductor graph is entered inside."""
    from torch._inductor.output_code import CompiledFxGraph

    entries = Entries()
    original = CompiledFxGraph.__call__

    def counted(self: Any, inputs: Any) -> Any:
        entries.count += 1
        return original(self, inputs)

    CompiledFxGraph.__call__ = counted  # type: ignore[method-assign]
    try:
        yield entries
    finally:
        CompiledFxGraph.__call__ = original  # type: ignore[method-assign]


@cache
def counter_works() -> bool:
    """Whether PyTorch enters its graphs where `counting` looks, tried on one that is known to be compiled."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    double = torch.compile(lambda x: x * 2 + 1, fullgraph=True)
    x = torch.ones(8, device=device)
    double(x)
    with counting() as entries:
        double(x)
    return entries.count > 0


def problem(calls: Mapping[str, tuple[Callable[[], Any], int]], captured: int) -> str | None:
    """Why the compile arm is not one, or None.

    Args:
        calls: per phase, the warmed-up timed call and how many graphs it has to enter (forward 1, with backward 2).
        captured: `graphs()` after the warm-up; one more by now is a recompilation.
    """
    counters = _counters()
    if captured == 0:
        return "not compiled: no graph was captured, the arm ran eagerly"
    if counters["graph_break"]:
        return f"not wholly compiled: graph break: {next(iter(counters['graph_break'])).splitlines()[0]}"
    for phase, (call, wanted) in calls.items():
        with counting() as entries:
            call()
        if counter_works() and entries.count < wanted:
            return f"not compiled: {phase} entered {entries.count} of {wanted} compiled graphs, the rest ran eagerly"
    if graphs() != captured:
        return f"recompiled while it was measured: {graphs() - captured} more graphs"
    return None


def _counters() -> Any:
    from torch._dynamo.utils import counters

    return counters
