"""One TileLang kernel source for CUDA and for the CPU, and a launch with little host work.

A factory builds a kernel from compile-time constants through a `Dsl`. Its methods mean tiles in shared memory and
registers on CUDA, and plain arrays and serial loops in TileLang's C target, so that the same source runs without a GPU:

    def product(dsl, *, M, N, K, BLOCK_M, BLOCK_N, dtype):
        T = dsl.T

        @T.prim_func
        def kernel(a: T.Tensor((M, K), dtype), b: T.Tensor((K, N), dtype), c: T.Tensor((M, N), dtype), f: T.float32):
            with T.Kernel(T.ceildiv(N, BLOCK_N), T.ceildiv(M, BLOCK_M), threads=128) as (pid_n, pid_m):
                a_tile = dsl.shared((BLOCK_M, K), dtype)
                ...
                dsl.gemm(a_tile, b_tile, acc)
                for i, j in dsl.parallel(BLOCK_M, BLOCK_N):
                    acc[i, j] *= f
                T.copy(acc, c[pid_m * BLOCK_M, pid_n * BLOCK_N])

        return kernel

    run = build(product, target_of(a), M=M, ...)
    run(a, b, c, 0.5)

T.copy masks both ways on both targets: what lies outside a tensor reads as zero and is not written. A module that holds
factories cannot use `from __future__ import annotations`: TileLang reads the parameters' annotations as values.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from kernels.common import backends
from kernels.common.errors import UnsupportedCase
from kernels.common.plans import planned

ALIGNMENT = 16
Kernel = Callable[..., Any]
Size = int | None

_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
# By architecture; the others of compute capability 8.0 and newer give a block 99 KiB.
_SHARED_KIB = {"sm_80": 163, "sm_87": 163, "sm_90a": 227, "sm_100a": 227, "sm_103a": 227, "sm_110a": 227}
_kernels: dict[tuple[Any, ...], Kernel] = {}
_building = RLock()


@dataclass(frozen=True)
class Target:
    """What a kernel is built for: a CUDA architecture such as "sm_90a", or "c" (the CPU); float32 products in TF32?"""

    arch: str
    tf32: bool = False

    @property
    def cpu(self) -> bool:
        return self.arch == "c"

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a block can have."""
        return _SHARED_KIB.get(self.arch, 99) * 1024


