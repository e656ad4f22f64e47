"""LoKr's own hard cases: factor pairs, factors too large for one tile, and intermediates past float16's range."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle import compare
from test_ops import BACKENDS, DEVICE, DTYPES, FUSED, need
from torch import Tensor

from kernels import lokr
from kernels.lokr.reference import Factor, bypass_reference, merge_reference

SCALE = 0.75
# (a, b, rank of w1's pair or 0, c, d, rank of w2's pair or 0)
PAIRS = (
    (6, 8, 4, 8, 40, 0),
    (6, 8, 0, 20, 24, 1),
    (9, 7, 1, 33, 12, 12),
    (40, 24, 33, 4, 8, 128),
    (5, 3, 8, 16, 16, 24),
)
# Past the tiles that hold a whole factor, on either side, and prime.
LARGE = ((16, 16, 0, 130, 70, 0), (70, 130, 0, 16, 8, 0), (3, 5, 2, 70, 137, 9), (67, 1, 0, 1, 71, 0))
GPU_SHAPES = (
    (16, 16, 0, 2048, 512, 0),
    (16, 16, 4, 2048, 512, 128),
    (256, 256, 0, 8, 6, 0),
    (128, 128, 0, 128, 128, 0),
    (86, 64, 0, 128, 64, 0),
    (96, 48, 128, 128, 64, 16),
    (1, 1, 0, 1031, 1033, 0),
    (64, 64, 16, 64, 64, 128),
    (64, 48, 1, 128, 64, 33),
    (128, 64, 0, 128, 64, 0),
    # Tiles of 128 rows: in a token's product, tile by tile, and in a pair's.
    (32, 32, 0, 32, 2048, 0),
    (128, 33, 1, 30, 64, 128),
)
Shape = tuple[int, int, int, int, int, int]


def side(rows: int, cols: int, rank: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """A factor of normals over √cols, full or as a pair."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    if rank == 0:
        return [(draw(rows, cols) / cols**0.5).to(dtype)]
    return [(draw(rows, rank) / rank**0.5).to(dtype), (draw(rank, cols) / cols**0.5).to(dtype)]


