"""The arms as CUDA graphs: the calls that the plain arms are timed by, captured once and replayed.

A replay costs the host one launch however many kernels the call has, so these rows show what is left of a call once
nobody dispatches it. They are compared with eager's graph, which has shed its dispatch too.

A graph that captured nothing, or an address that has moved, replays without complaint. So every graph is replayed on
inputs other than those it was captured with, over results filled with NaN, and compared with float64.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from harness import behaviour, precision
from harness.precision import OUTPUT, Check, Truth
from harness.steps import Step, arm_steps, plain, timed_inputs
from kernels.registry import Case, Inputs, Op

# Calls on the side stream before the capture: they compile, and allocate what libraries keep for a stream.
WARMUP = 3
# The capture's own inputs: neither those of the check nor those that are timed.
PURPOSE = 2


@dataclass(frozen=True)
class Captured:
    """One captured call.

    results: the tensors that each replay writes: the output and, with backward, every input's gradient.
    peak_bytes: what the call asked of the graph's pool at its peak, over what was allocated before; as a plain arm's.
    """

    replay: Step
    results: dict[str, Tensor | None]
    peak_bytes: int


@dataclass(frozen=True)
class GraphedArm:
    """Both phases of one arm over static inputs of its own.

    Its own, because a leaf's gradient accumulator belongs to the stream that first used it.
    """

    inputs: Inputs
    grad: Tensor
    phases: dict[str, Captured]

    def load(self, inputs: Inputs, grad: Tensor) -> None:
        """Copies new values to where the graphs read them."""
        with torch.no_grad():
            for name, value in inputs.items():
                self.inputs[name].copy_(value)
            self.grad.copy_(grad)


def make(op: Op, case: Case, dtype: str, device: torch.device, backend: str) -> GraphedArm:
    """Captures both phases of "<backend>_graphed"; what the arm or the capture raises passes through."""
    inputs, grad = timed_inputs(op, case, dtype, device, PURPOSE)
    phases = {}
    for phase, call in arm_steps(op, inputs, grad, plain(backend)).items():
        replay, output, peak = capture(call, list(inputs.values()), device)
        results: dict[str, Tensor | None] = {OUTPUT: output.detach()}
        if phase == "fwdbwd":
            results |= {name: leaf.grad for name, leaf in inputs.items()}
        for leaf in inputs.values():
            leaf.grad = None
        phases[phase] = Captured(replay, results, peak)
    return GraphedArm(inputs, grad, phases)


def check(arm: GraphedArm, truth: Truth, baseline: Check | None = None) -> Check:
    """Replays both graphs on the truth's inputs and compares all that they write with float64.

    baseline: eager's check, which bounds what an arm may get wrong by.
    """
    arm.load({name: value.detach() for name, value in truth.inputs.items()}, truth.grad)
    found: dict[str, Check] = {}
    for phase, captured in arm.phases.items():
        with torch.no_grad():
            for written in captured.results.values():
                if written is not None:
                    written.fill_(torch.nan)
        captured.replay()
        want = {name: truth.values[name] for name in captured.results}
        found[phase] = precision.compare(captured.results, want, truth.grad.dtype, baseline)
    result, forward = found["fwdbwd"], found["fwd"]
    if result.reason is None and forward.reason is not None:
        result.reason = f"forward without autograd: {forward.reason}"
    changed = behaviour.changed(truth.inputs, arm.inputs)
    if changed:
        result.reason = f"changed its input {', '.join(changed)}"
    return result


def capture(call: Step, leaves: list[Tensor], device: torch.device) -> tuple[Step, Tensor, int]:
    """The call as a CUDA graph: (replay, the output that a replay writes, peak bytes).

    Gradients are cleared before, so that they come from the graph's own memory and stay where a replay writes them.
    """
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), _no_collection():
        for _ in range(WARMUP):
            call()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.reset_peak_memory_stats(device)
        graph.capture_begin()
        try:
            output = call()
        except BaseException:
            with suppress(RuntimeError):  # it ends the capture, and says again that the capture failed
                graph.capture_end()
            raise
        graph.capture_end()
        peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay, output, peak


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: a graph or an event that is freed during a capture ends it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