class Dsl:
    """The parts of TileLang's language that differ between CUDA and the CPU; `T` is tilelang.language itself."""

    def __init__(self, target: Target) -> None:
        self.T = language()
        self.target = target
        self.cpu = target.cpu

    def size(self, name: str, value: Size) -> Any:
        """An axis: the constant `value`, or for None a size known at run time only (see `sizes`)."""
        return self.T.dynamic(name) if value is None else value

    def declared(self, shape: tuple[Any, ...], rows: tuple[Any, ...]) -> tuple[Any, ...]:
        """How a dense parameter is declared that callers have as `rows` and the kernel reads as `shape`; see `folded`."""
        return shape if self.cpu else rows

    def reshaped(self, tensor: Any, shape: tuple[Any, ...]) -> Any:
        """Such a parameter as the kernel reads it."""
        return tensor if self.cpu else self.T.Tensor(shape, tensor.dtype, tensor.data)

    def shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A tile that every thread of a block sees: shared memory, or an array on the CPU."""
        return self.T.alloc_local(shape, dtype) if self.cpu else self.T.alloc_shared(shape, dtype)

    def swizzle(self, tile: Any) -> Any:
        """Lays a shared tile out on CUDA so that what is written by columns and read by rows meets no bank twice."""
        from tilelang.layout import make_swizzled_layout

        return self.T.annotate_layout({tile: make_swizzled_layout(tile)})

    def fragment(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        """A tile in registers, spread over the block's threads, or an array on the CPU."""
        return self.T.alloc_local(shape, dtype) if self.cpu else self.T.alloc_fragment(shape, dtype)

    def parallel(self, *extents: Any) -> Any:
        """A loop nest whose iterations are independent: spread over the threads, or serial on the CPU."""
        return self.T.grid(*extents) if self.cpu else self.T.Parallel(*extents)

    def pipelined(self, extent: Any, num_stages: int = 0) -> Any:
        """A serial loop whose copies into shared memory run `num_stages` iterations ahead on CUDA."""
        return self.T.serial(extent) if self.cpu or num_stages == 0 else self.T.Pipelined(extent, num_stages=num_stages)

    def gemm(
        self, a: Any, b: Any, c: Any, transpose_a: bool = False, transpose_b: bool = False, tall: bool = False
    ) -> Any:
        """c += a @ b, either operand transposed, accumulated in c's float32.

        a and b lie in shared memory, whole or as a range of rows, and c in registers. 16-bit operands use tensor cores
        (each side of the product a multiple of 16); float32 ones are multiplied in full float32 unless the target
        allows TF32. `tall`: the warps share out c's rows rather than its columns.
        """
        (a_tile, a_row, rows), (b_tile, b_row, _) = _row_range(a), _row_range(b)
        if self.cpu or a_tile.dtype != "float32" or self.target.tf32:
            policy = self.T.GemmWarpPolicy.FullRow if tall else self.T.GemmWarpPolicy.Square
            return self.T.gemm(a, b, c, transpose_A=transpose_a, transpose_B=transpose_b, policy=policy)
        steps = rows if transpose_a else a_tile.shape[1]
        return self._products(a_tile, a_row, b_tile, b_row, c, steps, transpose_a, transpose_b)

    def reduce_sum(self, source: Any, out: Any, dim: int) -> Any:
        """out = the sums of a 2-D register tile over axis `dim`, in the tile's own dtype."""
        return self._reduce("sum", source, out, dim)

    def reduce_max(self, source: Any, out: Any, dim: int) -> Any:
        """out = the largest entries of a 2-D register tile over axis `dim`."""
        return self._reduce("max", source, out, dim)

    def _reduce(self, kind: str, source: Any, out: Any, dim: int) -> Any:
        if self.cpu:
            return self._serial_reduce(kind, source, out, dim % 2)
        return getattr(self.T, f"reduce_{kind}")(source, out, dim=dim)

    def passes(self, names: tuple[str, ...]) -> dict[str, bool]:
        """What T.annotate_pass_configs takes to set these options of TileLang's passes ("disable_wgmma", ...)."""
        return {} if self.cpu else {f"tl.{name}": True for name in names}

    @cached_property
    def _products(self) -> Any:
        """Float32 products on CUDA cores: an outer product per step of the contraction."""
        T = self.T

        @T.macro
        def products(a, a_row, b, b_row, c, steps, transpose_a, transpose_b):  # type: ignore[no-untyped-def]
            for k in T.serial(steps):
                for i, j in T.Parallel(c.shape[0], c.shape[1]):
                    left = a[a_row + k, i] if transpose_a else a[a_row + i, k]
                    right = b[b_row + j, k] if transpose_b else b[b_row + k, j]
                    c[i, j] += left * right

        return products

    @cached_property
    def _serial_reduce(self) -> Any:
        T = self.T

        @T.macro
        def serial_reduce(kind, source, out, dim):  # type: ignore[no-untyped-def]
            for kept in T.serial(source.shape[1 - dim]):
                for step in T.serial(source.shape[dim]):
                    value = source[kept, step] if dim == 1 else source[step, kept]
                    if step == 0:
                        out[kept] = value
                    elif kind == "sum":
                        out[kept] = out[kept] + value
                    else:
                        out[kept] = T.max(out[kept], value)

        return serial_reduce


