"""One op's plumbing: dtype rule, autocast, backends, autograd, torch.library, devices and empty inputs.

A family makes one `FusedOp` per op and calls it from its public function, after its shape checks:

    _BYPASS = FusedOp(
        "lora_bypass", package="kernels.lora", stem="bypass", args=("x", "up", "down"), scalars=("scale",),
        eager=bypass_reference, out_shape=lambda x, up, down: (*x.shape[:-1], up.shape[0]),
        saved=lambda needs, x, up, down: (((rows(x), up.shape[1]), torch.float32),) if ... else (),
        reads=lambda needs, tensors, scalars: (needs[2], needs[0] or needs[2], needs[0]))
    _BYPASS.call((x, up, down), (scale,), base, backend)

`eager(*tensors, *scalars)` is the formula in PyTorch, without `base`. `kernels.<family>.<dsl>_impl` holds

    <stem>_forward(*tensors, *scalars, base, out_dtype, needs) -> (out, saved)
    <stem>_backward(grad, *tensors, *scalars, saved, needs) -> one gradient or None per tensor of `args`

`reads(needs, tensors, scalars)` says which arguments' values the backward reads (by default all): the others aren't kept, and it
is given their shape alone (`plans.unread`), for which kernels get None. `tensors` are in `args` order (None for an absent optional one), all in one compute dtype, with any strides; `base` is
None or in its own dtype; `needs[i]` says whether tensors[i] wants a gradient (all False: nothing will be asked for); `saved` is a tuple of tensors,
of exactly the shapes and dtypes that the `saved` function gives. `grad` is in the compute dtype, with any strides; gradients come back in the compute dtype, contiguous. No tensor is empty.
The implementations run under the right current device and on PyTorch's current stream, with autograd off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from kernels.common import backends
from kernels.common.checks import check_backend, check_tensor
from kernels.common.plans import Plan, hooked, record, unread

NAMESPACE = "fused_adapters"
Scalars = tuple[float, ...]
Tensors = tuple["Tensor | None", ...]
Spec = tuple[tuple[int, ...], torch.dtype]
Shapes = tuple["tuple[int, ...] | None", ...]
Choice = Callable[["Tensors", "Tensor | None"], Tensor]
# What recognises a call's tensors, whether TF32 was allowed (None: no matter), and the choice for such calls.
Guarded = tuple[Callable[..., bool], "bool | None", Choice]
# Bytes whose multiples kernels are specialised for.
ALIGNMENT = 16
# What a launch plan depends on in one of its tensors.
_LAYOUT = "{0}.shape, {0}.stride(), {0}.dtype, {0}.device, {0}.data_ptr() % ALIGNMENT"
_MAX_KINDS = 4096
# Kinds of call that are told apart by their guards alone; any more are looked up by their whole signature.
_MAX_GUARDED = 8
_SIXTEEN = (torch.float16, torch.bfloat16)
# Quick forms of public functions, which stand in where a PyTorch lacks them: how many dispatch modes are active, the
# innermost function transform, whether autocast is on for any device, the current stream's handle, and the current device without a check that CUDA is initialised: a tensor has settled that.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_transform: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_deterministic: Callable[[], bool] = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
# How torch.compile's code knows its arguments again, in one call: class, shape, strides, dtype, device, requires_grad, and
# the set of dispatch keys, in which lazy negation, implied zeros, function transforms and tracers show (modes don't all).
_TensorGuards: Callable[..., Any] | None = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def _no_saved(needs: Sequence[bool], *tensors: Tensor | None) -> tuple[Spec, ...]:
    return ()


def _read_all(needs: Sequence[bool], tensors: Tensors, scalars: Scalars) -> tuple[bool, ...]:
    return tuple(t is not None for t in tensors)


class FusedOp:
    """An op that runs on any backend and is differentiable in every tensor; see the module's docstring."""

    def __init__(
        self,
        name: str,
        *,
        package: str,
        stem: str,
        args: tuple[str, ...],
        check: Callable[..., None],
        eager: Callable[..., Tensor],
        out_shape: Callable[..., tuple[int, ...]],
        scalars: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        saved: Callable[..., tuple[Spec, ...]] = _no_saved,
        reads: Callable[..., tuple[bool, ...]] = _read_all,
    ) -> None:
        self.name, self.package, self.stem, self.args = name, package, stem, args
        self.check, self.eager, self.out_shape, self.saved_specs = check, eager, out_shape, saved
        self.scalars, self.optional, self._reads = scalars, optional, reads
        self._implementation = cache(lambda backend: import_module(f"{package}.{backend}_impl"))
        self._choices: dict[Any, Choice] = {}
        self._guarded: dict[Any, list[Guarded]] = {}
        self._calls: dict[Any, FusedCall] = {}
        maybe = (*(arg in optional for arg in args), True)
        self._key, self._find = _key_function(args, maybe), _find_function(args, maybe)
        # As torch.compile sees the op: opaque, with a fake implementation and a registered backward.
        self._library = _register(self)

    def call(
        self,
        tensors: Tensors,
        scalars: Scalars,
        base: Tensor | None,
        backend: str,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Computes the op; raises ValueError or TypeError for bad arguments, UnsupportedCase where `backend` can't.

        Checks and chooses once for each kind of call; later calls are known by their arguments' signatures.
        `out_dtype`: the result's dtype, by default the promotion of all.
        """
        if is_compiling() or _dispatch_modes() > 0:
            return self._choose(tensors, scalars, base, backend, out_dtype, opaque=True)(tensors, base)
        try:
            choice, place = self._find(self._guarded, backend, scalars, out_dtype, *tensors, base)
        except (AttributeError, RuntimeError, TypeError):
            # As in `_recall`, or what no dictionary has for a key.
            return self._choose(tensors, scalars, base, backend, out_dtype, opaque=_observed())(tensors, base)
        if choice is None:
            choice = self._recall(place, tensors, scalars, base, backend, out_dtype)
        out: Tensor = choice(tensors, base)
        return out

    def forget(self) -> None:
        """Forgets every kind of call, and their launch plans with them."""
        for known in (self._choices, self._guarded, self._calls):
            known.clear()

    def _recall(
        self,
        place: Any,
        tensors: Tensors,
        scalars: Scalars,
        base: Tensor | None,
        backend: str,
        out_dtype: torch.dtype | None,
    ) -> Choice:
        """The choice for calls of this kind, known by the whole signature or made now; the next one is found by guards."""
        if _observed():
            return self._choose(tensors, scalars, base, backend, out_dtype, opaque=True)
        try:
            key = self._key(place, *tensors, base)
        except (AttributeError, RuntimeError):
            # No tensor, or none with plain memory: either the checks say so, or the choice holds for this call alone.
            return self._choose(tensors, scalars, base, backend, out_dtype)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choose(tensors, scalars, base, backend, out_dtype)
            _remember(self._choices, key, choice)
        self._guard(place, [t for t in (*tensors, base) if t is not None], choice)
        return choice

    def _guard(self, place: Any, present: list[Tensor], choice: Choice) -> None:
        """Lets `_find` see the choice, where there is room and the tensors are as most are."""
        if _TensorGuards is None or any(t.data_ptr() % ALIGNMENT for t in present):
            return
        if place not in self._guarded:
            _remember(self._guarded, place, [])
        known = self._guarded[place]
        if len(known) < _MAX_GUARDED:
            guards = _TensorGuards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            tf32 = backends.allow_tf32() if present[0].dtype is torch.float32 else None
            # One tensor twice never passes them.
            if guards.check(*present):
                known.append((guards.check, tf32, choice))

    def _choose(
        self,
        tensors: Tensors,
        scalars: Scalars,
        base: Tensor | None,
        backend: str,
        out_dtype: torch.dtype | None,
        *,
        opaque: bool = False,
    ) -> Choice:
        """Checks the arguments and says what computes every call of their kind; `opaque`: as one node that others see."""
        self.check(*tensors)
        check_backend(self.name, backend)
        device = self._check_devices(tensors, base)
        if not opaque and any(t is not None and (t.is_neg() or t._is_zerotensor()) for t in (*tensors, base)):
            return self._plain_first(scalars, backend, out_dtype)
        autocast = _autocast(tensors)
        if autocast is not None and any(t is not None and t.dtype not in (autocast, torch.float64) for t in tensors):
            return self._cast_first(autocast, scalars, backend, out_dtype, but=torch.float64)
        compute, promoted = self._dtypes(tensors, base)
        out_dtype = out_dtype or promoted
        if base is not None and tuple(base.shape) != self.out_shape(*tensors):
            wanted = tuple(self.out_shape(*tensors))
            raise ValueError(f"{self.name}: base: got shape {tuple(base.shape)}, wanted {wanted}")
        if any(t is not None and t.dtype is not compute for t in tensors):
            return self._cast_first(compute, scalars, backend, out_dtype)
        if backend == "eager" or (backend == "compile" and is_compiling()):
            return lambda tensors, base: _finish(self.eager(*tensors, *scalars), base, out_dtype)
        if backend == "compile":
            formula = self._compile(scalars)
            return lambda tensors, base: formula(tensors, base, out_dtype)
        needs = tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in tensors)
        if opaque or any(_dispatches(t) for t in (*tensors, base)):
            return lambda tensors, base: self._library(*tensors, base, list(scalars), backend, out_dtype, list(needs))[
                0
            ]
        backends.require(backend, device, compute)
        call = FusedCall(self, backend, scalars, out_dtype, needs, _shapes(tensors), _first(tensors))
        differentiable = any(needs) or (base is not None and base.requires_grad and torch.is_grad_enabled())
        # Forward-mode differentiation has to reach autograd, which refuses it.
        if differentiable or forward_ad._current_level >= 0:
            return lambda tensors, base: _Fused.apply(call, base, *tensors)
        return call.output

    def _cast_first(
        self,
        dtype: torch.dtype,
        scalars: Scalars,
        backend: str,
        out_dtype: torch.dtype | None,
        but: torch.dtype | None = None,
    ) -> Choice:
        return lambda tensors, base: self.call(_cast(tensors, dtype, but), scalars, base, backend, out_dtype)

    def _plain_first(self, scalars: Scalars, backend: str, out_dtype: torch.dtype | None) -> Choice:
        def choice(tensors: Tensors, base: Tensor | None) -> Tensor:
            *plain, base = (None if t is None else _resolved(t) for t in (*tensors, base))
            return self.call(tuple(plain), scalars, base, backend, out_dtype)

        return choice

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
        *plain, base = (None if t is None else _resolved(t) for t in (*tensors, base))
        tensors = tuple(plain)
        return self._call(backend, tensors, scalars, out_dtype, needs, base).forward(tensors, base)

    def read(self, needs: Sequence[bool], tensors: Tensors, scalars: Scalars) -> Tensors:
        """The tensors that the backward reads, None for the others."""
        if not any(needs):
            return (None,) * len(tensors)
        reads = self._reads(tuple(needs), tensors, scalars)
        return tuple(t if read else None for t, read in zip(tensors, reads, strict=True))

    def backward(
        self,
        backend: str,
        grad: Tensor,
        tensors: Tensors,
        scalars: Scalars,
        saved: tuple[Tensor, ...],
        needs: tuple[bool, ...],
        shapes: Shapes | None = None,
    ) -> Tensors:
        """The backend's backward without autograd: a gradient for each tensor that needs one.

        grad is in the compute dtype. shapes: of all tensors, of which those that `read` leaves out may be None.
        """
        shapes = shapes or _shapes(tensors)
        tf32 = grad.dtype is torch.float32 and backends.allow_tf32()
        key = (backend, scalars, needs, shapes, grad.dtype, grad.device, tf32)
        call = self._calls.get(key)
        if call is None:
            call = FusedCall(self, backend, scalars, grad.dtype, needs, shapes, grad)
            _remember(self._calls, key, call)
        return call.backward(grad, tensors, saved)

    def _call(
        self,
        backend: str,
        tensors: Tensors,
        scalars: Scalars,
        out_dtype: torch.dtype,
        needs: tuple[bool, ...],
        base: Tensor | None,
    ) -> FusedCall:
        key = self._key((backend, scalars, out_dtype, needs), *tensors, base)
        call = self._calls.get(key)
        if call is None:
            call = FusedCall(self, backend, scalars, out_dtype, needs, _shapes(tensors), _first(tensors))
            _remember(self._calls, key, call)
        return call

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

    def _compile(self, scalars: Scalars) -> Callable[..., Tensor]:
        def formula(tensors: Tensors, base: Tensor | None, out_dtype: torch.dtype) -> Tensor:
            return _finish(self.eager(*tensors, *scalars), base, out_dtype)

        # Code of its own: torch.compile limits how often one piece of code is compiled, and each kind of call is once.
        formula.__code__ = formula.__code__.replace(co_name=f"{self.name}_formula")
        return torch.compile(formula, fullgraph=True)

    def host_code(self, backend: str, direction: str) -> Callable[..., Any]:
        """The backend's `<stem>_forward` or `<stem>_backward`."""
        code: Callable[..., Any] = getattr(self._implementation(backend), f"{self.stem}_{direction}")
        return code


class FusedCall:
    """What calls of one kind do: the same backend, scalars, shapes, strides, dtypes, alignments, device and gradients.

    The first forward runs the backend's host code and keeps its launch plan, and so does the first backward for each
    layout of the incoming gradient; later ones replay the plan.
    """

    def __init__(
        self,
        op: FusedOp,
        backend: str,
        scalars: Scalars,
        out_dtype: torch.dtype,
        needs: tuple[bool, ...],
        shapes: Shapes,
        like: Tensor,
    ) -> None:
        self.op, self.backend, self.scalars, self.out_dtype, self.needs = op, backend, scalars, out_dtype, needs
        self.shapes, self.compute, self.device = shapes, like.dtype, like.device
        self.index = like.device.index if like.is_cuda else None
        # PyTorch's current stream on the tensors' device, as the driver's handle.
        self.stream: Callable[[], int] = int if self.index is None else partial(_raw_stream, self.index)
        self.count = len(shapes)
        self.empty = any(shape is not None and 0 in shape for shape in shapes)
        # Whether someone watches the launches, which only Triton's own launcher would report.
        self.watched = hooked if backend == "triton" else None
        self.plan: Plan | None = None
        self.reads: tuple[bool, ...] | None = None
        self.backward_plans: dict[Any, Plan] = {}
        # Directions whose host code no plan can hold.
        self.unplanned: set[str] = set()

    def output(self, tensors: Tensors, base: Tensor | None) -> Tensor:
        """The output alone."""
        plan = self.plan
        if (
            plan is None
            or self.index is not None and self.index != _current_device()
            or self.watched is not None and self.watched()
        ):  # fmt: skip
            return self.forward(tensors, base)[0]
        replay = plan.filled if _deterministic() else plan.replay
        out: Tensor = replay(self.stream(), *tensors, base)[0]
        return out

    def forward(self, tensors: Tensors, base: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output and what the backward wants saved."""
        plan = self.plan
        if plan is not None and (replay := self._replay(plan)):
            result: tuple[Tensor, tuple[Tensor, ...]] = replay(self.stream(), *tensors, base)
            return result
        if self.empty:
            return self._empty_forward(tensors, base)
        host = self.op.host_code(self.backend, "forward")

        def run(*inputs: Tensor | None) -> Any:
            return host(*inputs[:-1], *self.scalars, base=inputs[-1], out_dtype=self.out_dtype, needs=self.needs)

        result, self.plan = self._elsewhere(plan, (*self.op.args, "base"), (*tensors, base), run)
        return result

    def backward(self, grad: Tensor, tensors: Tensors, saved: tuple[Tensor, ...]) -> Tensors:
        """A gradient for each tensor that needs one; those that it doesn't read may be None."""
        if grad.dtype is not self.compute:
            grad = grad.to(self.compute)
        grad = _resolved(grad)
        # Of the saved tensors too, which hooks or a changed `.data` may have laid out anew since the forward.
        key = tuple(map(_layout, (grad, *tensors, *saved)))
        plan = self.backward_plans.get(key)
        if plan is not None and (replay := self._replay(plan)):
            grads: Tensors = replay(self.stream(), grad, *tensors, *saved)
            return grads
        if self.empty:
            return tuple(
                grad.new_zeros(shape) if need and shape is not None else None
                for shape, need in zip(self.shapes, self.needs, strict=True)
            )
        tensors = tuple(
            t if t is not None or shape is None else unread(shape, self.compute, self.device)
            for t, shape in zip(tensors, self.shapes, strict=True)
        )
        host, last = self.op.host_code(self.backend, "backward"), 1 + self.count

        def run(*inputs: Tensor | None) -> Any:
            return host(*inputs[:last], *self.scalars, saved=inputs[last:], needs=self.needs)

        names = ("grad", *self.op.args, *(f"saved{i}" for i in range(len(saved))))
        grads, made = self._elsewhere(plan, names, (grad, *tensors, *saved), run)
        if made is not None and made is not plan:
            _remember(self.backward_plans, key, made)
        return grads

    def kept(self, tensors: Tensors) -> Tensors:
        """The tensors that the backward reads, None for the others."""
        if self.reads is None:
            self.reads = tuple(t is not None for t in self.op.read(self.needs, tensors, self.scalars))
        return tuple(t if read else None for t, read in zip(tensors, self.reads, strict=True))

    def _replay(self, plan: Plan) -> Callable[..., Any] | None:
        """What repeats a plan here; None on a device that isn't the current one, or where someone watches."""
        if self.index is not None and self.index != _current_device() or self.watched is not None and self.watched():
            return None
        return plan.filled if _deterministic() else plan.replay

    def _elsewhere(
        self, plan: Plan | None, names: tuple[str, ...], inputs: tuple[Any, ...], run: Callable[..., Any]
    ) -> tuple[Any, Plan | None]:
        """The result and the plan of a call that is the first, watched, or on a device that isn't the current one."""
        with _on(self.index):
            if self.watched is not None and self.watched():
                return run(*inputs), plan
            if plan is not None and (replay := self._replay(plan)):
                return replay(self.stream(), *inputs), plan
            if names[0] in self.unplanned:
                return run(*inputs), None
            result, plan = record(names, inputs, run)
            if plan is None:
                self.unplanned.add(names[0])
            return result, plan

    def _empty_forward(self, tensors: Tensors, base: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        first = _first(tensors)
        out = first.new_zeros(self.op.out_shape(*tensors), dtype=self.out_dtype)
        if base is not None:
            out.copy_(base)
        specs = self.op.saved_specs(self.needs, *tensors)
        return out, tuple(first.new_zeros(size, dtype=dtype) for size, dtype in specs)


class _Fused(torch.autograd.Function):
    """Autograd for the fused backends outside torch.compile; holds no arithmetic of its own."""

    @staticmethod
    def forward(ctx: Any, call: FusedCall, base: Tensor | None, *tensors: Any) -> Tensor:  # type: ignore[override]
        ctx.call, ctx.base_dtype = call, None if base is None else base.dtype
        out, saved = call.forward(tensors, base)
        ctx.save_for_backward(*call.kept(tensors), *saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            return _backward_once(ctx, grad)
        return _backward(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> Any:
    call, needs = ctx.call, ctx.needs_input_grad
    base_grad = grad.to(ctx.base_dtype) if needs[1] else None
    if not any(call.needs):
        return (None, base_grad, *(None for _ in call.needs))
    values = ctx.saved_tensors
    return (None, base_grad, *call.backward(grad, values[: call.count], values[call.count :]))


# Where the gradient is to be differentiated again (create_graph): raises then, rather than being silently wrong.
_backward_once = once_differentiable(_backward)


def _key_function(args: Sequence[str], optional: Sequence[bool]) -> Callable[..., Any]:
    """key(mode, *args, base): `mode` and all that the choice of a call and its launch plan depend on in the tensors.

    Written out for the op's arguments, as one flat tuple, since it is made on each call; raises AttributeError or
    RuntimeError where an argument is no tensor with plain memory.
    """
    of = f"type({{0}}), {_LAYOUT}, {{0}}.requires_grad, {{0}}.is_neg(), {{0}}._is_zerotensor()"
    parts = [
        f"None if {arg} is None else ({of.format(arg)})" if maybe else of.format(arg)
        for arg, maybe in zip((*args, "base"), optional, strict=True)
    ]
    first = _required(args, optional)[0]
    tf32 = f"{first}.dtype is float32 and allow_tf32()"
    names = {"ALIGNMENT": ALIGNMENT, "float32": torch.float32, "allow_tf32": backends.allow_tf32}
    exec(f"def key(mode, {', '.join(args)}, base):\n    return mode, {', '.join((*parts, tf32))}", names)
    function: Callable[..., Any] = names["key"]  # type: ignore[assignment]
    return function


def _required(args: Sequence[str], optional: Sequence[bool]) -> list[str]:
    return [arg for arg, maybe in zip(args, optional[: len(args)], strict=True) if not maybe]


def _find_function(args: Sequence[str], optional: Sequence[bool]) -> Callable[..., Any]:
    """find(known, backend, scalars, out_dtype, *args, base): (the choice whose guards hold for these tensors or None, place).

    The place is where guards are kept: by what is no tensor's, which of the tensors are there, and the size of the first, so
    that a few guards have to be tried at most. They are all for aligned tensors. Written out as `_key_function` is, and
    raises as it does; no address is read of a tensor that isn't a known one.
    """
    names, required = (*args, "base"), _required(args, optional)
    absent = [name for name, maybe in zip(names, optional, strict=True) if maybe]
    addresses = (
        f"(0 if {name} is None else {name}.data_ptr())" if maybe else f"{name}.data_ptr()"
        for name, maybe in zip(names, optional, strict=True)
    )
    mode = "backend, scalars, out_dtype, grad(), autocast(args) if any_autocast() else None, forward_ad._current_level >= 0"
    lines = [
        f"args = {', '.join(names)}",
        f"at = ({mode}, {', '.join(f'{name} is None' for name in absent)}, {required[0]}.numel())",
        f"few = {' is None and '.join(absent)} is None",
        "for check, tf32, choice in known.get(at, ()):",
        f"    if check({', '.join(required)}) if few else check(*[t for t in args if t is not None]):",
        f"        if not ({' | '.join(addresses)}) % ALIGNMENT and (tf32 is None or tf32 is allow_tf32()):",
        "            return choice, at",
        "return None, at",
    ]
    found = {
        "ALIGNMENT": ALIGNMENT,
        "allow_tf32": backends.allow_tf32,
        "any_autocast": _any_autocast,
        "autocast": _autocast,
        "forward_ad": forward_ad,
        "grad": torch.is_grad_enabled,
    }
    head = f"def find(known, backend, scalars, out_dtype, {', '.join(names)}):"
    exec("\n    ".join([head, *lines]), found)
    function: Callable[..., Any] = found["find"]  # type: ignore[assignment]
    return function


# What a backward's launch plan depends on in one of its arguments.
_layout: Callable[[Tensor | None], Any] = eval(
    f"lambda t: None if t is None else ({_LAYOUT.format('t')})", {"ALIGNMENT": ALIGNMENT}
)


def _observed() -> bool:
    """Whether a dispatch mode, a function transform or a tracer is active, which has to see an op and not its launches."""
    return _dispatch_modes() > 0 or _transform() is not None or torch._C._get_tracing_state() is not None


def _dispatches(t: Tensor | None) -> bool:
    """Whether a tensor's class decides itself what an operator does (FakeTensor, DTensor, ...)."""
    return t is not None and type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _resolved(t: Tensor) -> Tensor:
    """The tensor with its values in memory: not lazily negated, not implied zeros."""
    if t._is_zerotensor():
        return torch.zeros_like(t)
    return t.resolve_neg() if t.is_neg() else t


def _autocast(tensors: Tensors) -> torch.dtype | None:
    """The dtype that autocast wants on the tensors' device, or None where it is off."""
    kind = tensors[0].device.type  # type: ignore[union-attr]
    # torch.compile of PyTorch 2.11 and older can't trace the question, so it isn't asked where the answer is known.
    if kind not in ("cuda", "cpu") and not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps a value; a program that never repeats a call must not fill the memory."""
    if len(known) >= _MAX_KINDS:
        known.clear()
    known[key] = value


def _register(op: FusedOp) -> Any:
    """Registers forward and backward of `op` with torch.library; returns the differentiable forward."""
    count = len(op.args)
    declared = ", ".join(f"Tensor{'?' if arg in op.optional else ''} {arg}" for arg in op.args)
    maybe = ", ".join(f"Tensor? {arg}" for arg in op.args)

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
        tensors, (saved, sizes, ranks, scalars, backend, needs) = values[:count], values[count:]
        shapes = _split(sizes, ranks)
        grads = op.backward(backend, grad, tensors, tuple(scalars), tuple(saved), tuple(needs), shapes)
        return [g for g, n in zip(grads, needs, strict=True) if n and g is not None]

    def backward_fake(grad: Tensor, *values: Any) -> list[Tensor]:
        sizes, ranks, needs = values[count + 1], values[count + 2], values[-1]
        return [grad.new_empty(shape) for shape, n in zip(_split(sizes, ranks), needs, strict=True) if n and shape]

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
        schema=f"(Tensor grad, {maybe}, Tensor[] saved, SymInt[] sizes, int[] ranks, float[] scalars, str backend, bool[] needs)"
        " -> Tensor[]",
    )
    backward_op.register_fake(backward_fake)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, (base, ctx.scalars, ctx.backend, _, ctx.needs_list) = inputs[:count], inputs[count:]
        ctx.save_for_backward(*op.read(ctx.needs_list, tensors, tuple(ctx.scalars)), *output[1:])
        ctx.compute = _first(tensors).dtype
        # Of all tensors, one after another: a schema has no lists of lists.
        ctx.sizes = [size for t in tensors if t is not None for size in t.shape]
        ctx.ranks = [0 if t is None else t.ndim for t in tensors]
        ctx.base_dtype = None if base is None or not base.requires_grad else base.dtype

    def differentiate(ctx: Any, grads: list[Tensor]) -> Any:
        values = ctx.saved_tensors
        made = iter(())
        if any(ctx.needs_list):
            saved, grad = list(values[count:]), grads[0].to(ctx.compute)
            rest = (saved, ctx.sizes, ctx.ranks, ctx.scalars, ctx.backend, ctx.needs_list)
            made = iter(backward_op(grad, *values[:count], *rest))
        wanted = [next(made) if need else None for need in ctx.needs_list]
        base_grad = None if ctx.base_dtype is None else grads[0].to(ctx.base_dtype)
        return (*wanted, base_grad, None, None, None, None)

    forward_op.register_autograd(differentiate, setup_context=setup)
    return forward_op


def _shapes(tensors: Tensors) -> Shapes:
    return tuple(None if t is None else tuple(t.shape) for t in tensors)


def _first(tensors: Sequence[Any]) -> Tensor:
    return next(t for t in tensors if t is not None)


def _split(sizes: Sequence[int], ranks: Sequence[int]) -> Shapes:
    """The shapes of tensors of so many axes, None for no axis, which no argument has."""
    left = iter(sizes)
    return tuple(tuple(islice(left, rank)) or None for rank in ranks)


def _cast(tensors: Tensors, dtype: torch.dtype, but: torch.dtype | None = None) -> Tensors:
    """The tensors in `dtype`, those in `but` as they are."""
    if all(t is None or t.dtype is dtype for t in tensors):
        return tensors
    return tuple(t if t is None or t.dtype is but else t.to(dtype) for t in tensors)


def _finish(value: Tensor, base: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if base is not None:
        value = base + value
    return value if value.dtype is out_dtype else value.to(out_dtype)


def _on(index: int | None) -> Any:
    """Makes this CUDA device the current one; None: there is none."""
    return nullcontext() if index is None else torch.cuda.device(index)