def tensors(shape: Shape, dtype: torch.dtype, tokens: int) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """Inputs by name, x first where there are tokens, and what turns op(x, w1, w2) into a function of them."""
    a, b, rank1, c, d, rank2 = shape
    first, second = side(a, b, rank1, dtype, 1), side(c, d, rank2, dtype, 2)
    values = {f"w1[{k}]": t for k, t in enumerate(first)} | {f"w2[{k}]": t for k, t in enumerate(second)}
    if tokens:
        x = torch.randn(tokens, b * d, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
        values = {"x": x.to(dtype), **values}

    def apply(op: Callable[..., Tensor], *args: Tensor) -> Tensor:
        head, parts = (args[:1], args[1:]) if tokens else ((), args)
        return op(*head, joined(parts[: len(first)]), joined(parts[len(first) :]), SCALE)

    return values, apply


def joined(parts: tuple[Tensor, ...]) -> Factor:
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def check(shape: Shape, backend: str, dtype: torch.dtype, tokens: int, needs: set[str] | None = None) -> None:
    op, reference = (lokr.bypass, bypass_reference) if tokens else (lokr.merge, merge_reference)
    values, apply = tensors(shape, dtype, tokens)
    compare(partial(apply, partial(op, backend=backend)), partial(apply, reference), values, needs=needs)


def ident(shape: Shape) -> str:
    return "{}x{}r{}-{}x{}r{}".format(*shape)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tokens", (0, 5), ids=("merge", "bypass"))
@pytest.mark.parametrize("shape", PAIRS, ids=ident)
def test_pairs(shape: Shape, tokens: int, dtype: torch.dtype) -> None:
    need("triton", dtype)
    check(shape, "triton", dtype, tokens)


@pytest.mark.parametrize("tokens", (0, 5), ids=("merge", "bypass"))
@pytest.mark.parametrize("shape", PAIRS[2:3], ids=ident)
def test_pairs_in_tilelang(shape: Shape, tokens: int) -> None:
    need("tilelang", torch.float32)
    check(shape, "tilelang", torch.float32, tokens)


@pytest.mark.parametrize("tokens", (0, 5), ids=("merge", "bypass"))
def test_only_one_tensor_of_a_pair_needs_its_gradient(tokens: int) -> None:
    need("triton", torch.float32)
    for name in ("w1[0]", "w1[1]", "w2[0]", "w2[1]"):
        check(PAIRS[2], "triton", torch.float32, tokens, {name})


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("shape", LARGE, ids=ident)
def test_factors_larger_than_a_tile(shape: Shape, backend: str) -> None:
    need(backend, torch.float32)
    check(shape, backend, torch.float32, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("tokens", (0, 77), ids=("merge", "bypass"))
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=ident)
def test_large_factors_on_gpu(shape: Shape, tokens: int, backend: str, dtype: torch.dtype) -> None:
    check(shape, backend, dtype, tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bypass_applies_what_merge_builds(backend: str) -> None:
    need(backend, torch.float32)
    values, _ = tensors((6, 8, 0, 8, 10, 0), torch.float32, 24)
    x, w1, w2 = values.values()
    delta = lokr.merge(w1, w2, SCALE, backend=backend)
    torch.testing.assert_close(delta, torch.kron(w1, w2) * SCALE)
    applied = lokr.bypass(x.view(2, 12, -1), w1, w2, SCALE, backend=backend)
    torch.testing.assert_close(applied, (x @ delta.T).view(2, 12, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("b", (1, 70), ids=("resident", "tiled"))
def test_intermediate_keeps_the_range_of_float32(b: int, backend: str) -> None:
    """x @ w2ᵀ is 262,144, past float16's range, and the result 256; eager gives inf or nan."""
    need(backend, torch.float16)
    c, d = (2, 64) if b == 1 else (2, 256)
    x, w2 = torch.full((3, b * d), 4096 / d), torch.full((c, d), 64.0)
    w1 = torch.full((3, b), 1 / 1024 / b)
    x, w1, w2 = (t.to(DEVICE, torch.float16) for t in (x, w1, w2))
    assert lokr.bypass(x, w1, w2, backend="eager").isinf().all()
    got = lokr.bypass(x, w1, w2, backend=backend)
    torch.testing.assert_close(got, torch.full_like(got, 256.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("tokens", (0, 3), ids=("merge", "bypass"))
@pytest.mark.parametrize("c", (8, 128))
def test_product_of_a_pair_keeps_the_range_of_float32(c: int, tokens: int, backend: str) -> None:
    """w2 = wa @ wb is 262,144 and the result 256; eager gives inf or nan."""
    need(backend, torch.float16)
    w1 = torch.full((2, 1), 1 / 1024, device=DEVICE).half()
    pair = tuple(torch.full(s, 256.0, device=DEVICE).half() for s in ((c, 4), (4, 8)))
    x = (torch.eye(8, device=DEVICE)[:tokens].half(),) if tokens else ()
    op = lokr.bypass if tokens else lokr.merge
    got = op(*x, w1, pair, backend=backend)
    assert torch.equal(got, torch.full_like(got, 256.0))
    assert not op(*x, w1, pair, backend="eager").isfinite().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_pairs_are_named(backend: str) -> None:
    w1, wa, wb = (torch.zeros(s, device=DEVICE) for s in ((2, 3), (4, 5), (5, 6)))
    with pytest.raises(ValueError, match=r"lokr: w2\[1\]: got shape \(4, 6\), wanted \(5, d\)"):
        lokr.merge(w1, (wa, wb[:4]), backend=backend)
    with pytest.raises(ValueError, match="lokr: w2: got 3 tensors, wanted a tensor or a pair"):
        lokr.merge(w1, (wa, wb, wb), backend=backend)
    with pytest.raises(ValueError, match="lokr_bypass: x: got shape .* wanted .*I=18"):
        lokr.bypass(torch.zeros(2, 17, device=DEVICE), w1, (wa, wb), backend=backend)
    with pytest.raises(TypeError, match=r"lokr: w1\[0\]: got dtype torch.int64"):
        lokr.merge((w1.long(), w1), w1, backend=backend)
