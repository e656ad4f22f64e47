"""Building kernels beforehand: every task is run, a failing one is counted, a dying worker loses only its task."""

from __future__ import annotations

import os
import queue
import sys

import pytest
import torch

from harness import prebuild
from kernels.registry import ops


def test_in_this_process(monkeypatch):
    said = []
    name = next(iter(ops()))
    case = ops()[name].tiny.name
    tasks = [(name, case, "fp32", "eager"), (name, case, "fp32", "compile"), (name, "no such case", "fp32", "compile")]
    counts = prebuild.prebuild(tasks, jobs=1, echo=said.append)
    assert counts == {"built": 1, "failed": 1, "lost": 0}
    assert said[0].startswith("prebuild: 1 built, 1 failed in 1 processes")


def test_what_a_task_does(monkeypatch):
    seen = []
    op = ops()[next(iter(ops()))]

    def call(*tensors, backend, **kwargs):
        seen.append((backend, torch.is_grad_enabled(), tensors[0].requires_grad))
        return op.call(*tensors, backend="eager", **kwargs)

    watched = type(op)(**{**op.__dict__, "call": call})
    monkeypatch.setattr("kernels.registry.ops", lambda: {op.name: watched})
    assert prebuild.run_task((op.name, op.tiny.name, "fp32", "triton"), torch.device("cpu")) is None
    assert seen == [("triton", False, False), ("triton", True, True)]


def test_kernels_that_nobody_shares_come_first():
    cases = ("small_r4", "small_r16", "large_r4", "large_r16")
    tasks = [("op", case, "fp16", backend) for case in cases for backend in ("triton", "compile")]
    ordered = prebuild._ordered(tasks)
    assert sorted(ordered) == sorted(tasks)
    assert [case for _, case, _, backend in ordered[:2] if backend == "triton"] == ["small_r4", "small_r16"]
    assert [backend for *_, backend in ordered] == ["triton"] * 2 + ["compile"] * 4 + ["triton"] * 2


def test_nothing_is_tuned_while_others_use_the_card(monkeypatch):
    """What torch.compile's kernels took beside fifteen other processes must not choose the launches that are timed."""
    import torch._inductor.config as inductor

    seen = []
    monkeypatch.setattr(prebuild, "run_task", lambda task, device: seen.append(inductor.autotune_local_cache))
    work, done = queue.Queue(), queue.Queue()
    work.put(("op", "case", "fp16", "compile"))
    work.put(None)
    threads = torch.get_num_threads()
    with inductor.patch(compile_threads=inductor.compile_threads, autotune_local_cache=True):
        prebuild._worker(work, done)
    torch.set_num_threads(threads)
    assert seen == [False] and done.get_nowait() is None


def dies_at_two(work, done):
    for task in iter(work.get, None):
        if task == "two":
            done.close()
            done.join_thread()
            os._exit(1)
        done.put(None)


@pytest.mark.skipif(sys.platform == "win32", reason="the planted worker is not importable in a spawned process there")
def test_a_dying_worker(monkeypatch):
    monkeypatch.setattr(prebuild, "_worker", dies_at_two)
    outcomes = prebuild._in_processes(["one", "zero", "two", "zero", "three", "zero"], 2)
    assert outcomes == [None] * 5
