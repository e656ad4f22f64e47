"""Any subset of the gradients: what is computed, and what a call keeps alive for its backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, combinations

import pytest
import torch
from oracle import compare
from test_ops import DEVICE, FUSED, OPS, call, inputs, need, oracle
from torch import Tensor

from kernels import loha, lokr, oft
from kernels.registry import Op, ops

# By op and the one argument that is trained: what must not outlive the caller's own references.
FREED = {
    ("lora_bypass", "x"): {"x"},
    ("lora_bypass", "up"): {"x", "up", "down"},
    ("lora_bypass", "down"): {"down"},
    ("loha_bypass", "x"): {"x"},
    ("loha_bypass", "up1"): {"x"},
    ("loha_bypass", "up2"): {"x"},
    ("lokr", "w1"): {"w1"},
    ("lokr", "w2"): {"w2"},
    ("lokr_bypass", "x"): {"x"},
    ("oft", "blocks"): {"blocks"},
    ("oft", "weight"): {"blocks", "weight"},
    ("oft_bypass", "y"): {"y", "blocks"},
    ("oft_bypass", "blocks"): {"blocks"},
}


def subsets(names: Iterable[str], backend: str) -> list[tuple[str, ...]]:
    """Every subset; in TileLang, which builds for seconds for each, every one of a single name, and the whole."""
    names = tuple(names)
    counts = range(1, len(names) + 1) if backend == "triton" else sorted({1, len(names)})
    return list(chain.from_iterable(combinations(names, count) for count in counts))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_subset_of_gradients(op: Op, backend: str) -> None:
    need(backend, torch.float32, op)
    values = inputs(op, op.tiny)
    for wanted in subsets(op.args, backend):
        compare(call(op, backend), oracle(op), values, needs=set(wanted))


def check_gradient(op: Op, out: Tensor, leaf: Tensor, exact: dict[str, Tensor], trained: str) -> None:
    """The leaf's gradient against that of `trained` among the exact inputs."""
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaf, grad)[0]
    wanted = torch.autograd.grad(op.run_formula(exact), exact[trained], grad.double())[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)


def survivors(op: Op, backend: str, trained: str) -> set[str]:
    """The arguments that a call keeps alive until its backward; checks the gradient after the others are gone."""
    values = {name: t.requires_grad_(name == trained) for name, t in inputs(op, op.tiny).items()}
    exact = {name: t.detach().double().requires_grad_(name == trained) for name, t in values.items()}
    op.run(values, backend)
    alive = {name: weakref.ref(t) for name, t in values.items()}
    leaf = values[trained].detach().clone().requires_grad_()
    # A product of the leaf, so that nobody else holds what the call is given.
    given = {name: leaf * 1 if name == trained else t for name, t in values.items()}
    alive[trained] = weakref.ref(given[trained])
    out = op.run(given, backend)
    del values, given
    gc.collect()
    kept = {name for name, reference in alive.items() if reference() is not None}
    check_gradient(op, out, leaf, exact, trained)
    return kept


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize(("name", "trained"), FREED)
def test_what_the_backward_does_not_read_is_not_kept(name: str, trained: str, backend: str) -> None:
    op = ops()[name]
    need(backend, torch.float32, op)
    assert not survivors(op, backend, trained) & FREED[name, trained]


@pytest.mark.parametrize("trained", ("up", "down", "x"))
@pytest.mark.parametrize("backend", FUSED)
def test_nor_by_a_compiled_call(backend: str, trained: str) -> None:
    op = ops()["lora_bypass"]
    values = {name: t.requires_grad_(name == trained) for name, t in inputs(op, op.tiny).items()}
    exact = {name: t.detach().double().requires_grad_(name == trained) for name, t in values.items()}
    compiled = torch.compile(call(op, backend), fullgraph=True, backend="aot_eager")
    leaf, alive = values[trained], {name: weakref.ref(t) for name, t in values.items() if name != trained}
    out = compiled(*values.values())
    del values
    gc.collect()
    kept = {name for name, reference in alive.items() if reference() is not None}
    assert not kept & FREED["lora_bypass", trained]
    check_gradient(op, out, leaf, exact, trained)


@pytest.mark.parametrize("backend", FUSED)
def test_arguments_that_only_base_is_trained_beside(backend: str) -> None:
    op = ops()["lora_bypass"]
    values, base = inputs(op, op.tiny), torch.randn(op.out_shape(op.tiny.dims), device=DEVICE, requires_grad=True)
    alive = [weakref.ref(t) for t in values.values()]
    out = op.call(*values.values(), **op.kwargs, base=base, backend=backend)
    del values
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    out.sum().backward()
    assert torch.equal(base.grad, torch.ones_like(base))


def _calls() -> dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]]:
    """Calls with every optional tensor, and LoHa's bypass past its pairs of ranks; each with its arguments' shapes."""
    return {
        "lokr": (
            lambda a, b, c, d, backend: lokr.merge((a, b), (c, d), backend=backend),
            {"w1": (4, 2), "w1_b": (2, 5), "w2": (6, 3), "w2_b": (3, 8)},
        ),
        "lokr_bypass": (
            lambda x, a, b, c, d, backend: lokr.bypass(x, (a, b), (c, d), backend=backend),
            {"x": (7, 40), "w1": (4, 2), "w1_b": (2, 5), "w2": (6, 3), "w2_b": (3, 8)},
        ),
        "oft": (
            lambda b, w, r, backend: oft.merge(b, w, rescale=r, constraint=0.5, backend=backend),
            {"blocks": (3, 8, 8), "weight": (24, 20), "rescale": (24,)},
        ),
        "oft_bypass": (
            lambda y, b, r, backend: oft.bypass(y, b, rescale=r, constraint=0.5, backend=backend),
            {"y": (7, 24), "blocks": (3, 8, 8), "rescale": (24,)},
        ),
        "loha_bypass": (
            lambda x, a, b, c, d, backend: loha.bypass(x, a, b, c, d, backend=backend),
            {"x": (7, 20), "up1": (24, 17), "down1": (17, 20), "up2": (24, 17), "down2": (17, 20)},
        ),
    }


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("name", ("lokr", "lokr_bypass", "oft", "oft_bypass", "loha_bypass"))
def test_subsets_with_every_tensor(name: str, backend: str) -> None:
    need(backend, torch.float32, ops()[name])
    run, shapes = _calls()[name]
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    tensors = {key: torch.randn(shape, generator=generator, device=DEVICE) / 2 for key, shape in shapes.items()}
    for wanted in subsets(tensors, backend):
        compare(partial(run, backend=backend), partial(run, backend="eager"), tensors, needs=set(wanted))