def _row_range(operand: Any) -> tuple[Any, Any, Any]:
    """A tile, or a range of its rows, as (tile, first row, number of rows)."""
    if hasattr(operand, "region"):
        return operand.buffer, operand.region[0].min, operand.region[0].extent
    return operand, 0, operand.shape[0]


@cache
def language() -> Any:
    """tilelang.language, imported on first use."""
    return _tilelang().language


@cache
def _tilelang() -> Any:
    if find_spec("tilelang") is None:
        raise UnsupportedCase("tilelang is not installed")
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")
    import tilelang
    import tilelang.language

    return tilelang


def dtype_name(dtype: torch.dtype) -> str:
    """TileLang's name of a torch dtype."""
    return _DTYPES[dtype]


def target_of(tensor: Tensor) -> Target:
    """The target for this tensor's device and dtype; raises UnsupportedCase with the reason where there is none."""
    tf32 = tensor.dtype is torch.float32 and tensor.is_cuda and backends.allow_tf32()
    return _target(tensor.device, tensor.dtype, tf32)


@cache
def _target(device: torch.device, dtype: torch.dtype, tf32: bool) -> Target:
    backends.require("tilelang", device, dtype)
    if device.type == "cpu":
        return Target("c")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise UnsupportedCase(f"tilelang kernels are built for compute capability 8.0 or newer, not {major}.{minor}")
    return Target(f"sm_{major}{minor}{'a' if major >= 9 else ''}", tf32)


def sizes(target: Target, **values: int) -> dict[str, Size]:
    """Axis sizes as constants of a CUDA kernel, which buys wide accesses; None on the CPU: one build for all sizes."""
    return dict.fromkeys(values) if target.cpu else dict(values)


def build(factory: Callable[..., Any], target: Target, **constants: Any) -> Kernel:
    """The kernel of `factory(Dsl(target), **constants)`, compiled once per process and cached on disk by TileLang.

    Call it with the kernel's arguments in order, outputs included. On CUDA it runs on PyTorch's current stream of the
    tensors' device, which has to be the current device. Tensors must be as `ready` gives them: their shapes, strides
    and dtypes are checked on each call, their alignment is not.
    """
    key = (factory, target, *constants.items())
    kernel = _kernels.get(key)
    if kernel is None:
        with _building:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _entry(compiled(factory, target, **constants), target)
    return kernel


def compiled(factory: Callable[..., Any], target: Target, **constants: Any) -> Any:
    """The TileLang kernel object behind `build`, with its generated source in `get_kernel_source()`; needs no GPU."""
    function = factory(Dsl(target), **constants)
    if target.cpu:
        return _tilelang().compile(function, target="c", execution_backend="cython")
    return _tilelang().compile(function, target={"kind": "cuda", "arch": target.arch}, execution_backend="tvm_ffi")


def _entry(kernel: Any, target: Target) -> Kernel:
    """The callable with the least host work: on CUDA the compiled host function itself, without its Python adapter."""
    return planned(kernel if target.cpu else kernel.adapter.get_exportable_executable()["main"])


def folded(tensor: Tensor | None, shape: tuple[int, ...], target: Target) -> Tensor | None:
    """What a kernel is given for a parameter that is `declared` as it is on CUDA, where that saves the host a view."""
    return tensor.view(shape) if target.cpu and tensor is not None else tensor


def ready(tensor: Tensor) -> Tensor:
    """The tensor itself if it is dense, row-major and aligned for 16-byte accesses, else such a copy."""
    expected, strides = 1, tensor.stride()
    for size, stride in zip(reversed(tensor.shape), reversed(strides), strict=True):
        if stride != expected:
            return tensor.clone(memory_format=torch.contiguous_format)
        expected *= size
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone(memory_format=torch.contiguous_format)


def ready_base(base: Tensor | None, target: Target) -> Tensor | None:
    """`base` as `ready` gives it, in float32 on the CPU, whose target reads no 16-bit type."""
    if base is None:
        return None
    return ready(base.float() if target.cpu else base)
