"""Precision of one arm: its output and every gradient against the formula in float64 on the same inputs.

ULP here is max|error| / (eps(dtype) · RMS(reference)): the worst element's error in units of the working dtype's
spacing at the reference's typical size. A non-finite value has no ULP; it is reported, never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from harness import behaviour
from harness.behaviour import ALONE, OUTPUT, Results
from kernels.registry import Dims, Inputs, Op

# Right is at most twice eager's error plus this floor (ULP), after the rule of kernel tests that compare three runs;
# float32's floor is wider because the order of a long sum alone moves it by hundreds of its small ULPs.
ULP_FACTOR = 2.0
ULP_FLOOR = {torch.float16: 8.0, torch.bfloat16: 8.0, torch.float32: 256.0}
# Eager itself has nothing to be compared with: an error beyond this share of the reference is no rounding.
RELATIVE_LIMIT = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}
_TF32_RELATIVE_LIMIT = 0.02
_TF32_ULP_FLOOR = 2.0**13 * 8


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


def check(op: Op, truth: Truth, backend: str, baseline: Check | None = None, *, strided: bool = False) -> Check:
    """Runs one arm several times, forward alone and with backward, and compares what it did with the truth.

    Before that it runs on other inputs, so that a result which is kept from call to call shows; after it, our own
    kernels run again on the same inputs, to the same bits, and on a GPU on inputs that the stream is late with.

    baseline: eager's check, which bounds what an arm may get wrong by. strided: also on inputs and a gradient whose
    storage is transposed, which compiles the arm once more. Exceptions of the arm pass through.
    """
    dtype, want = truth.grad.dtype, {ALONE: truth.values[OUTPUT], **truth.values}
    before = {name: value.detach().clone() for name, value in truth.inputs.items()}
    earlier = behaviour.results(op, behaviour.others(truth.inputs), truth.grad, backend)
    kept = {name: None if value is None else value.clone() for name, value in earlier.items()}
    with behaviour.poisoned(truth.values[OUTPUT], dtype, backend):
        got = behaviour.results(op, truth.inputs, truth.grad, backend)
    output = got[OUTPUT]
    misshapen = None if output is None else _misshapen(output, truth.values[OUTPUT], dtype)
    if misshapen is not None:
        return Check({OUTPUT: None}, {OUTPUT: None}, f"{OUTPUT}: {misshapen}")
    result = compare(got, truth.values, dtype, baseline)
    forward = compare({OUTPUT: got[ALONE]}, {OUTPUT: truth.values[OUTPUT]}, dtype, baseline)
    if result.reason is None and forward.reason is not None:
        result.reason = f"forward without autograd: {forward.reason}"
    named = _named(before, truth, earlier, kept, got, wrong=result.reason is not None)
    result.reason = named or result.reason
    if result.reason is None:
        result.reason = _again(op, truth, backend, got, want, baseline, strided)
    return result


def _named(
    before: Mapping[str, Tensor], truth: Truth, earlier: Results, kept: Results, got: Results, *, wrong: bool
) -> str | None:
    """What an arm did that it must not, where it has a name of its own."""
    spoilt = behaviour.changed(before, truth.inputs)
    if spoilt:
        return f"changed its input {', '.join(spoilt)}"
    overwritten = behaviour.changed(kept, earlier)
    if overwritten:
        return f"overwrote an earlier call's {', '.join(overwritten)}: it returns the same buffer again"
    same = got.keys() - behaviour.changed(kept, got)
    stale = [name for name, value in got.items() if name in same and value is not None and _says_something(value)]
    if wrong and stale:
        return f"returned an earlier call's {', '.join(stale)}: a stale buffer"
    return None


def _says_something(value: Tensor) -> bool:
    return bool(value.any()) and bool(torch.isfinite(value).all())


def _again(
    op: Op,
    truth: Truth,
    backend: str,
    got: Results,
    want: Mapping[str, Tensor],
    baseline: Check | None,
    strided: bool,
) -> str | None:
    """What a right arm does wrong when it is called again, in other circumstances."""
    dtype = truth.grad.dtype
    # PyTorch's own arms promise no fixed bits.
    if backend not in ("eager", "compile"):
        differing = behaviour.changed(got, behaviour.results(op, truth.inputs, truth.grad, backend))
        if differing:
            return f"not deterministic: {', '.join(differing)} differ between two calls on the same inputs"
    if truth.grad.is_cuda:
        late = compare(behaviour.late(op, truth.inputs, truth.grad, backend), want, dtype, baseline)
        if late.reason is not None:
            return f"works on another stream than the current one: {late.reason}"
    if strided:
        inputs = {name: behaviour.transposed(value) for name, value in truth.inputs.items()}
        found = behaviour.results(op, inputs, behaviour.transposed(truth.grad).detach(), backend)
        wrong = compare(found, want, dtype, baseline)
        if wrong.reason is not None:
            return f"wrong for inputs that are not contiguous: {wrong.reason}"
    return None


def compare(
    got: Mapping[str, Tensor | None], want: Mapping[str, Tensor], dtype: torch.dtype, baseline: Check | None
) -> Check:
    """ULP and relative error of each tensor by name, and the first reason for which the whole is wrong."""
    result = Check()
    for name, reference in want.items():
        value = got.get(name)
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
        infinite = int(torch.isinf(value).sum())
        kinds = [f"{infinite} infinite"] if infinite else []
        kinds += [f"{bad - infinite} NaN, as what was never written is here"] if bad > infinite else []
        also = f" ({', '.join(kinds)})" if torch.isfinite(reference).all() else ", as has the reference"
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
