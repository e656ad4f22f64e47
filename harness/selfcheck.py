"""Checks the measuring itself: planted faults on any machine; on a GPU calls whose times and bytes are known beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from harness import behaviour, ceilings, compiled, faults, precision, stamp, throttle
from harness.delimiters import Delimiters, make_delimiters
from harness.measure import Plan, make_bench, measure_case
from harness.profile import device_times
from harness.sweeper import progress
from harness.wall import peak_bytes, wall_times
from kernels.registry import ops

Finding = tuple[bool, str]


def long_call(device: torch.device, delimiters: Delimiters) -> Finding:
    """The profiler's sum against CUDA events around a call that is long enough to hide the launch."""
    a = torch.ones(2**28, device=device)
    arms = {"add": lambda: a.add_(1)}
    arms["add"]()
    profiled = median(device_times(arms, delimiters, windows=3, calls=10)["add"].dev_us)
    events = median(wall_times(arms, delimiters, rounds=10)["add"].wall_us)
    return abs(events / profiled - 1) < 0.05, f"add of 1 GiB: profiler {profiled:.1f} µs, events {events:.1f} µs"


def launches(device: torch.device, delimiters: Delimiters) -> Finding:
    """Kernels, copies and memsets are all counted, each for its own arm, in every window."""
    x, y = torch.ones(2, 2**20, device=device).unbind()

    def three() -> None:
        x.add_(1)
        y.copy_(x)
        y.zero_()

    arms: dict[str, Callable[[], Any]] = {"one": lambda: x.mul_(1.0), "three": three, "none": lambda: None}
    found = device_times(arms, delimiters, attempts=1)
    counts = [found[arm].launches for arm in arms]
    windows = [len(found[arm].dev_us) for arm in arms]
    good = counts == [1, 3, 0] and windows == [3, 3, 0] and found["none"].reason is not None
    names = ", ".join(name[:40] for name in found["three"].kernels)
    return good, f"{delimiters.made_with} delimiters: launches {counts}, windows {windows}, three = {names}"


def cold_cache(device: torch.device, delimiters: Delimiters) -> Finding:
    """A small copy after the flush is slower than a second one right after it, which finds its data in L2."""
    a, out = torch.ones(2, 2**21, device=device).unbind()

    def twice() -> None:
        out.copy_(a)
        out.copy_(a)

    found = device_times({"once": lambda: out.copy_(a), "twice": twice}, delimiters)
    cold, warm = min(found["once"].dev_us), min(found["twice"].dev_us) - min(found["once"].dev_us)
    return cold > 1.2 * warm, f"copy of 8 MiB: cold {cold:.2f} µs, warm {warm:.2f} µs"


def memory(device: torch.device, delimiters: Delimiters) -> Finding:
    """Peak memory of a call that holds 64 MiB and then 32 MiB more."""

    def call() -> torch.Tensor:
        big = torch.empty(2**26, dtype=torch.uint8, device=device)
        return big[:1] + torch.empty(2**25, dtype=torch.uint8, device=device)[:1]

    peak = peak_bytes(call)
    return 96 * 2**20 <= peak <= 97 * 2**20, f"peak {peak / 2**20:.2f} MiB, wanted 96 and a little"


def poison(device: torch.device, delimiters: Delimiters) -> Finding:
    """What is allocated while an arm is checked holds NaN."""
    like = torch.zeros(2**20, device=device)
    found = {}
    for backend in ("eager", "compile"):
        with behaviour.poisoned(like, like.dtype, backend):
            fresh = torch.empty_like(like)
        found[backend] = int(fresh.isnan().sum()) / fresh.numel()
        del fresh
    return found["eager"] == 1.0 and found["compile"] == 1.0, f"share of NaN in fresh memory: {found}"


