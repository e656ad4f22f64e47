"""Planted faults: kernels that cheat or break, and tools that fail, each with the words in which it has to be caught.

`run` plants them all into the very checks that a sweep makes. What it needs a GPU for says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from harness import compiled, graphed, precision, throttle
from harness.delimiters import FLUSH, MARKER
from harness.profile import Event, summarize
from kernels.registry import Case, Op

SCALE = 0.5
CASE = Case("planted", {"O": 48, "I": 32, "R": 8})
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A planted fault: `seen` plants it on a device and returns what was said of it, which has to hold `says`."""

    name: str
    says: str
    seen: Callable[[torch.device], str | None]
    gpu: bool = False


def product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The formula that the planted kernels claim to compute."""
    return scale * (a @ b)


def gradients(grad: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor | None, Tensor | None]:
    """Its gradients in a and b."""
    return scale * (grad @ b.mT), scale * (a.mT @ grad)


class _Planted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float, forward: Kernel, backward: Kernel) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale, ctx.backward_kernel = scale, backward
        return forward(a, b, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.backward_kernel(*grads, *ctx.saved_tensors, ctx.scale)
        return (*found, None, None, None)


def planted_op(forward: Kernel = product, backward: Kernel = gradients) -> Op:
    """An op whose one backend is made of these two."""
    return Op(
        name="planted",
        family="planted",
        call=lambda a, b, scale, *, backend: _Planted.apply(a, b, scale, forward, backward),
        oracle=product,
        args=("a", "b"),
        shapes=lambda d: {"a": (d["O"], d["R"]), "b": (d["R"], d["I"])},
        out_shape=lambda d: (d["O"], d["I"]),
        flops=lambda d: (2 * d["O"] * d["I"] * d["R"], 6 * d["O"] * d["I"] * d["R"]),
        cases=(CASE,),
        quick=CASE,
        tiny=CASE,
        kwargs={"scale": SCALE},
    )


def checked(op: Op, device: torch.device) -> str | None:
    """What the precision check says of an op."""
    truth = precision.make_truth(op, CASE.dims, torch.float32, device, 7)
    return precision.check(op, truth, "triton", strided=True).reason


def _kernel(forward: Kernel = product, backward: Kernel = gradients) -> Callable[[torch.device], str | None]:
    return lambda device: checked(planted_op(forward, backward), device)


def _stale(device: torch.device) -> str | None:
    kept: dict[Any, Tensor] = {}

    def forward(a: Tensor, b: Tensor, scale: float) -> Tensor:
        return kept.setdefault(a.shape, product(a, b, scale)).clone()

    return checked(planted_op(forward), device)


def _reused(device: torch.device) -> str | None:
    kept: dict[Any, Tensor] = {}

    def forward(a: Tensor, b: Tensor, scale: float) -> Tensor:
        result = product(a, b, scale)
        # A view, so that autograd takes each call's for a tensor of its own.
        return kept.setdefault(a.shape, torch.empty_like(result)).copy_(result).view(result.shape)

    return checked(planted_op(forward), device)


def _half(a: Tensor, b: Tensor, scale: float) -> Tensor:
    result = product(a, b, scale)
    half = torch.empty_like(result)
    half[: len(half) // 2] = result[: len(half) // 2]
    return half


def _mutating(a: Tensor, b: Tensor, scale: float) -> Tensor:
    result = product(a, b, scale)
    a.data[0] += 1  # a kernel writes without telling autograd
    return result


def _sideways(a: Tensor, b: Tensor, scale: float) -> Tensor:
    with torch.cuda.stream(_aside(a.device)):
        return product(a, b, scale)


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _infinite(a: Tensor, b: Tensor, scale: float) -> Tensor:
    result = product(a, b, scale)
    result[0, 0] = torch.inf
    return result


def _packed(value: Tensor) -> Tensor:
    """As a kernel reads it that takes its storage for row by row."""
    return value.as_strided(value.shape, (value.shape[1], 1))


def _contiguous_only(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return product(_packed(a), _packed(b), scale)


def _random(a: Tensor, b: Tensor, scale: float) -> Tensor:
    result = product(a, b, scale)
    return result * (1 + 1e-6 * torch.rand_like(result))


def _dropping(device: torch.device) -> str | None:
    """One kernel's event is lost in every window."""
    events, now = [], 0
    for name in (MARKER, *(FLUSH, "first", "second") * 4, MARKER):
        events.append(Event(name, now, 100))
        now += 1000
    del events[6]
    return summarize(events, ("arm",), windows=1, calls=4)["arm"].reason


