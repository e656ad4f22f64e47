"""Launch plans: a call's host code runs once for each kind of call, and what it did is then one short Python function.

A backend's host code chooses tiles, makes views and buffers, and launches kernels; all of it follows from the arguments'
shapes, strides, dtypes, alignment and scalars. `record` runs it once, notes every buffer, copy and launch, and writes them
down as Python source (`Plan.source`) in which pre-compiled kernels are launched by their handles:

    def replay(stream, up, down, base):
        n0 = empty((640, 640), (640, 1), float16)
        launch0(100, 1, 1, stream, function0, metadata0, None, None, None, up.data_ptr(), ..., n0.data_ptr(), 640, ...)
        return n0, ()

Triton's kernels take part through `@planned` above `@triton.jit`, TileLang's through `planned(kernel)` around the compiled one.
Host code that does anything else to a tensor (arithmetic, a fill) has no plan and runs each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.common.views import cdiv

_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided)
# Where a plan packs scratch buffers into one allocation: what the allocator's own buffers are aligned to.
_ALIGNMENT = 512
_recording = threading.local()
# How torch.compile's code allocates on the current CUDA device: three times as quick, but never filled.
_empty_cuda: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def _strided(tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


# How it makes views: several times as quick, but without a bound check, and unknown to autograd, for which it is no view. So
# it is for what a kernel is given and for what is returned of a plan's own buffer.
_view: Callable[..., Tensor] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _strided)


@dataclass(frozen=True)
class Plan:
    """replay(stream, *inputs) does what the recorded host code did and returns what it returned.

    filled: the same with PyTorch's fill of new memory, which its deterministic mode asks for. source: of both.
    """

    replay: Callable[..., Any]
    filled: Callable[..., Any]
    source: str


class Planned:
    """A kernel whose launches a plan can hold; called as what it wraps, a JIT function `kernel[grid](...)` or a callable."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.__wrapped__ = kernel
        self.__doc__ = kernel.__doc__

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":
            raise AttributeError(name)  # a copy that is being made has none yet
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        args = _given(args)
        recorder = getattr(_recording, "recorder", None)
        if recorder is None:
            self.kernel[grid](*args, **options)
        else:
            recorder.launch_grid(self.kernel, grid, args, options)

    def __call__(self, *args: Any) -> None:
        args = _given(args)
        recorder = getattr(_recording, "recorder", None)
        if recorder is None:
            self.kernel(*args)
        else:
            recorder.launch(self.kernel, args)


