"""What a remembered call must not be mistaken for: other layouts in the backward, lazy values, other modes, other tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from oracle import compare
from test_ops import need
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from kernels import UnsupportedCase, lokr, lora, oft
from kernels.common.backends import unsupported
from kernels.lora import triton_merge
from kernels.registry import Op, ops

FUSED = ("triton", "tilelang")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = list(ops().values())


def dense(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def transposed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values, each laid out with its last axis outermost."""
    return {name: dense(t.movedim(-1, 0)).movedim(0, -1).requires_grad_() for name, t in inputs.items()}


@pytest.mark.parametrize("hooked_first", (False, True))
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_saved_tensors_may_come_back_in_another_layout(op: Op, backend: str, hooked_first: bool) -> None:
    """As from offloading to the CPU: what is unpacked is contiguous, whatever was saved."""
    leaves = transposed(op.make(op.tiny.dims, torch.float32, DEVICE, 0))
    grad = torch.randn(op.out_shape(op.tiny.dims), device=DEVICE)

    def gradients(hooks: bool) -> tuple[Tensor, ...]:
        if not hooks:
            return torch.autograd.grad(op.run(leaves, backend), list(leaves.values()), grad)
        with torch.autograd.graph.saved_tensors_hooks(dense, lambda t: t):
            out = op.run(leaves, backend)
        return torch.autograd.grad(out, list(leaves.values()), grad)

    first, second = gradients(hooked_first), gradients(not hooked_first)
    exact = torch.autograd.grad(op.run_formula(leaves), list(leaves.values()), grad)
    for found in (first, second):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ("eager", *FUSED))
def test_a_leaf_laid_out_anew_between_forward_and_backward(backend: str) -> None:
    up = torch.randn(6, 24, device=DEVICE).t().requires_grad_()
    down = torch.randn(6, 20, device=DEVICE, requires_grad=True)
    grad = torch.randn(24, 20, device=DEVICE)
    lora.merge(up, down, backend=backend).backward(grad)
    out = lora.merge(up, down, backend=backend)
    up.data = up.data.contiguous()
    down.grad = None
    out.backward(grad)
    torch.testing.assert_close(down.grad, up.detach().t() @ grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", ("strided", "expanded"))
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("bypass", (False, True), ids=("merge", "bypass"))
def test_rescale_of_any_stride(backend: str, bypass: bool, scale: str) -> None:
    rescale = torch.rand(48, device=DEVICE)[::2] if scale == "strided" else torch.rand(1, device=DEVICE).expand(24)
    blocks = torch.randn(4, 6, 6, device=DEVICE)
    weight = torch.randn(5, 24, device=DEVICE) if bypass else torch.randn(24, 5, device=DEVICE)

    def call(blocks: Tensor, weight: Tensor, backend: str = backend) -> Tensor:
        if bypass:
            return oft.bypass(weight, blocks, rescale=rescale.to(weight.dtype), backend=backend)
        return oft.merge(blocks, weight, rescale=rescale.to(weight.dtype), backend=backend)

    compare(call, lambda *tensors: call(*tensors, backend="eager"), {"blocks": blocks, "weight": weight})


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_lazily_negated_values(op: Op, backend: str) -> None:
    inputs = op.make(op.tiny.dims, torch.float32, DEVICE, 0)
    out = op.run(inputs, backend)
    for name in inputs:
        negated = {**inputs, name: torch._neg_view((-inputs[name]).contiguous())}
        torch.testing.assert_close(op.run(negated, backend), out)
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    grad = torch.randn_like(out)
    for given in (grad, torch._neg_view((-grad).contiguous())):
        found = torch.autograd.grad(op.run(leaves, backend), list(leaves.values()), given)
        exact = torch.autograd.grad(op.run_formula(leaves), list(leaves.values()), grad)
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_forward_mode_is_refused(op: Op, backend: str) -> None:
    inputs = op.make(op.tiny.dims, torch.float32, DEVICE, 0)
    op.run(inputs, backend)
    name = next(iter(inputs))
    with forward_ad.dual_level():
        dual = {**inputs, name: forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))}
        with pytest.raises(RuntimeError, match="jvp"):
            op.run(dual, backend)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_fake_tensors_see_one_node(op: Op, backend: str) -> None:
    inputs = op.make(op.tiny.dims, torch.float32, DEVICE, 0)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in inputs.items()}
        assert op.run(fake, backend).shape == op.out_shape(op.tiny.dims)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert op.run(inputs, backend).shape == op.out_shape(op.tiny.dims)


@pytest.mark.parametrize("backend", FUSED)
def test_tracers_see_one_node(backend: str) -> None:
    up, down = torch.randn(8, 4, device=DEVICE), torch.randn(4, 12, device=DEVICE)

    def merge(up: Tensor, down: Tensor) -> Tensor:
        return lora.merge(up, down, backend=backend)

    traced: Any = make_fx(merge, tracing_mode="real")(up, down)
    assert any("fused_adapters.lora" in str(node.target) for node in traced.graph.nodes)
    torch.testing.assert_close(traced(2 * up, down), 2 * up @ down, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.functionalize(merge)(up, down), up @ down, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="[Tt]racing"):
        torch.jit.trace(merge, (up, down))


