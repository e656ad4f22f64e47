"""The comparison that every kernel test makes: kernel, PyTorch in the same dtype, and float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# The kernel may be off by at most twice PyTorch's own error in the same dtype, plus this many ULP of the
# reference's RMS (where PyTorch happens to round to the exact value).
FLOOR_ULP = 4.0
# In float32, where the inputs are exact to the same precision as the sums, the order of a sum shows: a chain of n terms is
# off by about √n / 4 ULP in its largest element, and the library's order is not the kernel's.
FLOOR_ULP_FLOAT32 = 8.0


def run(
    call: Callable[..., Tensor], inputs: dict[str, Tensor], grad: Tensor | None, needs: set[str]
) -> dict[str, Tensor]:
    """The output and the gradient of every input in `needs`, on fresh leaves."""
    leaves = {name: t.detach().clone().requires_grad_(name in needs) for name, t in inputs.items()}
    out = call(*leaves.values())
    results = {"out": out.detach()}
    if needs:
        assert grad is not None
        out.backward(grad)
        for name in needs:
            results[name] = leaves[name].grad
    return results


def ulp(value: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The largest error in units of `dtype`'s precision at the reference's RMS."""
    error = (value.double() - exact).abs().max().item()
    rms = exact.pow(2).mean().sqrt().item()
    return error / (torch.finfo(dtype).eps * max(rms, torch.finfo(dtype).tiny))


def compare(
    call: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    *,
    needs: set[str] | None = None,
) -> None:
    """Asserts that `call` is as exact as `oracle` run in the same dtype, for the output and each gradient."""
    needs = set(inputs) if needs is None else needs
    dtype = next(iter(inputs.values())).dtype
    double = {name: t.double() for name, t in inputs.items()}
    shape = oracle(*double.values()).shape
    generator = torch.Generator(device=next(iter(inputs.values())).device).manual_seed(1234)
    grad = torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    before = {name: t.clone() for name, t in inputs.items()}
    got = run(call, inputs, grad, needs)
    exact = run(oracle, double, grad.double(), needs)
    same = run(oracle, inputs, grad, needs)
    for name, value in exact.items():
        assert got[name] is not None, f"{name}: no gradient"
        assert got[name].shape == value.shape, f"{name}: shape {tuple(got[name].shape)}, wanted {tuple(value.shape)}"
        assert got[name].dtype == dtype, f"{name}: dtype {got[name].dtype}, wanted {dtype}"
        assert got[name].isfinite().all(), f"{name}: not finite"
        if value.numel() == 0:
            continue
        mine, theirs = ulp(got[name], value, dtype), ulp(same[name], value, dtype)
        floor = FLOOR_ULP_FLOAT32 if dtype is torch.float32 else FLOOR_ULP
        assert mine <= 2 * theirs + floor, f"{name}: {mine:.2f} ULP against PyTorch's {theirs:.2f}"
    for name, t in inputs.items():
        assert torch.equal(t, before[name]), f"{name} was written to"
