"""Inputs of LoHa that broke other kernels: float16's range, ranks at the edge of a form, ΔW that must not be stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import run, ulp
from torch import Tensor

from kernels import UnsupportedCase, loha
from kernels.common.backends import unsupported
from kernels.loha import pairs
from kernels.loha.reference import bypass_reference, merge_reference

FUSED = ("triton", "tilelang")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FACTORS = ("up1", "down1", "up2", "down2")
# One rank for each form of the bypass.
FORMS = {"pairs": 8, "tiles": 20}
# ULP: sums of some hundred float32 terms, one after the other on TileLang's CPU target.
FLOAT32_LIMIT = 64.0


def need(backend: str, dtype: torch.dtype) -> None:
    reason = unsupported(backend, DEVICE, dtype)
    if reason is not None:
        pytest.skip(reason)


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """x (for four sizes) and the factors, of sizes ([T,] O, I, R), with y and ΔW near 1."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    n_o, n_i, n_r = shape[-3:]

    def normal(rows: int, cols: int, divisor: int) -> Tensor:
        return (torch.randn(rows, cols, generator=generator, device=DEVICE) / divisor**0.5).to(dtype)

    values = {"x": normal(shape[0], n_i, n_i)} if len(shape) == 4 else {}
    for k in ("1", "2"):
        values |= {"up" + k: normal(n_o, n_r, 1), "down" + k: normal(n_r, n_i, n_r)}
    return values


def results(call, values: dict[str, Tensor], grad: Tensor, backend: str) -> dict[str, Tensor]:
    return run(lambda *tensors: call(*tensors, backend=backend), values, grad, set(values))


def exact(reference, values: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    double = {name: t.double() for name, t in values.items()}
    return run(lambda *tensors: reference(*tensors, 1.0), double, grad.double(), set(values))


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    for name, value in wanted.items():
        assert got[name].isfinite().all(), f"{name}: not finite"
        error = ulp(got[name], value, got[name].dtype)
        assert error <= limit, f"{name}: {error:.2f} ULP"


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "x,up,down", ((2.0**8, 2.0**-13, 2.0**9), (2.0**-18, 2.0**4, 2.0**5)), ids=("pairs", "delta_weight")
)
def test_bypass_keeps_float32s_range(x: float, up: float, down: float, form: str, backend: str) -> None:
    """y = 2^6 · R², by way of down1 · down2 = 2^18 and of x @ (down1 ∘ down2)ᵀ = 2^32, or of ΔW = 2^18 · R²."""
    need(backend, torch.float16)
    rank, half = FORMS[form], {"dtype": torch.float16, "device": DEVICE}
    tokens, ups, downs = (
        torch.full((3, 64), x, **half),
        torch.full((40, rank), up, **half),
        torch.full((rank, 64), down, **half),
    )
    y = loha.bypass(tokens, ups, downs, ups, downs, backend=backend)
    assert torch.equal(y, torch.full_like(y, 2.0**6 * rank**2))


@pytest.mark.parametrize("backend", FUSED)
def test_merge_gradients_keep_float32s_range(backend: str) -> None:
    """G ∘ (up2 @ down2) = 2^18 leaves float16's range, the gradients of up1 and down1 do not; eager gives inf or NaN."""
    need(backend, torch.float16)
    n_o, n_i, rank = 48, 80, 4
    fill = {"up1": 2**-4, "down1": 2**-12, "up2": 2**5, "down2": 2**4}
    values = {
        name: torch.full((n_o, rank) if name[0] == "u" else (rank, n_i), v, dtype=torch.float16, device=DEVICE)
        for name, v in fill.items()
    }
    values["up1"][0] = 0
    grad = torch.full((n_o, n_i), 2.0**7, dtype=torch.float16, device=DEVICE)
    got = results(loha.merge, values, grad, backend)
    wanted = exact(merge_reference, values, grad)
    assert_close({"up1": got["up1"]}, {"up1": wanted["up1"]}, 1.0)
    eager = run(lambda *tensors: merge_reference(*tensors, 1.0), values, grad, {"up1"})
    assert not eager["up1"].isfinite().all()


# (block_m, block_n, span): sums in one span and in several, and more spans of rows than of columns.
TWO_PASSES = ((16, 32, 128), (32, 16, 32), (16, 16, 80))
NEEDS = ((True,) * 4, (True, False, False, False), (False, True, False, True))


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("launch", TWO_PASSES)
@pytest.mark.parametrize("needs", NEEDS, ids=("all", "up1", "downs"))
def test_two_pass_backward(needs: tuple[bool, ...], launch: tuple[int, int, int], backend: str) -> None:
    """The backward without large partials, in spans that no size divides, of the gradients that are asked for."""
    need(backend, torch.float32)
    if backend == "triton":
        from kernels.loha.triton_merge import Rows as TritonRows
        from kernels.loha.triton_merge import merge_backward as backward

        config = TritonRows(*launch, 4, 2)
    else:
        from kernels.loha.tilelang_merge_launch import Rows
        from kernels.loha.tilelang_merge_launch import merge_backward as backward

        config = Rows(*launch)
    values, grad = make((100, 90, 5)), torch.randn(100, 90, device=DEVICE)
    grads = backward(grad, *values.values(), 0.5, saved=(), needs=needs, config=config)
    assert [t is not None for t in grads] == list(needs)
    wanted = exact(merge_reference, values, grad * 0.5)
    got = {name: t for name, t in zip(values, grads, strict=True) if t is not None}
    assert_close(got, {name: wanted[name] for name in got}, FLOAT32_LIMIT)