def proof(device: torch.device, delimiters: Delimiters) -> Finding:
    """A compiled call passes; an eager one, and one that stops being compiled, don't."""
    x = torch.ones(2**10, device=device, requires_grad=True)

    def formula(value: torch.Tensor) -> torch.Tensor:
        return torch.sin(value) * 3

    def reason(function: Callable[..., torch.Tensor], later: str = "default") -> str | None:
        compiled.fresh()

        def call() -> None:
            x.grad = None
            function(x).sum().backward()

        call()
        captured = compiled.graphs()
        with torch.compiler.set_stance(later):
            return compiled.problem({"fwdbwd": (call, 2)}, captured)

    fine = reason(torch.compile(formula, fullgraph=True))
    eager = reason(formula)
    fallback = reason(torch.compile(formula, fullgraph=True), "force_eager")
    good = compiled.counter_works() and fine is None and eager is not None and fallback is not None
    return good, f"counter works: {compiled.counter_works()}; compiled: {fine}; eager: {eager}; fallback: {fallback}"


def card(device: torch.device, delimiters: Delimiters) -> Finding:
    """The card answers about its clocks."""
    state = throttle.state()
    return state.clock_mhz is not None and state.reasons is not None, f"driver {throttle.driver_version()}, {state}"


def strided(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Every op on every backend, with inputs and a gradient that are not contiguous."""
    for op in ops().values():
        truth = precision.make_truth(op, op.quick.dims, torch.float16, device, precision.seed(op.name, "strided"))
        wrong = []
        for backend in ("triton", "tilelang"):
            try:
                reason = precision.check(op, truth, backend, strided=True).reason
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            wrong += [f"{backend}: {reason}"] if reason else []
        yield f"{op.name}, strided", not wrong, "; ".join(wrong) or "right"


CHECKS = (card, long_call, launches, cold_cache, memory, poison, proof)


def run(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Every check's name, whether it passed, and what it saw."""
    for made_with in ("triton", "jiterator"):
        try:
            delimiters = make_delimiters(device, made_with=made_with)
        except Exception as error:
            yield f"delimiters {made_with}", False, f"{type(error).__name__}: {error}"
            continue
        for check in CHECKS if made_with == "triton" else (launches,):
            try:
                passed, text = check(device, delimiters)
            except Exception as error:
                passed, text = False, f"{type(error).__name__}: {error}"
            yield check.__name__, passed, text


def plant(device: torch.device) -> int:
    """Plants every fault and prints by which words it was caught; how many were not."""
    missed = 0
    for name, caught, said in faults.run(device):
        missed += caught is False
        mark = {True: "ok  ", False: "FAIL", None: "    "}[caught]
        print(f"{mark} {name}: {said.splitlines()[0]}", flush=True)
    return missed


def main() -> int:
    """Prints one line a fault and, on a GPU, one a check, the ceilings, and what a case of two ops cost.

    0 where every fault was caught and all checks passed.
    """
    if not torch.cuda.is_available():
        return 1 if plant(torch.device("cpu")) else 0
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    print({key: value for key, value in stamp.environment().items() if key not in ("argv", "platform")})
    failed = plant(device)
    for name, passed, text in (*run(device), *strided(device)):
        failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {text}  {time.monotonic() - started:.1f} s", flush=True)
    delimiters = make_delimiters(device)
    measured, rows = ceilings.measure(device, delimiters)
    for row in rows:
        rate = row.get("gbps") or row.get("tflops") or row["reason"]
        print(f"     {row['kind']} {row['implementation']} {row.get('bytes') or row['shape']}: {rate}")
    print(f"ceilings: {ceilings.describe(measured)}  {time.monotonic() - started:.1f} s", flush=True)
    bench = make_bench(measured, Plan(), delimiters)
    for op in list(ops().values())[:2]:
        before = time.monotonic()
        found = measure_case(bench, op, op.quick, "fp16")
        print(f"{progress(found)}  {time.monotonic() - before:.1f} s")
        before = time.monotonic()
        measure_case(bench, op, op.quick, "fp16")
        print(f"     the same again, compiled: {time.monotonic() - before:.1f} s", flush=True)
    print(f"{failed} checks failed, {time.monotonic() - started:.1f} s in all")
    return 1 if failed else 0