def _silent(device: torch.device) -> str | None:
    """No event of the arm is delivered at all."""
    return summarize([Event(MARKER, 0, 100), Event(MARKER, 1000, 100)], ("arm",), windows=1, calls=4)["arm"].reason


def _fallen_back(device: torch.device) -> str | None:
    """Compiled while it warmed up, eager from then on."""
    compiled.fresh()
    a, b = (torch.ones(shape, device=device, requires_grad=True) for shape in ((8, 4), (4, 8)))
    function = torch.compile(product, fullgraph=True)

    def call() -> None:
        a.grad = b.grad = None
        function(a, b, SCALE).sum().backward()

    call()
    captured = compiled.graphs()
    with torch.compiler.set_stance("force_eager"):
        return compiled.problem({"fwdbwd": (call, 2)}, captured)


def _drifting(device: torch.device) -> str | None:
    return throttle.drift(throttle.State(clock_mhz=1980), throttle.State(clock_mhz=1500))


def _unfollowing(device: torch.device) -> str | None:
    """A graph of a call that copied its input elsewhere before the capture, and reads it there."""
    kept: dict[Any, Tensor] = {}

    def forward(a: Tensor, b: Tensor, scale: float) -> Tensor:
        return product(kept.setdefault(a.shape, a.clone()), b, scale)

    op = planted_op(forward)
    arm = graphed.make(op, CASE, "fp32", device, "triton_graphed")
    return graphed.check(arm, precision.make_truth(op, CASE.dims, torch.float32, device, 7)).reason


FAULTS = (
    Fault("returns a stale buffer", "returned an earlier call's", _stale),
    Fault("returns the same buffer every time", "overwrote an earlier call's", _reused),
    Fault("writes half the output", "NaN, as what was never written is here", _kernel(_half)),
    Fault("mutates an input", "changed its input a", _kernel(_mutating)),
    Fault("works on a side stream", "works on another stream than the current one", _kernel(_sideways), gpu=True),
    Fault("skips its backward", "b: no gradient", _kernel(backward=lambda *what: (gradients(*what)[0], None))),
    Fault("returns zeros as gradient", "a: all zero", _kernel(backward=lambda grad, a, b, _: (0 * a, 0 * b))),
    Fault("returns inf", "1 infinite", _kernel(_infinite)),
    Fault("is right only for contiguous input", "inputs that are not contiguous", _kernel(_contiguous_only)),
    Fault("is not deterministic", "not deterministic: ", _kernel(_random)),
    Fault("a profiler that drops events", "no complete window: [3] of 4 calls", _dropping),
    Fault("a profiler that delivers nothing", "profiler saw kernels in 0 of 4 calls", _silent),
    Fault("a compile arm that fell back", "entered 0 of 2 compiled graphs", _fallen_back),
    Fault("a clock that drifts", "the clock drifted from 1980 to 1500 MHz", _drifting),
    Fault("a graph that does not follow its inputs", "output: relative error", _unfollowing, gpu=True),
)


def run(device: torch.device) -> Iterator[tuple[str, bool | None, str]]:
    """Every fault's name, whether it was caught by its name (None: it needs a GPU), and what was said of it.

    First comes a kernel without a fault, of which nothing may be said.
    """
    said = checked(planted_op(), device)
    yield "no fault", said is None, str(said)
    for fault in FAULTS:
        if fault.gpu and device.type != "cuda":
            yield fault.name, None, "needs a GPU"
            continue
        try:
            said = fault.seen(device)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        yield fault.name, said is not None and fault.says in said, str(said)
