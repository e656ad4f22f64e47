"""Diag-OFT's hard inputs: block sizes, tiny and huge rotations, rescale and constraint, what is not finite, empties."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle import compare, run, ulp
from torch import Tensor

from kernels import UnsupportedCase, oft
from kernels.common.backends import unsupported
from kernels.oft.reference import bypass_reference, delta_reference, merge_reference

FUSED = ("triton", "tilelang")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def need(backend: str, dtype: torch.dtype, *, build: bool = False) -> None:
    """Skips what cannot run here; `build`: worth a TileLang build for the CPU of its own."""
    if backend == "tilelang" and not CUDA and not build:
        pytest.skip("TileLang builds every block size anew, for seconds each: on the CPU test_ops.py has the sizes")
    reason = unsupported(backend, torch.device(DEVICE, 0) if CUDA else torch.device("cpu"), dtype)
    if reason is not None:
        pytest.skip(reason)


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def arguments(op: str, count: int, size: int, n: int, *, scale: float = 0.14, dtype: torch.dtype = torch.float32):
    blocks = normal(count, size, size, scale=scale, dtype=dtype)
    if op == "merge":
        return {"blocks": blocks, "weight": normal(count * size, n, seed=1, dtype=dtype)}
    return {"y": normal(n, count * size, seed=1, dtype=dtype), "blocks": blocks}


def call(op: str, backend: str, constraint: float | None = None):
    def run_op(first: Tensor, second: Tensor, rescale: Tensor | None = None) -> Tensor:
        return getattr(oft, op)(first, second, rescale=rescale, constraint=constraint, backend=backend)

    return run_op


def formula(op: str, constraint: float = 0.0):
    return partial(merge_reference if op == "merge" else bypass_reference, constraint=constraint)


@pytest.mark.parametrize(("count", "size", "n"), [(6, 1, 9), (5, 2, 20), (3, 8, 33), (2, 17, 24), (1, 64, 20)])
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", ("merge", "bypass"))
def test_block_sizes(op: str, backend: str, count: int, size: int, n: int) -> None:
    need(backend, torch.float32)
    compare(call(op, backend), formula(op), arguments(op, count, size, n))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", ("merge", "bypass"))
def test_larger_blocks_are_refused(op: str, backend: str) -> None:
    need(backend, torch.float32, build=True)
    with pytest.raises(UnsupportedCase, match="blocks of 65 are above 64"):
        call(op, backend)(*arguments(op, 1, 65, 4).values())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("fp32", "fp16"))
@pytest.mark.parametrize("size", (4, 12))
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", ("merge", "bypass"))
def test_rescale_and_constraint(op: str, backend: str, size: int, dtype: torch.dtype) -> None:
    """Both at once, the constraint binding, with every gradient; then each gradient alone."""
    need(backend, dtype, build=size == 4)
    values = arguments(op, 3, size, 40, dtype=dtype)
    values["rescale"] = normal(3 * size, seed=2, scale=0.3, dtype=dtype) + 1
    skew = values["blocks"] - values["blocks"].mT
    constraint = 0.5 * skew.float().norm().item()
    compare(call(op, backend, constraint), formula(op, constraint), values)
    for name in values:
        compare(call(op, backend, constraint), formula(op, constraint), values, needs={name})


@pytest.mark.parametrize("backend", FUSED)
def test_loose_constraint_changes_nothing(backend: str) -> None:
    need(backend, torch.float32)
    values = arguments("merge", 3, 4, 40)
    grad = normal(12, 40, seed=3)
    free, bound = (run(call("merge", backend, c), values, grad, {"blocks", "weight"}) for c in (None, 1e3))
    for name, value in free.items():
        torch.testing.assert_close(bound[name], value)


@pytest.mark.parametrize("backend", ("eager", *FUSED))
def test_merged_weight_is_the_rescaled_rotation(backend: str) -> None:
    """base = W and rescale r give r ∘ (Rᵀ W), with R = (I + Q)(I - Q)⁻¹ orthogonal."""
    need(backend, torch.float32)
    values = arguments("merge", 3, 4, 40)
    blocks, weight = values["blocks"].double(), values["weight"].double()
    rescale = normal(12, seed=2)
    q, eye = blocks - blocks.mT, torch.eye(4, dtype=torch.float64, device=DEVICE)
    rotation = (eye + q) @ torch.linalg.inv(eye - q)
    torch.testing.assert_close(rotation @ rotation.mT, eye.expand(3, 4, 4))
    wanted = rescale.double()[:, None] * torch.einsum("knm,kni->kmi", rotation, weight.view(3, 4, 40)).flatten(0, 1)
    got = oft.merge(*values.values(), base=values["weight"], rescale=rescale, backend=backend)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("fp32", "fp16"))
@pytest.mark.parametrize(("size", "scale"), [(4, 1e-4), (16, 1e-4), (4, 30.0), (16, 30.0), (4, 1e4), (16, 1e4)])
@pytest.mark.parametrize("backend", FUSED)
def test_tiny_and_huge_rotations(backend: str, size: int, scale: float, dtype: torch.dtype) -> None:
    """The first step of a training, where R - I cancels, and angles near π: as exact as the dtype, output under 1 ULP in fp16."""
    need(backend, dtype)
    values = arguments("merge", 3, size, 40, scale=scale, dtype=dtype)
    got = call("merge", backend)(*values.values())
    exact = merge_reference(*(t.double() for t in values.values()))
    assert ulp(got, exact, dtype) < (
        4.0 if dtype is torch.float16 and scale < 1e-3 else 1.0 if dtype is torch.float16 else 64.0
    )


@pytest.mark.parametrize("op", ("merge", "bypass"))
def test_half_precision_rounds_once(op: str) -> None:
    """R - I never becomes 16-bit: the output's error is that of its own rounding, below PyTorch's."""
    need("triton", torch.float16)
    values = arguments(op, 3, 16, 60, dtype=torch.float16)
    exact = formula(op)(*(t.double() for t in values.values()))
    got = call(op, "triton")(*values.values())
    rounding = ulp(exact.half(), exact, torch.float16)
    assert ulp(got, exact, torch.float16) <= 1.05 * rounding
    assert ulp(formula(op)(*values.values()), exact, torch.float16) > 1.05 * rounding


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", ("merge", "bypass"))
@pytest.mark.parametrize("size", (4, 16))
def test_not_finite_stays_in_its_block(op: str, size: int, backend: str) -> None:
    need(backend, torch.float32)
    for name in arguments(op, 3, size, 8):
        for value in (float("nan"), float("inf")):
            values = arguments(op, 3, size, 8)
            values[name].view(-1)[3] = value
            grad = normal(*(values.get("weight", values.get("y"))).shape, seed=4)
            got = run(call(op, backend), values, grad, set(values))
            wanted = run(formula(op), values, grad, set(values))
            assert torch.equal(got["out"].isfinite(), wanted["out"].isfinite())
            if value != value:
                for leaf in values:
                    assert torch.equal(got[leaf].isnan(), wanted[leaf].isnan()), (name, leaf)


@pytest.mark.parametrize("backend", FUSED)
def test_infinite_entry_turns_by_pi(backend: str) -> None:
    need(backend, torch.float32)
    blocks = torch.zeros(1, 4, 4, device=DEVICE)
    blocks[0, 0, 3] = float("inf")
    weight = normal(4, 8)
    wanted = torch.tensor([-2.0, 0, 0, -2], device=DEVICE)[:, None] * weight
    assert torch.equal(oft.merge(blocks, weight, backend=backend), wanted)
    torch.testing.assert_close(delta_reference(blocks)[0].diagonal(), wanted[:, 0] / weight[:, 0])


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("shape", [(0, 12), (2, 0, 12), (2, 3, 12)])
def test_leading_axes_and_empty_inputs(backend: str, shape: tuple[int, ...]) -> None:
    need(backend, torch.float32)
    blocks = normal(3, 4, 4, scale=0.14).requires_grad_()
    y = normal(*shape, seed=1).requires_grad_()
    out = oft.bypass(y, blocks, backend=backend)
    assert out.shape == y.shape
    out.sum().backward()
    assert blocks.grad is not None and y.grad is not None and y.grad.shape == y.shape
    if y.numel() == 0:
        assert not blocks.grad.any()
    else:
        torch.testing.assert_close(out, bypass_reference(y, blocks))


@pytest.mark.parametrize("backend", ("eager", *FUSED))
def test_bad_rescale_and_constraint_are_named(backend: str) -> None:
    values = arguments("merge", 3, 4, 8)
    with pytest.raises(ValueError, match=r"oft: rescale: got shape \(4,\), wanted \(12\)"):
        oft.merge(*values.values(), rescale=normal(4), backend=backend)
    with pytest.raises(ValueError, match="oft: constraint: got -1.0, wanted a number of at least 0"):
        oft.merge(*values.values(), constraint=-1.0, backend=backend)
    with pytest.raises(ValueError, match=r"oft: blocks: got shape \(3, 4, 2\), wanted square blocks"):
        oft.merge(normal(3, 4, 2), values["weight"], backend=backend)


@pytest.mark.parametrize("size", (12, 16))
def test_tokens_of_one_block_in_lanes(size: int) -> None:
    """TileLang's bypass with the tokens of a block shared out over several sums: over all of them, and in two spans."""
    need("tilelang", torch.float32, build=True)
    from kernels.oft import tilelang_impl as backend

    values = arguments("bypass", 3, size, 150)
    y, blocks = (value.requires_grad_() for value in values.values())
    g = normal(150, 3 * size, seed=2)
    needs = (True, True, False)
    _, saved = backend.bypass_forward(y, blocks, None, 0.0, base=None, out_dtype=y.dtype, needs=needs)
    bypass_reference(y, blocks).backward(g)
    for config in (backend.Tokens(64, 1, 64, steps=0, lanes=4), backend.Tokens(64, 1, 64, steps=2, lanes=4)):
        grads = backend.bypass_backward(g, y, blocks, None, 0.0, saved=saved, needs=needs, config=config)
        torch.testing.assert_close(grads[0], y.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grads[1], blocks.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wide", (False, True), ids=("as_operands", "wide"))
@pytest.mark.parametrize("size", (12, 16))
def test_tiles_of_tokens(size: int, wide: bool) -> None:
    """Triton's bypass in both layouts of a tile, with lanes, several tiles and several steps, and more blocks than there are."""
    need("triton", torch.float32)
    from kernels.oft import triton_bypass as backend

    values = arguments("bypass", 5, size, 150)
    y, blocks = (value.requires_grad_() for value in values.values())
    g, base = normal(150, 5 * size, seed=2), normal(150, 5 * size, seed=3)
    wanted = bypass_reference(y, blocks) + base
    wanted.backward(g)
    for lanes, tiles, steps, inline in ((1, 2, 2, True), (2, 1, 3, False), (2, 3, 1, True)):
        config = backend.Tokens(32, 4 // lanes, lanes, tiles, steps, inline, wide)
        extra = {"needs": (True, True, False), "config": config}
        with torch.no_grad():
            out, saved = backend.bypass_forward(y, blocks, None, 0.0, base=base, out_dtype=y.dtype, **extra)
            grads = backend.bypass_backward(g, y, blocks, None, 0.0, saved=saved, **extra)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grads[0], y.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grads[1], blocks.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
@pytest.mark.parametrize("size", (3, 7, 12, 24, 33, 64))
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("op", ("merge", "bypass"))
def test_sizes_on_gpu(op: str, backend: str, size: int, dtype: torch.dtype) -> None:
    values = arguments(op, 9, size, 500, dtype=dtype)
    values["rescale"] = normal(9 * size, seed=2, scale=0.3, dtype=dtype) + 1
    compare(call(op, backend), formula(op), values)
