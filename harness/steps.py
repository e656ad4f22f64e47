"""The calls that are timed: each arm's forward, and its forward with backward, over inputs that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness import precision
from harness.stamp import DTYPES
from kernels.registry import Case, Inputs, Op

BACKENDS = ("eager", "compile", "triton", "tilelang")
# An arm again, as a CUDA graph of its calls; torch.compile has its own graphs, which the compile arm leaves off.
SUFFIX = "_graphed"
GRAPHED = tuple(f"{backend}{SUFFIX}" for backend in ("eager", "triton", "tilelang"))
ARMS = (*BACKENDS, *GRAPHED)
PHASES = ("fwd", "fwdbwd")
Step = Callable[[], Any]


def is_graphed(backend: str) -> bool:
    """Whether an arm replays a CUDA graph."""
    return backend.endswith(SUFFIX)


def plain(backend: str) -> str:
    """The backend whose calls an arm makes: "triton" for "triton" and for "triton_graphed"."""
    return backend.removesuffix(SUFFIX)


def chosen(text: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """The arms of a comma-separated list in the order of ARMS, `default` for None; ValueError for an unknown one."""
    if text is None:
        return tuple(default)
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ARMS]
    if unknown or not wanted:
        raise ValueError(f"backends: got {unknown[0] if unknown else text!r}, wanted some of {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in wanted)


def timed_inputs(op: Op, case: Case, dtype: str, device: torch.device, purpose: int = 1) -> tuple[Inputs, Tensor]:
    """Leaves that require grad, and the gradient that is fed back; another `purpose` gives other values."""
    seed = precision.seed(op.name, case.name, dtype, purpose)
    leaves = op.make(case.dims, DTYPES[dtype], device, seed, requires_grad=True)
    grad = torch.randn(op.out_shape(case.dims), device=device).to(DTYPES[dtype])
    return leaves, grad


def arm_steps(op: Op, leaves: Inputs, grad: Tensor, backend: str) -> dict[str, Step]:
    """{phase: the timed call} of one arm.

    The forward runs without autograd. Forward + backward clears the gradients, as a training step does, and feeds back
    one gradient that was made outside. The eager arm is the bare formula, without this project's checks around it.
    """
    run = op.run_formula if backend == "eager" else lambda inputs: op.run(inputs, backend)
    detached = {name: leaf.detach() for name, leaf in leaves.items()}
    tensors: list[Tensor] = list(leaves.values())

    def forward() -> Tensor:
        with torch.no_grad():
            return run(detached)

    def both() -> Tensor:
        for leaf in tensors:
            leaf.grad = None
        output = run(leaves)
        output.backward(grad)
        return output

    return {"fwd": forward, "fwdbwd": both}


def steps(op: Op, leaves: Inputs, grad: Tensor, backends: Sequence[str]) -> dict[str, dict[str, Step]]:
    """{phase: {backend: the timed call}} of plain arms over one set of inputs."""
    made = {backend: arm_steps(op, leaves, grad, backend) for backend in backends}
    return {phase: {backend: calls[phase] for backend, calls in made.items()} for phase in PHASES}