@pytest.mark.parametrize("subs", (1, 2))
def test_tilelang_strips(subs: int) -> None:
    """The one-pass backward of small ranks, in strips and spans that no size divides."""
    need("tilelang", torch.float32)
    from kernels.loha.tilelang_merge_launch import Strips, merge_backward

    values, grad = make((100, 90, 5)), torch.randn(100, 90, device=DEVICE)
    config = Strips(16, 16, 48, subs=subs)
    grads = merge_backward(grad, *values.values(), 0.5, saved=(), needs=(True,) * 4, config=config)
    wanted = exact(merge_reference, values, grad * 0.5)
    assert_close(dict(zip(values, grads, strict=True)), {name: wanted[name] for name in values}, FLOAT32_LIMIT)


# Past both ends, and sizes and a rank that the tiles divide.
@pytest.mark.parametrize("dims", ((100, 90, 5), (96, 96, 16)), ids=("ragged", "even"))
@pytest.mark.parametrize("walk", ("triton-along", "tilelang-along", "tilelang-down"))
def test_merge_walks(walk: str, dims: tuple[int, int, int]) -> None:
    """The merge by programs that walk along ΔW's rows or, in TileLang, down its columns, with a base added."""
    backend, _, way = walk.partition("-")
    need(backend, torch.float32)
    values, base = make(dims), torch.randn(dims[:2], device=DEVICE)
    if backend == "triton":
        from kernels.loha.triton_merge import Merge as TritonMerge
        from kernels.loha.triton_merge import merge_forward as forward

        config = TritonMerge(32, 16, 64, 4, 2)
    else:
        from kernels.loha.tilelang_merge_launch import Merge
        from kernels.loha.tilelang_merge_launch import merge_forward as forward

        config = Merge(32, 16, 3, by_rows=way == "down")
    out, _ = forward(*values.values(), 0.5, base=base, out_dtype=torch.float32, needs=(False,) * 4, config=config)
    wanted = base.double() + merge_reference(*(t.double() for t in values.values()), 0.5)
    assert_close({"out": out}, {"out": wanted}, FLOAT32_LIMIT)


def test_two_pass_backward_keeps_float32s_range() -> None:
    """As `test_merge_gradients_keep_float32s_range`, with rows of G that differ by 2^12 in size."""
    need("triton", torch.float16)
    from kernels.loha.triton_merge import Rows, merge_backward

    fill = {"up1": 2**-4, "down1": 2**-12, "up2": 2**5, "down2": 2**4}
    values = {name: t.half() * fill[name] for name, t in make((48, 80, 4)).items()}
    grad = torch.randn(48, 80, device=DEVICE).half() * 2**7
    grad[::2] /= 2**12
    grad[:, 32:] *= 2
    got = merge_backward(grad, *values.values(), 1.0, saved=(), needs=(True,) * 4, config=Rows(16, 16, 48, 4, 2))
    assert_close({"up1": got[0]}, {"up1": exact(merge_reference, values, grad)["up1"]}, 4.0)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("scale", (2.0**-8, 2.0**8))
def test_pairs_of_small_and_large_ranks(scale: float, backend: str) -> None:
    """Trained factors whose ranks differ by 2^8 in size: their products differ by 2^16 and still count."""
    need(backend, torch.float16)
    values = make((19, 48, 64, 4), torch.float16)
    for name in ("down1", "down2"):
        values[name][:2] *= scale
    for name in ("up1", "up2"):
        values[name][:, :2] /= scale
    grad = torch.randn(19, 48, device=DEVICE).half()
    got, wanted = results(loha.bypass, values, grad, backend), exact(bypass_reference, values, grad)
    assert_close(got, wanted, 8.0)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("rank", (15, 16, 17))
def test_ranks_around_the_change_of_form(rank: int, backend: str) -> None:
    need(backend, torch.float32)
    assert pairs.use_pairs(rank) == (rank <= 16)
    values, grad = make((33, 40, 72, rank)), torch.randn(33, 40, device=DEVICE)
    assert_close(results(loha.bypass, values, grad, backend), exact(bypass_reference, values, grad), FLOAT32_LIMIT)