def unread(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for a tensor whose values host code doesn't need: its shape, without memory; kernels get None for it."""
    if _view is not _strided:
        stride = torch.empty(size, device="meta").stride()
        return _view(torch.empty(0, dtype=dtype, device=device), size, stride, 0)
    tensor = torch.empty(size, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _given(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        None if isinstance(v, Tensor) and v.numel() > 0 and v.untyped_storage().nbytes() == 0 else v for v in args
    )


def planned(kernel: Any) -> Planned:
    """Makes the launches of a kernel recordable: a Triton JIT function, or a compiled kernel that is called on tensors."""
    return Planned(kernel)


def _empty_on(
    device: torch.device | None, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@dataclass
class _Buffer:
    """A tensor that a plan has by name: an input, or one that it makes.

    code: how it is made. scratch: it is for pointers only. used: something points to it.
    """

    name: str
    tensor: Tensor
    code: str | None = None
    scratch: bool = True
    used: bool = False


class _Recorder(TorchDispatchMode):
    """Runs host code and writes down its buffers and launches."""

    def __init__(self, names: Sequence[str], inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.names: dict[str, Any] = {"empty": None, "view": _view, "inf": float("inf"), "nan": float("nan")}
        # Where the buffers lie, of which a plan has one device's.
        self.device: torch.device | None = None
        self.inputs = list(zip(names, inputs, strict=True))
        self.buffers = {name: _Buffer(name, t, scratch=False) for name, t in self.inputs if t is not None}
        # Tensor -> its buffer, by identity; the tensors are kept so that no id comes twice.
        self.owner = {id(b.tensor): b for b in self.buffers.values()}
        self.kept: list[Tensor] = []
        self.steps: list[Callable[[], str]] = []
        self.obstacle: str | None = None
        self.launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.launching:
            return result
        if func.overloadpacket in _EMPTY:
            self._add(result, lambda t: self._empty(t))
        elif func.overloadpacket is _aten.clone and args[0].layout is torch.strided:
            source = self.tensor(args[0])
            self._add(result, lambda t: f"{source}.clone(memory_format={self.name(torch.contiguous_format)})")
            if not result.is_contiguous():
                self.obstacle = "a copy that is not contiguous"
        elif func.is_view or func.overloadpacket is _aten._unsafe_view:
            for made in result if isinstance(result, (list, tuple)) else (result,):
                self._own(made, self._owner(args[0]))
        else:
            self.obstacle = str(func)
        return result

    def launch_grid(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A Triton launch; the compiled kernel's handle is what the plan calls, or in the interpreter the function."""
        self.launching = True
        compiled = kernel[grid](*args, **options)
        self.launching = False
        if compiled is None:
            run = kernel[grid]
            self._tensor_step(lambda *values: run(*values, **options), args)
            return
        values = [*args, *(options[name] for name in kernel.arg_names[len(args) :])]
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        head = [*grid, 1, 1][:3]
        call = f"{self.name(run)}({', '.join(map(str, head))}, stream, {self.name(function)}, {self.name(metadata)}, None, None, None, "
        shown = [self._pointer(v) if isinstance(v, Tensor) else self._constant(v) for v in values]
        self.steps.append(lambda: call + ", ".join(v if isinstance(v, str) else v() for v in shown) + ")")

    def launch(self, kernel: Callable[..., None], args: tuple[Any, ...]) -> None:
        """A call of a compiled kernel on tensors."""
        self.launching = True
        kernel(*args)
        self.launching = False
        self._tensor_step(kernel, args)

    def _tensor_step(self, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        values = [self.tensor(v) if isinstance(v, Tensor) else self._constant(v) for v in args]
        text = f"{self.name(run)}({', '.join(values)})"
        self.steps.append(lambda: text)

    def _add(self, tensor: Tensor, code: Callable[[Tensor], str]) -> None:
        buffer = _Buffer(f"n{len(self.buffers)}", tensor)
        self.buffers[buffer.name] = buffer
        buffer.code = code(tensor)
        buffer.scratch = buffer.code.startswith("empty(")
        self._own(tensor, buffer)
        self.steps.append(lambda: "" if buffer.scratch else f"{buffer.name} = {buffer.code}")

    def _owner(self, tensor: Tensor) -> _Buffer:
        """The buffer that a tensor is a view of; one from elsewhere (made by arithmetic, kept by the host code) has none."""
        if id(tensor) not in self.owner:
            self.obstacle = self.obstacle or "a tensor that is neither an input nor a buffer"
            self._own(tensor, _Buffer("unknown", tensor, scratch=False))
        return self.owner[id(tensor)]

    def _own(self, tensor: Tensor, buffer: _Buffer) -> None:
        self.kept.append(tensor)
        self.owner[id(tensor)] = buffer

    def _empty(self, tensor: Tensor) -> str:
        if not tensor.is_contiguous():
            self.obstacle = "a buffer that is not contiguous"
        if tensor.device != (self.device or tensor.device):
            self.obstacle = "buffers on two devices"
        self.device = tensor.device
        return f"empty({tuple(tensor.shape)}, {tensor.stride()}, {self.name(tensor.dtype)})"

    def _pointer(self, tensor: Tensor) -> Callable[[], str]:
        """The tensor's address; what it is an address in is settled when the whole plan is known."""
        buffer = self._owner(tensor)
        buffer.used = True
        offset = tensor.data_ptr() - buffer.tensor.data_ptr()
        plus = f" + {offset}" if offset else ""
        return lambda: (f"{buffer.name}" if buffer.scratch else f"{buffer.name}.data_ptr()") + plus

    def tensor(self, tensor: Tensor) -> str:
        """An expression for a tensor that is a buffer or a view of one; such a buffer gets an allocation of its own."""
        buffer = self._owner(tensor)
        buffer.scratch = False
        whole, shape, stride = buffer.tensor, tuple(tensor.shape), tensor.stride()
        if tensor.dtype is not whole.dtype:
            self.obstacle = "a view in another dtype"
        if shape == tuple(whole.shape) and stride == whole.stride() and tensor.data_ptr() == whole.data_ptr():
            return buffer.name
        first = tensor.storage_offset() - whole.storage_offset()
        return f"view({buffer.name}, {shape}, {stride}, {first})"

    def name(self, value: Any) -> str:
        """A name in the plan's namespace."""
        same = (lambda v: v == value) if isinstance(value, torch.device) else (lambda v: v is value)
        known = next((name for name, v in self.names.items() if same(v)), None)
        if known is None:
            text = str(value).rsplit(".", 1)[-1]
            known = text if isinstance(value, (torch.dtype, torch.memory_format)) else f"c{len(self.names)}"
            self.names[known] = value
        return known

    def _constant(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int, float)):
            return repr(value)
        return self.name(value)

    def plan(self, result: Any) -> Plan | None:
        """The plan of what was recorded, or None where the host code did what no plan can hold."""
        # First, since a buffer that is returned needs an allocation of its own.
        returned = self._returned(result)
        if self.obstacle is not None:
            return None
        lines, size = [], 0
        for buffer in self.buffers.values():
            if buffer.scratch and buffer.used:
                lines.append(f"{buffer.name} = scratch + {size}")
                size += cdiv(buffer.tensor.numel() * buffer.tensor.itemsize, _ALIGNMENT) * _ALIGNMENT
        if lines:
            made = f"empty(({size},), (1,), {self.name(torch.uint8)})"
            lines = [f"keep = {made}", "scratch = keep.data_ptr()", *lines]
        lines += [line for line in (step() for step in self.steps) if line]
        lines.append(f"return {returned}")
        head = f"def replay({', '.join(['stream', *(name for name, _ in self.inputs)])}):"
        source = "\n    ".join([head, *lines]) + "\n"
        code = compile(source, "<launch plan>", "exec")
        on_cuda = self.device is not None and self.device.type == "cuda"
        filled: dict[str, Any] = {**self.names, "empty": partial(_empty_on, self.device)}
        quick = {**filled, "empty": _empty_cuda} if on_cuda and _empty_cuda is not None else dict(filled)
        exec(code, quick)
        exec(code, filled)
        return Plan(quick["replay"], filled["replay"], source)

    def _returned(self, value: Any) -> str:
        if value is None:
            return "None"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._returned(v)}, ' for v in value)})"
        if self._owner(value).code is None:
            self.obstacle = "an argument that is returned"
        return self.tensor(value)


def record(names: Sequence[str], inputs: Sequence[Tensor | None], run: Callable[..., Any]) -> tuple[Any, Plan | None]:
    """run(*inputs) and its plan: None where the host code did more than make buffers, views and copies and launch.

    names: identifiers for the inputs. run: returns nested tuples of None and of tensors that it made.
    """
    # Aliases, so that each input is an object of its own even where one tensor is passed twice.
    aliases = [None if t is None else t.detach() for t in inputs]
    recorder = _Recorder(names, aliases)
    outer = getattr(_recording, "recorder", None)
    _recording.recorder = recorder
    try:
        with recorder:
            result = run(*aliases)
    finally:
        _recording.recorder = outer
    return result, recorder.plan(result)


def hooked() -> bool:
    """Whether someone watches Triton's launches through its hooks, which a plan's launches don't call."""
    knobs = _knobs()
    for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


@cache
def _knobs() -> Any:
    import triton

    return triton.knobs.runtime
