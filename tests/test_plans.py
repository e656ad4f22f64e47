"""Launch plans: what a replayed call computes, what no plan may hold, and that no launch escapes one."""

from __future__ import annotations

import ast
import importlib
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels
from kernels import lora
from kernels.common import plans
from kernels.common.fused import FusedOp
from kernels.common.plans import Planned, planned, record
from kernels.registry import ops

ROOT = Path(kernels.__file__).parent
MODULES = sorted(
    path for path in ROOT.rglob("*.py") if path.name.startswith("triton_") or path.name == "cayley_triton.py"
)


def launched(tree: ast.Module) -> set[str]:
    """Names that a module launches: kernel[grid](...) or module.kernel[grid](...)."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {ast.unparse(func.value) for func in calls if isinstance(func, ast.Subscript)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_launch_can_be_recorded(path: Path) -> None:
    name = "kernels." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name)
    for kernel in launched(ast.parse(path.read_text(encoding="utf-8"))):
        value = module
        for part in kernel.split("."):
            value = getattr(value, part)
        assert isinstance(value, Planned), f"{path.name}: {kernel} lacks @planned"


def test_some_module_launches() -> None:
    assert sum(bool(launched(ast.parse(path.read_text(encoding="utf-8")))) for path in MODULES) >= 10


def fill(a: Tensor, b: Tensor, out: Tensor, factor: float) -> None:
    """Stands in for a compiled kernel."""
    out.copy_(factor * (a + b))


FILL = planned(fill)


def add(a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    kept = torch.empty(a.T.shape)
    out = a.new_empty(a.shape)
    FILL(a, b, kept.T, 1.0)
    FILL(kept.T, b, out, 2.0)
    return out, (kept,)


def test_replay_reads_its_own_arguments() -> None:
    a, b, c, d = torch.randn(4, 3, 5)
    (out, (kept,)), plan = record(("a", "b"), (a, b), add)
    assert plan is not None
    torch.testing.assert_close(out, 2 * (a + 2 * b))
    again, (other,) = plan.replay(0, c, d)
    torch.testing.assert_close(again, 2 * (c + 2 * d))
    torch.testing.assert_close(other, (c + d).T)
    torch.testing.assert_close(kept, (a + b).T)
    assert again.data_ptr() != out.data_ptr()


def test_one_tensor_twice_is_two_arguments_of_a_plan() -> None:
    a, c, d = torch.randn(3, 3, 5)
    _, plan = record(("a", "b"), (a, a), add)
    assert plan is not None
    torch.testing.assert_close(plan.replay(0, c, d)[0], 2 * (c + 2 * d))


def test_views_of_arguments_are_made_anew() -> None:
    def run(a: Tensor) -> Tensor:
        out = a.new_empty((5, 2))
        FILL(a[1:].T, a.T[:, 1:], out, 0.5)
        return out

    wide = torch.randn(8, 7)
    _, plan = record(("a",), (torch.randn(8, 7)[:3, :5],), run)
    assert plan is not None
    torch.testing.assert_close(plan.replay(0, wide[4:7, 1:6]), wide[5:7, 1:6].T.contiguous())


@pytest.mark.parametrize(
    "run",
    [
        lambda a: (a * 2, ()),
        lambda a: (torch.zeros_like(a), ()),
        lambda a: (torch.empty(a.shape).fill_(1.0), ()),
        lambda a: (ELSEWHERE, ()),
    ],
    ids=["arithmetic", "zeros", "fill", "kept"],
)
def test_what_no_plan_can_hold(run: object) -> None:
    assert record(("a",), (torch.randn(2, 2),), run)[1] is None  # type: ignore[arg-type]


ELSEWHERE = torch.ones(2, 2)


def test_copies_are_repeated() -> None:
    def run(a: Tensor) -> Tensor:
        out = torch.empty((5, 3))
        dense = a.T.contiguous()
        FILL(dense, dense, out, 1.0)
        return out

    _, plan = record(("a",), (torch.randn(3, 5),), run)
    assert plan is not None and "clone" in plan.source
    other = torch.randn(3, 5)
    torch.testing.assert_close(plan.replay(0, other), 2 * other.T)


def test_buffers_are_filled_where_pytorch_is_asked_to() -> None:
    """What a kernel leaves unwritten shows as NaN in PyTorch's deterministic mode, in a replayed plan too."""

    def run(a: Tensor) -> Tensor:
        out = torch.empty((4, 5), device=a.device)
        FILL(a, a, out[:2], 0.5)
        return out

    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, plan = record(("a",), (torch.randn(2, 5, device=device),), run)
    assert plan is not None
    other = torch.randn(2, 5, device=device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = plan.filled(0, other)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found[:2], other)
    assert found[2:].isnan().all()


def test_deterministic_mode_fills_what_an_op_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness finds what is left unwritten by filling new memory: a replayed call has to take part."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    up, down = torch.randn(8, 4, device=device), torch.randn(4, 8, device=device)
    merge = partial(lora.merge, up, down, backend="triton")
    made: list[torch.device] = []

    def empty(device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(device)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    monkeypatch.setattr(plans, "_empty_on", empty)
    wanted = merge()
    merge()
    assert bool(made) == (device == "cpu")
    made.clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        again = merge()
    finally:
        torch.use_deterministic_algorithms(False)
    assert made
    torch.testing.assert_close(again, wanted)


@pytest.mark.parametrize("name", list(ops()))
def test_host_code_runs_once_for_each_kind_of_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = ops()[name]
    counts = {"forward": 0, "backward": 0}
    genuine = FusedOp.host_code

    def counted(self: FusedOp, backend: str, direction: str) -> object:
        counts[direction] += 1
        return genuine(self, backend, direction)

    monkeypatch.setattr(FusedOp, "host_code", counted)
    for seed in range(3):
        inputs = op.make(op.tiny.dims, torch.float32, "cpu", seed, requires_grad=True)
        exact = {key: value.detach().double().requires_grad_() for key, value in inputs.items()}
        out, want = op.run(inputs, "triton"), op.run_formula(exact)
        grad = torch.randn_like(out)
        got = torch.autograd.grad(out, list(inputs.values()), grad)
        expected = torch.autograd.grad(want, list(exact.values()), grad.double())
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-3)
    assert counts == {"forward": 1, "backward": 1}


def test_known_kinds_of_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.common import fused as module

    monkeypatch.setattr(module, "_MAX_KINDS", 3)
    known: dict[int, int] = {}
    for key in range(10):
        module._remember(known, key, key)
        assert known[key] == key and len(known) <= 3


def test_threads_record_apart() -> None:
    found = []

    def work() -> None:
        found.append(record(("a", "b"), (torch.randn(3, 5), torch.randn(3, 5)), add)[1])

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4 and all(plan is not None for plan in found)
    assert len({plan.source for plan in found if plan}) == 1
    assert not hasattr(plans._recording, "recorder") or plans._recording.recorder is None