@pytest.mark.parametrize("backend", FUSED)
def test_forms_agree(backend: str, monkeypatch: pytest.MonkeyPatch, forget_plans: Callable[[], None]) -> None:
    """Rank 8 through pairs and through tiles of ΔW: the same sum, multiplied out in another order."""
    need(backend, torch.float32)
    values, grad = make((21, 40, 56, 8)), torch.randn(21, 40, device=DEVICE)
    through_pairs = results(loha.bypass, values, grad, backend)
    monkeypatch.setattr(pairs, "MAX_PAIR_RANK", 0)
    forget_plans()
    through_tiles = results(loha.bypass, values, grad, backend)
    for name in values:
        assert not torch.equal(through_pairs[name], through_tiles[name]), f"{name}: the form did not change"
    assert_close(through_pairs, {name: t.double() for name, t in through_tiles.items()}, FLOAT32_LIMIT)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("form", FORMS)
def test_delta_weight_is_never_stored(form: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor that the bypass makes, forward or backward, has ΔW's axes; through pairs none is as large."""
    need(backend, torch.float32)
    n_o, n_i = 251, 257
    values = make((2, n_o, n_i, 4 if form == "pairs" else 17))
    grad = torch.randn(2, n_o, device=DEVICE)
    made: list[torch.Size] = []

    def watched(make_tensor):
        def wrapper(*args, **kwargs):
            made.append(make_tensor(*args, **kwargs).shape)
            return make_tensor(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(torch, "empty", watched(torch.empty))
    monkeypatch.setattr(Tensor, "new_empty", watched(Tensor.new_empty))
    results(loha.bypass, values, grad, backend)
    assert len(made) >= len(values)
    assert not any({n_o, n_i} <= set(shape) or shape.numel() == n_o * n_i for shape in made)
    assert form == "tiles" or max(shape.numel() for shape in made) < n_o * n_i


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FUSED)
def test_peak_memory_is_below_one_delta_weight(backend: str) -> None:
    n_o = n_i = 4096
    values = make((8, n_o, n_i, FORMS["pairs"]), torch.float16)
    grad = torch.randn(8, n_o, device=DEVICE).half()
    results(loha.bypass, values, grad, backend)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(loha.bypass, values, grad, backend)
    assert torch.cuda.max_memory_allocated() - before < n_o * n_i * 2


@pytest.mark.parametrize("value", (float("inf"), float("nan")))
@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("form", FORMS)
def test_one_bad_token_leaves_the_others(form: str, backend: str, value: float) -> None:
    """The common scale of float16 tiles is taken from what is finite."""
    dtype = torch.float32 if DEVICE.type == "cpu" and backend == "tilelang" else torch.float16
    need(backend, dtype)
    values = make((20, 40, 64, FORMS[form]), dtype)
    clean = loha.bypass(*values.values(), backend=backend)
    values["x"][3, 5] = value
    y = loha.bypass(*values.values(), backend=backend)
    assert not y[3].isfinite().any()
    others = torch.arange(20, device=DEVICE) != 3
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("backend", FUSED)
def test_nothing_is_saved_that_no_gradient_needs(backend: str) -> None:
    need(backend, torch.float32)
    values = list(make((5, 24, 40, 4)).values())
    implementation = __import__(f"kernels.loha.{backend}_impl", fromlist=["bypass_forward"])
    sizes = {}
    for name, needs in {"none": (False,) * 5, "x": (True, *[False] * 4), "up2": (*[False] * 3, True, False)}.items():
        _, saved = implementation.bypass_forward(*values, 1.0, base=None, out_dtype=torch.float32, needs=needs)
        wanted = pairs.saved_specs(needs, *values)
        assert [(tuple(t.shape), t.dtype) for t in saved] == [(tuple(shape), dtype) for shape, dtype in wanted]
        sizes[name] = len(saved)
    assert sizes == {"none": 0, "x": 3, "up2": 5}


@pytest.mark.parametrize("backend", FUSED)
def test_rank_above_the_limit_says_so(backend: str) -> None:
    need(backend, torch.float32)
    values = list(make((2, 8, 8, 129)).values())
    with pytest.raises(UnsupportedCase, match="loha: rank 129 is above 128"):
        loha.merge(*values[1:], backend=backend)
    with pytest.raises(UnsupportedCase, match="loha_bypass: rank 129 is above 128"):
        loha.bypass(*values, backend=backend)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("shape", ((0, 40), (2, 0, 40)))
def test_no_tokens(shape: tuple[int, ...], backend: str) -> None:
    need(backend, torch.float32)
    leaves = [t.requires_grad_() for t in make((24, 40, 4)).values()]
    x = torch.zeros(shape, device=DEVICE, requires_grad=True)
    y = loha.bypass(x, *leaves, backend=backend)
    assert y.shape == (*shape[:-1], 24)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", FUSED)
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """y of 65,600 × 32,768: the last rows are right."""
    values = make((16, 32768, 256, 4), torch.bfloat16)
    try:
        x = torch.zeros(65600, 256, dtype=torch.bfloat16, device=DEVICE)
        x[-16:] = values["x"]
        y = loha.bypass(x, *list(values.values())[1:], backend=backend)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("4 GiB of y and its intermediates do not fit this GPU")
    wanted = bypass_reference(*(t.double() for t in values.values()), 1.0)
    assert ulp(y[-16:], wanted, torch.bfloat16) <= 8.0
    assert not y[:-16].any()
