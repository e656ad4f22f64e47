"""Precision of one arm: its output and every gradient against the formula in float64 on the same inputs.

ULP here is max|error| / (eps(dtype) · RMS(reference)): the worst element's error in units of the working dtype's
spacing at the reference's typical size. A non-finite value has no ULP; it is reported, never averaged.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from kernels.registry import Dims, Inputs, Op

# Right is at most twice eager's error plus this floor (ULP), after the rule of kernel tests that compare three runs;
# float32's floor is wider because the order of a long sum alone moves it by hundreds of its small ULPs.
ULP_FACTOR = 2.0
ULP_FLOOR = {torch.float16: 8.0, torch.bfloat16: 8.0, torch.float32: 256.0}
# Eager itself has nothing to be compared with: an error beyond this share of the reference is no rounding.
RELATIVE_LIMIT = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}
_TF32_RELATIVE_LIMIT = 0.02
_TF32_ULP_FLOOR = 2.0**13 * 8
OUTPUT = "output"


@dataclass(frozen=True)
class Truth:
    """Inputs, the gradient that is fed back, and float64's `values`: the output and gradients by name."""

    inputs: Inputs
    grad: Tensor
    values: dict[str, Tensor]


@dataclass
class Check:
    """What one arm got wrong by; `reason` is None where it is right."""

    ulps: dict[str, float | None] = field(default_factory=dict)
    relative: dict[str, float | None] = field(default_factory=dict)
    reason: str | None = None

    @property
    def ulp(self) -> float | None:
        """The worst over the output and every gradient; None if one of them has none."""
        values = [value for value in self.ulps.values() if value is not None]
        return max(values) if values and len(values) == len(self.ulps) else None


def seed(*parts: object) -> int:
    """A seed that is the same in every run and differs between ops, cases, dtypes and purposes."""
    return crc32("/".join(str(part) for part in parts).encode())


def make_truth(op: Op, dims: Dims, dtype: torch.dtype, device: torch.device, inputs_seed: int) -> Truth:
    """Fresh random inputs and their float64 results, computed on `device`."""
    inputs = op.make(dims, dtype, device, inputs_seed, requires_grad=True)
    generator = torch.Generator(device=device).manual_seed(inputs_seed + 1)
    grad = torch.randn(op.out_shape(dims), generator=generator, device=device, dtype=torch.float32).to(dtype)
    wide = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    output = op.oracle(*wide.values(), **op.kwargs)
    output.backward(grad.double())
    values = {OUTPUT: output.detach()}
    for name, value in wide.items():
        if value.grad is None:
            raise AssertionError(f"{op.name}: the oracle is not differentiable in {name}")
        values[name] = value.grad
    return Truth(inputs, grad, values)


def check(op: Op, truth: Truth, backend: str, baseline: Check | None = None) -> Check:
    """Runs one arm, forward alone and with backward, and compares it with the truth.

    baseline: eager's check, which bounds what an arm may get wrong by. Exceptions of the arm pass through.
    """
    before = {name: value.detach().clone() for name, value in truth.inputs.items()}
    for value in truth.inputs.values():
        value.grad = None
    detached = {name: value.detach() for name, value in truth.inputs.items()}
    with poisoned(truth.values[OUTPUT], truth.grad.dtype, backend):
        with torch.no_grad():
            alone = op.run(detached, backend)
        output = op.run(truth.inputs, backend)
        misshapen = _misshapen(output, truth.values[OUTPUT], truth.grad.dtype)
        if misshapen is not None:
            return Check({OUTPUT: None}, {OUTPUT: None}, f"{OUTPUT}: {misshapen}")
        output.backward(truth.grad)
    got: dict[str, Tensor | None] = {OUTPUT: output.detach()}
    got |= {name: value.grad for name, value in truth.inputs.items()}
    result = compare(got, truth.values, truth.grad.dtype, baseline)
    forward = compare({OUTPUT: alone}, {OUTPUT: truth.values[OUTPUT]}, truth.grad.dtype, baseline)
    if result.reason is None and forward.reason is not None:
        result.reason = f"forward without autograd: {forward.reason}"
    spoilt = changed(before, truth.inputs)
    if spoilt:
        result.reason = f"changed its input {', '.join(spoilt)}"
    for value in truth.inputs.values():
        value.grad = None
    return result


def compare(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor], dtype: torch.dtype, baseline: Check | None
) -> Check:
    """ULP and relative error of each tensor by name, and the first reason for which the whole is wrong."""
    result = Check()
    for name, reference in want.items():
        value = got[name]
        result.ulps[name] = result.relative[name] = None
        problem = _problem(value, reference, dtype)
        if problem is None and value is not None:
            error = value.double() - reference
            rms = reference.square().mean().sqrt()
            ulp = (error.abs().max() / (torch.finfo(dtype).eps * rms)).item()
            relative = (error.square().mean().sqrt() / rms).item()
            result.ulps[name], result.relative[name] = ulp, relative
            problem = _too_far(name, ulp, relative, dtype, baseline)
        if problem is not None and result.reason is None:
            result.reason = f"{name}: {problem}"
    return result


def _problem(value: Tensor | None, reference: Tensor, dtype: torch.dtype) -> str | None:
    if value is None:
        return "no gradient"
    misshapen = _misshapen(value, reference, dtype)
    if misshapen is not None:
        return misshapen
    if value.numel() == 0:
        return "empty: nothing to compare"
    bad = value.numel() - int(torch.isfinite(value).sum())
    if bad:
        also = "" if torch.isfinite(reference).all() else ", as has the reference"
        return f"{bad} of {value.numel()} elements are not finite{also}"
    if not torch.isfinite(reference).all():
        return "the reference is not finite, the result is"
    if not value.any():
        return "all zero"
    return None


def _misshapen(value: Tensor, reference: Tensor, dtype: torch.dtype) -> str | None:
    if value.shape == reference.shape and value.dtype == dtype:
        return None
    return f"got {value.dtype} {tuple(value.shape)}, wanted {dtype} {tuple(reference.shape)}"


def _too_far(name: str, ulp: float, relative: float, dtype: torch.dtype, baseline: Check | None) -> str | None:
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
    allowed = _TF32_RELATIVE_LIMIT if tf32 else RELATIVE_LIMIT[dtype]
    if not relative <= allowed:
        return f"relative error {relative:.2g}, at most {allowed:.2g} allowed"
    other = baseline.ulps.get(name) if baseline is not None else None
    if other is not None:
        limit = ULP_FACTOR * other + (_TF32_ULP_FLOOR if tf32 else ULP_FLOOR[dtype])
        if ulp > limit:
            return f"{ulp:.1f} ULP, at most {limit:.1f} allowed (eager: {other:.1f})"
    return None


@contextmanager
def poisoned(like: Tensor, dtype: torch.dtype, backend: str) -> Iterator[None]:
    """Fresh memory holds NaN inside, so that an element that is never written shows.

    PyTorch fills what it allocates where its deterministic mode is on. torch.compile guards on that mode and would
    compile twice, so for it the allocator's cache is filled with NaN beforehand instead.
    """
    if backend == "compile":
        blocks = [torch.full(like.shape, float("nan"), dtype=dtype, device=like.device) for _ in range(3)]
        del blocks
        yield
        return
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "... does not have a deterministic implementation": only the fill is wanted
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode, warn_only=warn_only)
            settings.fill_uninitialized_memory = fill


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors whose bits are not what they were."""
    return [name for name, value in before.items() if not _same_bits(value.detach(), after[name].detach())]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))
