"""The TileLang shim: what it accepts, builds once, and hands to a kernel."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import UnsupportedCase
from kernels.common import tilelang_target
from kernels.common.tilelang_ops import reduce_partials
from kernels.common.tilelang_target import Target, build, ready, sizes, target_of

pytest.importorskip("tilelang", reason="tilelang is not installed")
CPU = Target("c")


def row_products(dsl, *, N, BLOCK):
    """out = factor · a @ bᵀ, sums = its row sums and top = its row maxima, in tiles that stick out of every operand."""
    T = dsl.T
    M, N = T.dynamic("M"), dsl.size("N", N)

    @T.prim_func
    def kernel(
        a: T.Tensor((M, N), "float32"),
        b: T.Tensor((M, N), "float32"),
        out: T.Tensor((M, M), "float32"),
        sums: T.Tensor((M,), "float32"),
        top: T.Tensor((M,), "float32"),
        factor: T.float32,
    ):
        with T.Kernel(T.ceildiv(M, BLOCK), threads=32) as pid_m:
            a_tile = dsl.shared((BLOCK, 32), "float32")
            b_tile = dsl.shared((2 * BLOCK, 32), "float32")
            acc = dsl.fragment((BLOCK, BLOCK))
            row_sum = dsl.fragment((BLOCK,))
            row_top = dsl.fragment((BLOCK,))
            T.clear(acc)
            for step in dsl.pipelined(T.ceildiv(N, 32), 2):
                T.copy(a[pid_m * BLOCK, step * 32], a_tile)
                T.copy(b[0, step * 32], b_tile)
                dsl.gemm(a_tile, b_tile[0:BLOCK, :], acc, transpose_b=True)
            for i, j in dsl.parallel(BLOCK, BLOCK):
                acc[i, j] *= factor
            dsl.reduce_sum(acc, row_sum, 1)
            dsl.reduce_max(acc, row_top, 1)
            T.copy(acc, out[pid_m * BLOCK, 0])
            T.copy(row_sum, sums[pid_m * BLOCK])
            T.copy(row_top, top[pid_m * BLOCK])

    return kernel


@pytest.mark.parametrize(("m", "n"), [(16, 64), (13, 37), (1, 1)])
def test_the_same_source_runs_on_the_cpu(m: int, n: int) -> None:
    a, b = torch.randn(m, n), torch.randn(m, n)
    out, sums, top = torch.full((m, m), torch.nan), torch.full((m,), torch.nan), torch.full((m,), torch.nan)
    build(row_products, CPU, **sizes(CPU, N=n), BLOCK=16)(a, b, out, sums, top, 0.5)
    wanted = 0.5 * a.double() @ b.double().T
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(sums.double(), wanted.sum(1), rtol=0, atol=1e-4)
    if m == 16:
        torch.testing.assert_close(top.double(), wanted.amax(1), rtol=0, atol=1e-5)


def test_a_kernel_is_built_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(tilelang_target, "compiled", lambda *args, **constants: built.append(constants) or object())
    monkeypatch.setattr(tilelang_target, "_kernels", {})
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: build(row_products, CPU, N=None, BLOCK=8), range(32)))
    assert len(built) == 1 and len(set(map(id, made))) == 1
    assert build(row_products, CPU, N=None, BLOCK=16) is not made[0]


def test_a_kernel_checks_its_tensors() -> None:
    run = build(row_products, CPU, **sizes(CPU, N=8), BLOCK=16)
    a, out, row = torch.randn(8, 8), torch.empty(8, 8), torch.empty(8)
    with pytest.raises(ValueError, match="dtype mismatch"):
        run(a.double(), a, out, row, row, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_that_the_cpu_target_lacks(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedCase, match="float32"):
        target_of(torch.empty(2, dtype=dtype))


def test_old_cards_and_missing_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    tilelang_target._target.cache_clear()
    monkeypatch.setattr(tilelang_target.backends, "require", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedCase, match=r"compute capability 8.0 or newer, not 7.5"):
        tilelang_target._target(torch.device("cuda", 0), torch.float16, False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tilelang_target._target(torch.device("cuda", 0), torch.float32, True) == Target("sm_90a", True)
    tilelang_target._target.cache_clear()
    monkeypatch.setattr(tilelang_target, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedCase, match="tilelang is not installed"):
        tilelang_target._tilelang.__wrapped__()


def test_ready_copies_only_what_it_must() -> None:
    dense = torch.randn(6, 8)
    assert ready(dense) is dense
    wide = torch.randn(6, 16)
    views = {
        "a column slice": wide[:, :8],
        "a transpose": torch.randn(8, 6).t(),
        "every second column": wide[:, ::2],
        "one row of a wider tensor": wide[:1, :8],
        "expanded": torch.randn(1, 8).expand(6, 8),
        "misaligned": torch.randn(49)[1:].view(6, 8),
    }
    for what, view in views.items():
        copy = ready(view)
        assert copy is not view and torch.equal(copy, view), what
        assert copy.stride() == (copy.shape[1], 1) and copy.data_ptr() % 16 == 0, what


@pytest.mark.parametrize("count", [12, 10])
def test_partials_add_up(count: int) -> None:
    parts = (torch.randn(5, 3, count), torch.randn(2, count))
    outs = (torch.full((3, count), torch.nan), torch.full((count,), torch.nan))
    reduce_partials(parts, outs, (0.5, 2.0))
    for part, out, scale in zip(parts, outs, (0.5, 2.0), strict=True):
        torch.testing.assert_close(out, scale * part.sum(0))
    alone = torch.full((count,), torch.nan)
    reduce_partials((None, parts[1]), (None, alone), 2.0)
    assert torch.equal(alone, outs[1])
