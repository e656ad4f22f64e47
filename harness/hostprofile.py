"""Where the host's time goes in one call, step by step: from the DSL's bare launch to forward + backward.

Each step is timed in batches of calls with nothing between them but the launches, round-robin over all steps, so that a
change of the machine's pace meets them alike; the device is idle before a batch and never so far behind that it stalls
the host. A step's figure is the median over the rounds.

    launch      the first kernel through the DSL's own front end: `kernel[grid](...)`, or a compiled TileLang kernel called on tensors
    handle      the same kernel from a launch plan: by its handle
    replay      the launch plan: allocations and every launch
    forward     the public function on inputs that require no grad; what it adds to `replay` is recognising them
    with_grad   the same where the inputs require grad
    both        with `.backward(grad)`
    add, node, eager, eager_both    for scale: torch.add, an autograd.Function that computes nothing (forward + backward),
                and the formula in PyTorch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness.generated import fused_op
from harness.record import Row
from harness.steps import Step, arm_steps, timed_inputs
from kernels.common import fused, plans, tilelang_target
from kernels.registry import Case, Inputs, Op

KIND = "host"
DSLS = ("triton", "tilelang")
STEPS = ("launch", "handle", "replay", "forward", "with_grad", "both")
SCALE = ("add", "node", "eager", "eager_both")
CALLS = 50
ROUNDS = 21


@dataclass
class _Launch:
    """One launch that host code made: `bare` repeats it through the DSL's front end, `again` as `plans.record` takes it."""

    kernel: plans.Planned
    grid: tuple[int, ...] | None
    args: tuple[Any, ...]
    options: dict[str, Any]
    front: Callable[..., Any] | None

    def bare(self) -> None:
        if self.grid is None:
            (self.front or self.kernel.kernel)(*self.args)
        else:
            self.kernel.kernel[self.grid](*self.args, **self.options)

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.args if isinstance(value, Tensor)]

    def again(self, *tensors: Tensor) -> None:
        given = iter(tensors)
        args = [next(given) if isinstance(value, Tensor) else value for value in self.args]
        if self.grid is None:
            self.kernel(*args)
        else:
            self.kernel[self.grid](*args, **self.options)


@dataclass
class _Seen:
    """What a call of a kind that was forgotten did: its plan, that plan's arguments, and its launches."""

    plan: plans.Plan | None = None
    inputs: Sequence[Tensor | None] = ()
    launches: list[_Launch] = field(default_factory=list)


