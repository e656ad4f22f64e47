"""What there is to measure: families, their ops, and each op's cases, inputs, oracle and cost.

A family is a folder `kernels/<family>/` whose `cases.py` holds `OPS`; adding its name to `FAMILIES`
is the one registry entry it needs. Everything else (harness, tests, notebooks) iterates over this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from math import prod

import torch
from torch import Tensor

FAMILIES = ("lora", "loha", "lokr", "oft")

Dims = Mapping[str, int]
Inputs = dict[str, Tensor]

# (O, I) of common linear layers, in the order in which tables and figures show them.
LINEAR_SHAPES: dict[str, tuple[int, int]] = {
    "sdxl_attn": (640, 640),
    "sdxl_attn_xl": (1280, 1280),
    "sdxl_ff_in": (5120, 1280),
    "sdxl_ff_out": (1280, 5120),
    "dit_qkv": (3072, 3072),
    "dit_mlp_in": (12288, 3072),
    "llm_qkv": (4096, 4096),
    "llm_mlp": (11008, 4096),
}
RANKS = (4, 16, 64)
TOKENS = (77, 1024, 4096, 16384)


@dataclass(frozen=True)
class Case:
    """One point of a sweep: a name and the sizes of its axes (T tokens, O out, I in, R rank, ...)."""

    name: str
    dims: Dims


@dataclass(frozen=True)
class Cost:
    """The least a call has to move and compute: each input read once, each result written once."""

    bytes_read: int
    bytes_written: int
    flops: int


@dataclass(frozen=True)
class Op:
    """One operation of one family.

    call: the public function; takes the tensors of `args` in order, then `**kwargs` and `backend=`.
    args: names of the tensor arguments in call order; each is a leaf that requires grad when training.
    shapes: dims -> {arg: shape}; `out_shape`: dims -> shape of the result.
    oracle: the formula in the inputs' own dtype (fp64 here), differentiable, no `backend`; same kwargs.
    flops: dims -> (forward, forward + backward) floating-point operations.
    cases: the full sweep. quick: the GPU quick check. tiny: the CPU quick check. odd: small shapes that nothing divides,
        for the tests.
    kwargs: what every arm passes besides the tensors (the scale).
    fan_in: dims -> {arg: divisor}; each input is drawn as normal / sqrt(divisor), keeping results near 1.
    """

    name: str
    family: str
    call: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    args: tuple[str, ...]
    shapes: Callable[[Dims], dict[str, tuple[int, ...]]]
    out_shape: Callable[[Dims], tuple[int, ...]]
    flops: Callable[[Dims], tuple[int, int]]
    cases: tuple[Case, ...]
    quick: Case
    tiny: Case
    odd: tuple[Case, ...] = ()
    kwargs: Mapping[str, float] = field(default_factory=dict)
    fan_in: Callable[[Dims], dict[str, int]] = lambda dims: {}

    def make(
        self,
        dims: Dims,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
        *,
        requires_grad: bool = False,
    ) -> Inputs:
        """Fresh random inputs (normal, scaled by `fan_in`), keyed by argument name, in call order."""
        generator = torch.Generator(device=device).manual_seed(seed)
        divisor = self.fan_in(dims)
        inputs = {}
        for arg, shape in self.shapes(dims).items():
            value = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            value = (value / divisor.get(arg, 1) ** 0.5).to(dtype)
            inputs[arg] = value.requires_grad_(requires_grad)
        return inputs

    def run(self, inputs: Inputs, backend: str) -> Tensor:
        """The public function on these inputs."""
        return self.call(*inputs.values(), **self.kwargs, backend=backend)

    def run_formula(self, inputs: Inputs) -> Tensor:
        """The formula alone on these inputs, in their dtype: what a user of PyTorch would write."""
        return self.oracle(*inputs.values(), **self.kwargs)

    def cost(self, dims: Dims, itemsize: int, *, backward: bool = False) -> Cost:
        """Compulsory traffic in bytes and operations, for the forward or for forward + backward.

        Forward: read every input, write the output. Backward adds: read the output's gradient, read
        every input again, write every input's gradient.
        """
        inputs = sum(prod(shape) for shape in self.shapes(dims).values()) * itemsize
        output = prod(self.out_shape(dims)) * itemsize
        forward, both = self.flops(dims)
        if not backward:
            return Cost(inputs, output, forward)
        return Cost(2 * inputs + output, output + inputs, both)


def linear_cases(
    suffix: str, axis: str, values: tuple[int, ...], shapes: Mapping[str, tuple[int, int]] = LINEAR_SHAPES
) -> tuple[Case, ...]:
    """Every linear shape × every value of one more axis, named `{shape}_{suffix}{value}`."""
    return tuple(
        Case(f"{name}_{suffix}{value}", {"O": out, "I": inp, axis: value})
        for name, (out, inp) in shapes.items()
        for value in values
    )


@cache
def families() -> dict[str, tuple[Op, ...]]:
    """Family name -> its ops, merge first."""
    return {family: import_module(f"kernels.{family}.cases").OPS for family in FAMILIES}


@cache
def ops() -> dict[str, Op]:
    """Op name -> op, over all families, in registry order."""
    return {op.name: op for family in families().values() for op in family}