@pytest.mark.parametrize("backend", FUSED)
def test_what_a_known_call_is_not_mistaken_for(backend: str) -> None:
    """The same two tensors, or others of their sizes, once a plain call on them is known by its guards."""
    up, down = torch.randn(8, 4, device=DEVICE), torch.randn(4, 8, device=DEVICE)
    base = torch.randn(8, 8, device=DEVICE)

    def merge(up: Tensor, down: Tensor, base: Tensor | None = None, scale: float = 1.0) -> Tensor:
        return lora.merge(up, down, scale, base=base, backend=backend)

    def close(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    for _ in range(2):
        close(merge(up, down), up @ down)
        close(merge(up, down, base), up @ down + base)
    close(merge(up, down, scale=2.0), 2 * up @ down)
    close(merge(up, down, base.t()), up @ down + base.t())
    turned, wide = dense(up.t()).t(), torch.randn(8, 8, device=DEVICE)
    close(merge(turned, down), up @ down)
    close(merge(wide[:, :4], down), wide[:, :4] @ down)
    close(
        merge(torch.randn(33, device=DEVICE)[1:].view(8, 4), down).sum().isfinite(), torch.tensor(True, device=DEVICE)
    )
    close(merge(torch._neg_view(up), down), -up @ down)
    assert merge(up.view(4, 8).t(), down.view(4, 8)).shape == (8, 8)
    assert merge(up.view(16, 2), down.view(2, 16)).shape == (16, 16)
    parameter = torch.nn.Parameter(up)
    out = merge(parameter, down)
    close(torch.autograd.grad(out.sum(), parameter)[0], torch.ones_like(out) @ down.t())
    with torch.no_grad():
        assert not merge(parameter, down).requires_grad
    assert merge(parameter, down).requires_grad
    with torch.inference_mode():
        assert merge(up, down).is_inference()
    assert not merge(up, down).is_inference()
    with torch.autocast(DEVICE, torch.bfloat16):
        if unsupported(backend, up.device, torch.bfloat16) is None:
            assert merge(up, down).dtype is torch.bfloat16
        else:
            with pytest.raises(UnsupportedCase):
                merge(up, down)
    assert merge(up, down).dtype is torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(merge(up, down)) is not Tensor
    assert any(
        "fused_adapters.lora" in str(node.target)
        for node in make_fx(lambda up, down: merge(up, down))(up, down).graph.nodes
    )
    close(torch.func.functionalize(merge)(up, down), up @ down)
    with pytest.raises(TypeError, match="down: got NoneType"):
        merge(up, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="base: got shape"):
        merge(up, down, base.view(4, 16))
    close(merge(up, down), up @ down)


def test_compile_has_no_limit_on_kinds_of_call() -> None:
    """Each kind is compiled once, so torch.compile's limit on recompilations is never met."""
    for rows in range(2, 13):
        up, down = torch.randn(rows, 3, device=DEVICE), torch.randn(3, 8, device=DEVICE)
        torch.testing.assert_close(lora.merge(up, down, backend="compile"), up @ down, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", ("tf32", "ieee"))
def test_the_new_tf32_switch(wanted: str) -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this PyTorch has only the old switch")
    up, down = torch.randn(8, 4, device=DEVICE), torch.randn(4, 12, device=DEVICE)
    before = matmul.fp32_precision
    matmul.fp32_precision = wanted
    try:
        for backend in FUSED:
            found = lora.merge(up, down, backend=backend)
            torch.testing.assert_close(found.double(), up.double() @ down.double(), rtol=1e-2, atol=1e-2)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("backend", ("eager", "compile", *FUSED))
def test_transposed_kronecker_factors(backend: str) -> None:
    w1, w2 = torch.randn(5, 4, device=DEVICE).t(), torch.randn(3, 6, device=DEVICE).t()
    wanted = torch.einsum("ab,cd->acbd", w1, w2).reshape(24, 15)
    torch.testing.assert_close(lokr.merge(w1, w2, backend=backend), wanted)


def test_clear_refusals() -> None:
    up, down = torch.randn(8, 4, device="meta"), torch.randn(4, 12, device="meta")
    assert lora.merge(up, down, backend="eager").shape == (8, 12)
    with pytest.raises(UnsupportedCase, match="meta"):
        lora.merge(up, down, backend="triton")
    with pytest.raises(ValueError, match="backend"):
        lora.merge(torch.randn(8, 4), torch.randn(4, 12), backend=["triton"])  # type: ignore[arg-type]


def test_float64_stays_float64_under_autocast() -> None:
    up, down = torch.randn(8, 4).double(), torch.randn(4, 12).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert lora.merge(up, down, backend="eager").dtype is torch.nn.functional.linear(up, down.t()).dtype


@pytest.mark.parametrize("backend", ("eager", "compile", "triton"))
@pytest.mark.parametrize("other", (torch.float16, torch.float32))
def test_float64_beside_another_dtype(backend: str, other: torch.dtype) -> None:
    """The result takes the promotion; what is computed in is the 16-bit type, or the first operand's."""
    need(backend, other)
    up, down = torch.randn(8, 4, device=DEVICE, dtype=other), torch.randn(4, 12, device=DEVICE).double()
    found = lora.merge(up, down, backend=backend)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, up.double() @ down, rtol=1e-2, atol=2e-2)


def test_a_kernel_can_be_copied() -> None:
    assert copy.copy(triton_merge._merge_kernel).kernel is triton_merge._merge_kernel.kernel