@contextmanager
def _watched(op: Op) -> Iterator[_Seen]:
    """Inside, the op's next call is planned anew, and its launches and plan are kept."""
    seen = _Seen()
    fronts: dict[int, Any] = {}
    record, launch, call, entry = fused.record, plans.Planned._launch, plans.Planned.__call__, tilelang_target._entry

    def recorded(names: Any, inputs: Any, run: Any) -> Any:
        result, plan = record(names, inputs, run)
        seen.plan, seen.inputs = plan, inputs
        return result, plan

    def launched(self: plans.Planned, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        seen.launches.append(_Launch(self, grid, args, options, None))
        launch(self, grid, *args, **options)

    def called(self: plans.Planned, *args: Any) -> None:
        seen.launches.append(_Launch(self, None, args, {}, fronts.get(id(self))))
        call(self, *args)

    def entered(kernel: Any, target: Any) -> Any:
        made = entry(kernel, target)
        fronts[id(made)] = kernel
        return made

    fused_op(op.name).forget()
    tilelang_target._kernels.clear()
    swaps = [
        (fused, "record", recorded),
        (plans.Planned, "_launch", launched),
        (plans.Planned, "__call__", called),
        (tilelang_target, "_entry", entered),
    ]
    with ExitStack() as stack:
        for where, name, value in swaps:
            stack.enter_context(mock.patch.object(where, name, value))
        yield seen


class _Node(torch.autograd.Function):
    """An autograd node without work."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return tensors[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (grad, *(None for _ in ctx.saved_tensors[1:]))


def measure(device: torch.device, cases: Iterable[tuple[Op, Case]], dtype: str = "fp16") -> list[Row]:
    """One row per case and DSL: `steps` {step: µs of host time a call, an entry a round}; `launches` of one forward."""
    rows = []
    for op, case in cases:
        leaves, grad = timed_inputs(op, case, dtype, device)
        made: dict[tuple[str, str], Step] = {("", name): step for name, step in _scale(op, leaves, grad).items()}
        launches = {}
        for dsl in DSLS:
            steps, launches[dsl] = _steps(op, leaves, grad, dsl)
            made |= {(dsl, name): step for name, step in steps.items()}
        found = interleaved(made, device)
        for dsl in DSLS:
            samples = {name: found["", name] for name in SCALE} | {name: found[dsl, name] for name in STEPS}
            about = {"kind": KIND, "op": op.name, "case": case.name, "dtype": dtype, "backend": dsl}
            rows.append({**about, "launches": launches[dsl], "steps": samples})
    return rows


def times(row: Mapping[str, Any]) -> dict[str, float]:
    """The median µs of each step."""
    return {name: median(samples) for name, samples in row["steps"].items()}


def ratio(row: Mapping[str, Any]) -> float:
    """The host's time to issue one forward, in bare launches of as many kernels."""
    found = times(row)
    return found["forward"] / (found["launch"] * row["launches"])


def interleaved(steps: Mapping[Any, Step], device: torch.device) -> dict[Any, list[float]]:
    """µs of host time per call of each step, one entry a round; the order turns with the rounds."""
    names = list(steps)
    found: dict[Any, list[float]] = {name: [] for name in names}
    for step in steps.values():
        for _ in range(3):
            step()
    for turn in range(ROUNDS):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            step = steps[name]
            _settle(device)
            started = time.perf_counter()
            for _ in range(CALLS):
                step()
            found[name].append((time.perf_counter() - started) / CALLS * 1e6)
    _settle(device)
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _scale(op: Op, leaves: Inputs, grad: Tensor) -> dict[str, Step]:
    first = next(iter(leaves.values()))
    vector, seed = torch.ones(1024, device=grad.device), torch.ones_like(first)
    eager = arm_steps(op, leaves, grad, "eager")

    def node() -> None:
        first.grad = None
        _Node.apply(*leaves.values()).backward(seed)  # type: ignore[no-untyped-call]

    formula = partial(op.oracle, *(leaf.detach() for leaf in leaves.values()), **op.kwargs)
    return {"add": lambda: vector + vector, "node": node, "eager": formula, "eager_both": eager["fwdbwd"]}


def _steps(op: Op, leaves: Inputs, grad: Tensor, dsl: str) -> tuple[dict[str, Step], int]:
    """The steps of one backend, and how many kernels its forward launches."""
    arm = arm_steps(op, leaves, grad, dsl)
    with _watched(op) as seen:
        arm["fwd"]()
    if seen.plan is None:
        raise RuntimeError(f"{op.name}: {dsl}: the forward has no launch plan")
    plan, inputs, launches = seen.plan, seen.inputs, seen.launches
    handle = plans.record([f"a{i}" for i in range(len(launches[0].tensors))], launches[0].tensors, launches[0].again)[1]
    assert handle is not None
    stream = torch.cuda.current_stream(grad.device).cuda_stream if grad.is_cuda else 0
    run = partial(op.call, **op.kwargs, backend=dsl)
    steps: dict[str, Step] = {
        "launch": launches[0].bare,
        "handle": lambda: handle.replay(stream, *launches[0].tensors),
        "replay": lambda: plan.replay(stream, *inputs),
        "forward": partial(run, *(leaf.detach() for leaf in leaves.values())),
        "with_grad": partial(run, *leaves.values()),
        "both": arm["fwdbwd"],
    }
    return steps, len(launches)
