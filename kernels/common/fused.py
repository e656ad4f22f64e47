"""One op's plumbing: dtype rule, autocast, backends, autograd, torch.library, devices and empty inputs.

A family makes one `FusedOp` per op and calls it from its public function, after its shape checks:

    _BYPASS = FusedOp(
        "lora_bypass", package="kernels.lora", stem="bypass", args=("x", "up", "down"), scalars=("scale",),
        eager=bypass_reference, out_shape=lambda x, up, down: (*x.shape[:-1], up.shape[0]),
        saved=lambda needs, x, up, down: (((rows(x), up.shape[1]), torch.float32),) if ... else ())
    _BYPASS((x, up, down), (scale,), base=base, backend=backend)

`eager(*tensors, *scalars)` is the formula in PyTorch, without `base`. `kernels.<family>.<dsl>_impl` holds

    <stem>_forward(*tensors, *scalars, base, out_dtype, needs) -> (out, saved)
    <stem>_backward(grad, *tensors, *scalars, saved, needs) -> one gradient or None per tensor of `args`

where `tensors` are in `args` order (None for an absent optional one), all in one compute dtype, with any strides; `base` is
None or in its own dtype; `needs[i]` says whether tensors[i] wants a gradient (all False: nothing will be asked for); `saved` is a tuple of tensors,
of exactly the shapes and dtypes that the `saved` function gives. `grad` is in the compute dtype, with any strides; gradients come back in the compute dtype, contiguous. No tensor is empty.
The implementations run under the right current device and on PyTorch's current stream, with autograd off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common import backends
from kernels.common.checks import check_backend, check_tensor

NAMESPACE = "fused_adapters"
Scalars = tuple[float, ...]
Tensors = tuple["Tensor | None", ...]
Spec = tuple[tuple[int, ...], torch.dtype]
_SIXTEEN = (torch.float16, torch.bfloat16)


def _no_saved(needs: Sequence[bool], *tensors: Tensor | None) -> tuple[Spec, ...]:
    return ()


class FusedOp:
    """An op that runs on any backend and is differentiable in every tensor; see the module's docstring."""

    def __init__(
        self,
        name: str,
        *,
        package: str,
        stem: str,
        args: tuple[str, ...],
        eager: Callable[..., Tensor],
        out_shape: Callable[..., tuple[int, ...]],
        scalars: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        saved: Callable[..., tuple[Spec, ...]] = _no_saved,
    ) -> None:
        self.name, self.package, self.stem, self.args = name, package, stem, args
        self.eager, self.out_shape, self.saved_specs = eager, out_shape, saved
        self.scalars, self.optional = scalars, optional
        self._compiled = cache(self._compile)
        self._implementation = cache(lambda backend: import_module(f"{package}.{backend}_impl"))
        # As torch.compile sees the op: opaque, with a fake implementation and a registered backward.
        self._library = _register(self)

    def __call__(self, tensors: Tensors, scalars: Scalars = (), *, base: Tensor | None, backend: str) -> Tensor:
        """Computes the op; raises ValueError or TypeError for bad arguments, UnsupportedCase where `backend` can't."""
        check_backend(self.name, backend)
        device = self._check_devices(tensors, base)
        if torch.is_autocast_enabled(device.type):
            tensors = _cast(tensors, torch.get_autocast_dtype(device.type))
        compute, out_dtype = self._dtypes(tensors, base)
        tensors = _cast(tensors, compute)
        if base is not None and tuple(base.shape) != self.out_shape(*tensors):
            raise ValueError(
                f"{self.name}: base: got shape {tuple(base.shape)}, wanted {tuple(self.out_shape(*tensors))}"
            )
        if backend == "eager" or backend == "compile":
            formula = self.eager if backend == "eager" else self._compiled(scalars, base is not None)
            if backend == "eager":
                return _finish(formula(*tensors, *scalars), base, out_dtype)
            return formula(tensors, base, out_dtype)
        if torch.compiler.is_compiling():
            needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
            return self._library(*tensors, base, list(scalars), backend, out_dtype, needs)[0]
        backends.require(backend, device, compute)
        if torch.is_grad_enabled() and (
            any(t is not None and t.requires_grad for t in tensors) or (base is not None and base.requires_grad)
        ):
            return _Fused.apply(self, backend, scalars, out_dtype, base, *tensors)
        return self.forward(backend, tensors, scalars, base, out_dtype, (False,) * len(tensors))[0]

    def forward(
        self,
        backend: str,
        tensors: Tensors,
        scalars: Scalars,
        base: Tensor | None,
        out_dtype: torch.dtype,
        needs: tuple[bool, ...],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The backend's forward without autograd: the output and what the backward wants saved."""
        first = _first(tensors)
        if any(t is not None and t.numel() == 0 for t in tensors):
            shape = self.out_shape(*tensors)
            out = first.new_zeros(shape, dtype=out_dtype)
            if base is not None:
                out.copy_(base)
            specs = self.saved_specs(needs, *tensors)
            return out, tuple(first.new_zeros(size, dtype=dtype) for size, dtype in specs)
        run = getattr(self._implementation(backend), f"{self.stem}_forward")
        with _on(first.device):
            return run(*tensors, *scalars, base=base, out_dtype=out_dtype, needs=needs)

    def backward(
        self,
        backend: str,
        grad: Tensor,
        tensors: Tensors,
        scalars: Scalars,
        saved: tuple[Tensor, ...],
        needs: tuple[bool, ...],
    ) -> Tensors:
        """The backend's backward without autograd: a gradient for each tensor that needs one."""
        if grad.numel() == 0 or any(t is not None and t.numel() == 0 for t in tensors):
            return tuple(
                torch.zeros_like(t) if n and t is not None else None for t, n in zip(tensors, needs, strict=True)
            )
        run = getattr(self._implementation(backend), f"{self.stem}_backward")
        with _on(grad.device):
            return run(grad.to(_first(tensors).dtype), *tensors, *scalars, saved=saved, needs=needs)

    def _check_devices(self, tensors: Tensors, base: Tensor | None) -> torch.device:
        device = None
        for arg, tensor in zip((*self.args, "base"), (*tensors, base), strict=True):
            if tensor is None and (arg == "base" or arg in self.optional):
                continue
            tensor = check_tensor(self.name, arg, tensor)
            if device is None:
                device, first = tensor.device, arg
            elif tensor.device != device:
                raise ValueError(f"{self.name}: {arg}: got device {tensor.device}, wanted {device} ({first}'s device)")
        assert device is not None
        return device

    def _dtypes(self, tensors: Tensors, base: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
        """The compute dtype (a 16-bit one if any operand is 16-bit) and the result's (the promotion of all)."""
        compute = out = _first(tensors).dtype
        for arg, tensor in zip((*self.args, "base"), (*tensors, base), strict=True):
            if tensor is None or tensor.dtype is out:
                continue
            if tensor.dtype in _SIXTEEN:
                if compute in _SIXTEEN and compute is not tensor.dtype:
                    raise TypeError(
                        f"{self.name}: {arg}: got {tensor.dtype} beside {compute}, wanted one 16-bit dtype in a call"
                    )
                compute = tensor.dtype if arg != "base" else compute
            out = torch.promote_types(out, tensor.dtype)
        return compute, out

    def _compile(self, scalars: Scalars, has_base: bool) -> Callable[..., Tensor]:
        def formula(tensors: Tensors, base: Tensor | None, out_dtype: torch.dtype) -> Tensor:
            return _finish(self.eager(*tensors, *scalars), base, out_dtype)

        return torch.compile(formula, fullgraph=True)


class _Fused(torch.autograd.Function):
    """Autograd for the fused backends outside torch.compile; holds no arithmetic of its own."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        op: FusedOp,
        backend: str,
        scalars: Scalars,
        out_dtype: torch.dtype,
        base: Tensor | None,
        *tensors: Any,
    ) -> Tensor:
        ctx.op, ctx.backend, ctx.scalars = op, backend, scalars
        ctx.base_dtype = None if base is None else base.dtype
        ctx.needs = ctx.needs_input_grad[5:]
        out, saved = op.forward(backend, tensors, scalars, base, out_dtype, ctx.needs)
        ctx.save_for_backward(*tensors, *saved)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # type: ignore[override]
        count = len(ctx.needs)
        if grad is None:
            return (None,) * (5 + count)
        values = ctx.saved_tensors
        grads: Tensors = (None,) * count
        if any(ctx.needs):
            grads = ctx.op.backward(ctx.backend, grad, values[:count], ctx.scalars, values[count:], ctx.needs)
        base_grad = grad.to(ctx.base_dtype) if ctx.needs_input_grad[4] else None
        return (None, None, None, None, base_grad, *grads)


def _register(op: FusedOp) -> Any:
    """Registers forward and backward of `op` with torch.library; returns the differentiable forward."""
    count = len(op.args)
    declared = ", ".join(f"Tensor{'?' if arg in op.optional else ''} {arg}" for arg in op.args)

    def forward(*values: Any) -> list[Tensor]:
        tensors, (base, scalars, backend, out_dtype, needs) = values[:count], values[count:]
        compute = _first(tensors)
        backends.require(backend, compute.device, compute.dtype)
        out, saved = op.forward(backend, tensors, tuple(scalars), base, out_dtype, tuple(needs))
        return [out, *saved]

    def forward_fake(*values: Any) -> list[Tensor]:
        tensors, (_, _, _, out_dtype, needs) = values[:count], values[count:]
        first = _first(tensors)
        specs = ((op.out_shape(*tensors), out_dtype), *op.saved_specs(tuple(needs), *tensors))
        return [first.new_empty(shape, dtype=dtype) for shape, dtype in specs]

    def backward(grad: Tensor, *values: Any) -> list[Tensor]:
        tensors, (saved, scalars, backend, needs) = values[:count], values[count:]
        grads = op.backward(backend, grad, tensors, tuple(scalars), tuple(saved), tuple(needs))
        return [g for g, n in zip(grads, needs, strict=True) if n and g is not None]

    def backward_fake(grad: Tensor, *values: Any) -> list[Tensor]:
        tensors, needs = values[:count], values[-1]
        return [t.new_empty(t.shape) for t, n in zip(tensors, needs, strict=True) if n]

    forward_op = torch.library.custom_op(
        f"{NAMESPACE}::{op.name}",
        forward,
        mutates_args=(),
        schema=f"({declared}, Tensor? base, float[] scalars, str backend, ScalarType out_dtype, bool[] needs) -> Tensor[]",
    )
    forward_op.register_fake(forward_fake)
    backward_op = torch.library.custom_op(
        f"{NAMESPACE}::{op.name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad, {declared}, Tensor[] saved, float[] scalars, str backend, bool[] needs) -> Tensor[]",
    )
    backward_op.register_fake(backward_fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.save_for_backward(*inputs[:count], *output[1:])
        base, ctx.scalars, ctx.backend, _, ctx.needs_list = inputs[count:]
        ctx.base_dtype = None if base is None or not base.requires_grad else base.dtype

    def differentiate(ctx: Any, grads: list[Tensor]) -> Any:
        values = ctx.saved_tensors
        made = iter(())
        if any(ctx.needs_list):
            saved = list(values[count:])
            made = iter(backward_op(grads[0], *values[:count], saved, ctx.scalars, ctx.backend, ctx.needs_list))
        wanted = [next(made) if need else None for need in ctx.needs_list]
        base_grad = None if ctx.base_dtype is None else grads[0].to(ctx.base_dtype)
        return (*wanted, base_grad, None, None, None, None)

    forward_op.register_autograd(differentiate, setup_context=setup)
    return forward_op


def _first(tensors: Sequence[Any]) -> Tensor:
    return next(t for t in tensors if t is not None)


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    if all(t is None or t.dtype is dtype for t in tensors):
        return tensors
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _finish(value: Tensor, base: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if base is not None:
        value = base + value
    return value if value.dtype is out_dtype else value.to(out_dtype)


def _on(device: torch.device) -> Any:
    """Makes `device` the current one, at no cost where it already is or where there is no GPU."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
