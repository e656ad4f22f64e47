"""Inputs that broke other kernels, each with its right value; what test_ops.py's matrix has already is not repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import FLOOR_ULP, compare, run, ulp
from test_ops import BACKENDS, DEVICE, FUSED, OPS, call, inputs, need, oracle

from kernels import lora
from kernels.registry import Op

ROOT = Path(__file__).parent.parent
SIXTEEN = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BYPASSES = [op for op in OPS if op.name.endswith("_bypass")]


@pytest.mark.parametrize("backend", FUSED)
def test_fullgraph_as_the_first_call_of_a_process(backend: str) -> None:
    need(backend, torch.float32)
    script = f"""
import torch
from kernels import lora
x, up, down = (torch.randn(s, device={DEVICE!r}) for s in ((5, 32), (24, 4), (4, 32)))
y = torch.compile(lambda *t: lora.bypass(*t, backend={backend!r}), fullgraph=True)(x, up, down)
torch.testing.assert_close(y, lora.bypass(x, up, down, backend="eager"), rtol=1e-4, atol=1e-4)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("op", BYPASSES, ids=lambda op: op.name)
def test_mixed_dtypes_promote_alike(op: Op) -> None:
    """A 16-bit first operand beside float32 ones: computed in 16 bits, returned in float32, gradients in their leaves' dtype."""
    found = {}
    for backend in BACKENDS:
        if backend == "tilelang" and DEVICE == "cpu":
            continue
        values = inputs(op, op.tiny)
        values[op.args[0]] = values[op.args[0]].to(SIXTEEN)
        leaves = {name: t.requires_grad_() for name, t in values.items()}
        out = op.run(leaves, backend)
        out.sum().backward()
        assert out.dtype == torch.float32, backend
        assert all(t.grad is not None and t.grad.dtype == t.dtype for t in leaves.values()), backend
        found[backend] = out.detach()
    for backend, out in found.items():
        torch.testing.assert_close(out, found["eager"], rtol=2e-2, atol=2e-2, msg=backend)


@pytest.mark.parametrize("backend", ("eager", "triton", "tilelang"))
@pytest.mark.parametrize("op", BYPASSES, ids=lambda op: op.name)
def test_autocast(op: Op, backend: str) -> None:
    need(backend, SIXTEEN)
    leaves = op.make(op.tiny.dims, torch.float32, DEVICE, 0, requires_grad=True)
    with torch.autocast(DEVICE, dtype=SIXTEEN):
        out = op.run(leaves, backend)
        wanted = torch.nn.functional.linear(torch.ones(1, 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)).dtype
    out.sum().backward()
    assert out.dtype == wanted
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves.values())


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", BYPASSES, ids=lambda op: op.name)
def test_half_of_a_tensor_split(op: Op, backend: str) -> None:
    """A second half along the last axis: 16-byte alignment and the row stride are another's."""
    need(backend, torch.float32, op)
    values = inputs(op, op.tiny)
    first = op.args[0]
    wide = torch.cat([torch.zeros_like(values[first])[..., :1], values[first]], -1)
    half = wide[..., 1:]
    assert not half.is_contiguous()
    assert torch.equal(op.run(values | {first: half}, backend), op.run(values, backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", ((0,), (2, 0)))
@pytest.mark.parametrize("op", BYPASSES, ids=lambda op: op.name)
def test_no_tokens(op: Op, shape: tuple[int, ...], backend: str) -> None:
    need(backend, torch.float32, op)
    values = inputs(op, op.tiny)
    values[op.args[0]] = torch.zeros(*shape, values[op.args[0]].shape[-1], device=DEVICE)
    leaves = {name: t.clone().requires_grad_() for name, t in values.items()}
    out = op.run(leaves, backend)
    out.sum().backward()
    assert out.shape == (*shape, op.out_shape(op.tiny.dims)[-1])
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape, name
        assert not leaf.grad.any(), name


@pytest.mark.parametrize("backend", FUSED)
def test_intermediate_keeps_the_range_of_float32(backend: str) -> None:
    """x @ downᵀ is 262,144, past float16's range, and the result 256; eager and compile give inf."""
    need(backend, torch.float16)
    x, down = torch.full((1, 4096), 8.0), torch.full((1, 4096), 8.0)
    up = torch.full((3, 1), 1 / 1024)
    x, up, down = (t.to(DEVICE, torch.float16) for t in (x, up, down))
    assert lora.bypass(x, up, down, backend=backend).tolist() == [[256.0] * 3]
    assert lora.bypass(x, up, down, backend="eager").isinf().all()


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_first_call_equals_the_second(op: Op, backend: str) -> None:
    """With empty compile caches: nothing that tunes itself may change the result."""
    need(backend, torch.float32)
    script = f"""
import sys
import torch
from kernels.registry import ops
op = ops()[{op.name!r}]
values = op.make(op.tiny.dims, torch.float32, {DEVICE!r}, 0)
assert torch.equal(op.run(values, {backend!r}), op.run(values, {backend!r}))
"""
    if DEVICE == "cpu" and op.name != "lora":
        pytest.skip("on the CPU one op is enough: nothing tunes itself there")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_side_stream_and_graph(op: Op, backend: str) -> None:
    """Captured on a side stream, forward and backward: a replay with new inputs gives new results."""
    values = op.make(op.quick.dims, torch.float16, "cuda", 0, requires_grad=True)
    other = op.make(op.quick.dims, torch.float16, "cuda", 1)
    grad = torch.randn(op.out_shape(op.quick.dims), device="cuda").half()

    def step() -> torch.Tensor:
        out = op.run(values, backend)
        grads = torch.autograd.grad(out, tuple(values.values()), grad)
        return torch.cat([out.detach().flatten(), *(g.flatten() for g in grads)])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = [step() for _ in range(2)][-1]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
    with torch.no_grad():
        for name, t in values.items():
            t.copy_(other[name])
    graph.replay()
    assert torch.equal(captured, step())
    assert not torch.equal(captured, eager)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_second_device(op: Op, backend: str) -> None:
    """The same shape on both devices, with the first one current."""
    for device in ("cuda:1", "cuda:0"):
        compare(call(op, backend), oracle(op), op.make(op.tiny.dims, torch.float16, device, 0))
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FUSED)
def test_more_than_2_31_elements(backend: str) -> None:
    t, o, i, r = 65_600, 32_768, 64, 4
    if torch.cuda.mem_get_info()[0] < 3 * t * o * 2:
        pytest.skip(f"needs {3 * t * o * 2 >> 30} GiB of free GPU memory")
    x, up, down = (torch.randn(s, device="cuda").bfloat16() for s in ((t, i), (o, r), (r, i)))
    y = lora.bypass(x, up, down, backend=backend)
    exact = (x[-3:].double() @ down.double().T) @ up.double().T
    theirs = ulp((x[-3:] @ down.T) @ up.T, exact, x.dtype)
    assert ulp(y[-3:], exact, x.dtype) <= 2 * theirs + FLOOR_ULP


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_float32_products_are_full_unless_tf32_was_asked_for(op: Op, backend: str) -> None:
    values = op.make(op.quick.dims, torch.float32, "cuda", 0)
    exact = run(oracle(op), {name: t.double() for name, t in values.items()}, None, set())["out"]

    def error() -> float:
        return ((call(op, backend)(*values.values()).double() - exact).norm() / exact.norm()).item()

    assert error() < 1e-5
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert error() < 1e-2
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
