"""Ways to call an arm under which a kernel that cheats or breaks shows: fresh memory poisoned, inputs late or strided."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.registry import Inputs, Op

OUTPUT = "output"
# The output of a forward without autograd.
ALONE = "output without autograd"
# Longer than the host takes to issue a call, so that the call is issued before its inputs are there.
LATE_CYCLES = 2**25
Results = dict[str, "Tensor | None"]


def results(op: Op, inputs: Inputs, grad: Tensor, backend: str, *, wait: bool = True) -> Results:
    """The output alone, the output with autograd and every input's gradient, by name; the gradients are taken away.

    A result of another shape than the gradient's has no gradients here. wait: until the device has finished everything.
    """
    for value in inputs.values():
        value.grad = None
    with torch.no_grad():
        alone = op.run({name: value.detach() for name, value in inputs.items()}, backend)
    output = op.run(inputs, backend)
    found: Results = {ALONE: alone, OUTPUT: output.detach()}
    if output.shape != grad.shape or output.dtype != grad.dtype:
        return found
    output.backward(grad)
    for name, value in inputs.items():
        found[name], value.grad = value.grad, None
    if wait and grad.is_cuda:
        torch.cuda.synchronize(grad.device)
    return found


def others(inputs: Inputs) -> Inputs:
    """Inputs that give other results: halved, which no dtype rounds."""
    return {name: (0.5 * value.detach()).requires_grad_() for name, value in inputs.items()}


def transposed(value: Tensor) -> Tensor:
    """The same values in a storage whose last two axes are exchanged, or in every other element of a vector."""
    value = value.detach()
    if value.dim() > 1:
        return value.mT.contiguous().mT.requires_grad_()
    return torch.stack((value, torch.full_like(value, torch.nan)), dim=-1)[..., 0].requires_grad_()


def late(op: Op, inputs: Inputs, grad: Tensor, backend: str) -> Results:
    """The results where the current stream has the inputs only after the call was issued, and at once wants what came out.

    A kernel on another stream, which does not wait for the current one, reads what was there before. The current stream
    is not the default one, so that a kernel which always takes that is seen too.
    """
    torch.cuda.synchronize(grad.device)
    with torch.cuda.stream(_late_stream(grad.device)):
        static, early = others(inputs), 0.5 * grad
        torch.cuda.synchronize(grad.device)
        torch.cuda._sleep(LATE_CYCLES)
        with torch.no_grad():
            for name, value in static.items():
                value.copy_(inputs[name])
            early.copy_(grad)
        found = results(op, static, early, backend, wait=False)
        copies = {name: None if value is None else value.clone() for name, value in found.items()}
        torch.cuda.synchronize(grad.device)
    return copies


@cache
def _late_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def changed(before: Mapping[str, Tensor | None], after: Mapping[str, Tensor | None]) -> list[str]:
    """The names of the tensors of `before` whose bits are not what they were."""
    return [name for name, value in before.items() if not _same_bits(value, after.get(name))]


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(*(value.detach().contiguous().view(kind) for value in (a, b)))


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
