"""Every op on every backend and dtype against the float64 oracle: the output and each gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle import compare, run
from torch import Tensor

from kernels import UnsupportedCase
from kernels.common.backends import unsupported
from kernels.registry import Case, Op, ops

BACKENDS = ("eager", "compile", "triton", "tilelang")
FUSED = ("triton", "tilelang")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OPS = list(ops().values())


def need(backend: str, dtype: torch.dtype, op: Op | None = None) -> None:
    """Skips, with the backend's own reason, what this machine cannot run.

    op: says that the test is about what every op has from FusedOp. On the CPU, where TileLang builds each kernel for
    seconds, it then runs for one family.
    """
    reason = unsupported(backend, torch.device(DEVICE, 0) if CUDA else torch.device("cpu"), dtype)
    if reason is not None:
        pytest.skip(reason)
    if op is not None and backend in ("compile", "tilelang") and not CUDA and op.family != "lora":
        pytest.skip("the same for every family: on the CPU slow builds are made for LoRA's ops only")


def call(op: Op, backend: str, **extra: object):
    return partial(op.call, backend=backend, **op.kwargs, **extra)


def oracle(op: Op):
    return partial(op.oracle, **op.kwargs)


def inputs(op: Op, case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    return op.make(case.dims, dtype, DEVICE, seed)


def odd_cases() -> list:
    return [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in (op.tiny, *op.odd)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize(("op", "case"), odd_cases())
def test_matches_oracle(op: Op, case: Case, backend: str, dtype: torch.dtype) -> None:
    need(backend, dtype)
    if not CUDA and case is not op.tiny and op.family != "lora" and (backend == "tilelang" or dtype is torch.float16):
        pytest.skip("on the CPU odd shapes run interpreted, in float32, where errors stand out; all of them on a GPU")
    compare(call(op, backend), oracle(op), inputs(op, case, dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", ("eager", "compile"))
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_baselines_match_oracle(op: Op, backend: str, dtype: torch.dtype) -> None:
    if backend == "compile" and not CUDA and dtype is not torch.float32 and op.family != "lora":
        pytest.skip("on the CPU, where a compilation takes seconds, one dtype; every one on a GPU")
    compare(call(op, backend), oracle(op), inputs(op, op.tiny, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_real_size_on_gpu(op: Op, backend: str, dtype: torch.dtype) -> None:
    compare(call(op, backend), oracle(op), inputs(op, op.quick, dtype))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_only_the_gradients_asked_for(op: Op, backend: str) -> None:
    need(backend, torch.float32, op)
    values = inputs(op, op.tiny)
    for name in op.args:
        compare(call(op, backend), oracle(op), values, needs={name})
        leaves = {key: t.clone().requires_grad_(key == name) for key, t in values.items()}
        op.run(leaves, backend).sum().backward()
        assert [key for key, t in leaves.items() if t.grad is not None] == [name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_base_is_added_in_the_epilogue(op: Op, backend: str) -> None:
    need(backend, torch.float32, op)
    values = inputs(op, op.tiny)
    values["base"] = torch.randn(op.out_shape(op.tiny.dims), device=DEVICE)

    def with_base(*tensors: Tensor) -> Tensor:
        return op.call(*tensors[:-1], **op.kwargs, base=tensors[-1], backend=backend)

    compare(with_base, lambda *tensors: op.oracle(*tensors[:-1], **op.kwargs) + tensors[-1], values)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_strided_inputs(op: Op, backend: str) -> None:
    """Every second column of a wider buffer, and a transposed view, of each argument in turn."""
    need(backend, torch.float32, op)
    values = inputs(op, op.tiny)
    for name, t in values.items():
        wide = torch.randn(*t.shape[:-1], 2 * t.shape[-1], device=DEVICE)
        wide[..., ::2] = t
        turned = t.transpose(-1, -2).contiguous().transpose(-1, -2)
        for view in (wide[..., ::2], turned):
            got = op.call(*(values | {name: view}).values(), **op.kwargs, backend=backend)
            assert torch.equal(got, op.run(values, backend)), name


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_gradient_of_any_strides(op: Op, backend: str) -> None:
    """A stride-0 gradient (from sum) and one that is a slice of a wider buffer (from cat)."""
    need(backend, torch.float32, op)
    values = inputs(op, op.tiny)
    ones = torch.ones(op.out_shape(op.tiny.dims), device=DEVICE)
    wanted = run(call(op, backend), values, ones, set(values))
    summed = {name: t.clone().requires_grad_() for name, t in values.items()}
    op.run(summed, backend).sum().backward()
    joined = {name: t.clone().requires_grad_() for name, t in values.items()}
    out = op.run(joined, backend)
    torch.cat([out, out], -1).backward(torch.ones(*out.shape[:-1], 2 * out.shape[-1], device=DEVICE))
    for name in values:
        assert torch.equal(summed[name].grad, wanted[name]), name
        torch.testing.assert_close(joined[name].grad, 2 * wanted[name])


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_compiles_with_fullgraph(op: Op, backend: str) -> None:
    need(backend, torch.float32, op)
    compare(torch.compile(call(op, backend), fullgraph=True), oracle(op), inputs(op, op.tiny))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_second_derivative_raises(op: Op, backend: str) -> None:
    need(backend, torch.float32, op)
    leaves = op.make(op.tiny.dims, torch.float32, DEVICE, 0, requires_grad=True)
    grads = torch.autograd.grad(op.run(leaves, backend).pow(2).sum(), tuple(leaves.values()), create_graph=True)
    with pytest.raises(RuntimeError):
        sum(grad.sum() for grad in grads).backward()


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_repeats_bit_for_bit(op: Op, backend: str) -> None:
    need(backend, torch.float32, op)
    values = inputs(op, op.odd[-1])
    grad = torch.randn(op.out_shape(op.odd[-1].dims), device=DEVICE)
    first, second = (run(call(op, backend), values, grad, set(values)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_nan_and_inf_propagate(op: Op) -> None:
    need("triton", torch.float32)
    for value in (float("nan"), float("inf")):
        values = inputs(op, op.tiny)
        values[op.args[0]].view(-1)[3] = value
        got, wanted = op.run(values, "triton"), op.run(values, "eager")
        assert torch.equal(got.isfinite(), wanted.isfinite())
        # An infinite entry of a Diag-OFT block is a finite rotation, by π; NaN is never anything but NaN.
        assert value == float("inf") or not wanted.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_bad_arguments_are_named(op: Op, backend: str) -> None:
    values = inputs(op, op.tiny)
    for name, t in values.items():
        for bad, error in (
            (t.long(), TypeError),
            (t[..., :0, None], ValueError),
            (t.to("meta"), ValueError),
            (3, TypeError),
        ):
            if name == op.args[0] and isinstance(bad, Tensor) and bad.is_meta:
                continue
            with pytest.raises(error, match=f"{op.name}: {name}: got .*wanted"):
                op.call(*(values | {name: bad}).values(), **op.kwargs, backend=backend)
    mixed = list(values.values())
    mixed[0], mixed[1] = mixed[0].half(), mixed[1].bfloat16()
    with pytest.raises(TypeError, match=f"{op.name}: {op.args[1]}: got .*wanted"):
        op.call(*mixed, **op.kwargs, backend=backend)
    with pytest.raises(ValueError, match=f"{op.name}: base: got shape .*wanted"):
        op.call(*values.values(), **op.kwargs, base=torch.zeros(1, 2, 3, device=DEVICE), backend=backend)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_unknown_backend(op: Op) -> None:
    with pytest.raises(ValueError, match="backend: got 'cuda', wanted one of"):
        op.run(inputs(op, op.tiny), "cuda")


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_nothing_falls_back(op: Op, backend: str) -> None:
    with pytest.raises(UnsupportedCase, match="float64"):
        op.run(inputs(op, op.tiny, torch.float64), backend)
