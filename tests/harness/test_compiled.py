"""The compile arm's proof: whatever runs eagerly under its name is invalid."""

from __future__ import annotations

import pytest
import torch
from fakes import product

from harness import compiled


def reason(function, *, stance="default", shape=(8, 4)):
    """What the proof says about forward + backward of function, after a warm-up under the default stance."""
    compiled.fresh()
    a, b = torch.randn(shape, requires_grad=True), torch.randn(shape[::-1], requires_grad=True)

    def call():
        a.grad = b.grad = None
        function(a, b, 0.5).sum().backward()

    call()
    captured = compiled.graphs()
    with torch.compiler.set_stance(stance):
        return compiled.problem({"fwdbwd": (call, 2)}, captured)


def test_compiled_arm_passes():
    assert compiled.counter_works()
    assert reason(torch.compile(product, fullgraph=True)) is None


def test_planted_eager_arm():
    assert reason(product) == "not compiled: no graph was captured, the arm ran eagerly"


def test_planted_fallback_after_the_warm_up():
    found = reason(torch.compile(product, fullgraph=True), stance="force_eager")
    assert found == "not compiled: fwdbwd entered 0 of 2 compiled graphs, the rest ran eagerly"


def test_planted_eager_backward():
    class Eager(torch.autograd.Function):
        forward_graph = torch.compile(product, fullgraph=True)

        @staticmethod
        def forward(ctx, a, b, scale):
            ctx.save_for_backward(a, b)
            return Eager.forward_graph(a, b, scale)

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad @ b.T, a.T @ grad, None

    assert reason(Eager.apply) == "not compiled: fwdbwd entered 1 of 2 compiled graphs, the rest ran eagerly"


def test_graph_break():
    def broken(a, b, scale):
        out = a @ b
        torch._dynamo.graph_break()
        return out * scale

    assert reason(torch.compile(broken)).startswith("not wholly compiled: graph break")


def test_another_dynamo_backend_is_not_the_arm():
    assert "entered 0 of 2" in reason(torch.compile(product, fullgraph=True, backend="eager"))


def test_recompilation_is_seen():
    compiled.fresh()
    function = torch.compile(product, fullgraph=True, dynamic=False)
    sizes = iter((4, 6))

    def call():
        size = next(sizes)
        function(torch.ones(8, size), torch.ones(size, 8), 0.5)

    call()
    assert compiled.problem({"fwd": (call, 1)}, compiled.graphs()) == "recompiled while it was measured: 1 more graphs"


def test_twelve_shapes_through_one_callable():
    """Past the recompile limit Dynamo runs eagerly, and the row says so; after `fresh` the same shape is compiled."""
    function = torch.compile(product, dynamic=False)
    compiled.fresh()
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(recompile_limit=2):
        patch.setattr(compiled, "fresh", lambda: None)
        found = [reason(function, shape=(4 + i, 4)) for i in range(4)]
    assert found[0] is None and "entered 0 of 2" in found[3]
    assert reason(function, shape=(7, 4)) is None
