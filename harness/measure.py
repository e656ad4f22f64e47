"""One case: every arm checked, then all right arms timed together; what comes out are rows.

A failure of one arm is that arm's row; the others go on. A CUDA error that leaves the whole process unable to compute
is `DeadContext`, which carries the rows so far.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness import ceilings as limits
from harness import compiled, graphed, precision, throttle
from harness.adaptive import STEADY, until_steady
from harness.delimiters import Delimiters, make_delimiters
from harness.graphed import GraphedArm
from harness.plausible import judge
from harness.precision import OUTPUT, Check, Truth
from harness.profile import CALLS, WINDOWS, ArmError, DeviceTime, device_times
from harness.record import Row, blank_row
from harness.stamp import DTYPES
from harness.statistic import noise
from harness.steps import BACKENDS, PHASES, Step, is_graphed, plain, steps, timed_inputs
from harness.wall import ROUNDS, WallTime, peak_bytes, wall_times
from kernels import UnsupportedCase
from kernels.registry import Case, Op

# A row is noisy where its best windows still differ by more than this after all the rounds that it was given.
NOISE = 0.05


@dataclass(frozen=True)
class Plan:
    """How much to measure; `extra` times more where the noise is high."""

    windows: int = WINDOWS
    calls: int = CALLS
    rounds: int = ROUNDS
    warmup: int = 3
    extra: int = 3


class DeadContext(RuntimeError):
    """A CUDA error after which this process can compute nothing more; `rows` hold what was found before and why."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__("the CUDA context is dead: only a new process can go on")
        self.rows = rows


@dataclass(frozen=True)
class Bench:
    """What measuring a case needs, made once."""

    device: torch.device
    delimiters: Delimiters
    ceilings: limits.Ceilings | None
    plan: Plan
    l2_bytes: int
    capability: tuple[int, int]


def make_bench(ceilings: limits.Ceilings | None, plan: Plan, delimiters: Delimiters | None = None) -> Bench:
    """A bench on the current CUDA device."""
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    made = delimiters or make_delimiters(device)
    return Bench(device, made, ceilings, plan, l2_bytes, torch.cuda.get_device_capability(device))


def measure_case(bench: Bench, op: Op, case: Case, dtype: str, backends: Sequence[str] = BACKENDS) -> list[Row]:
    """One row per backend; DeadContext where the card gave up."""
    rows = {backend: start_row(op, case, dtype, backend, bench) for backend in backends}
    compiled.fresh()
    live = {backend: row for backend, row in rows.items() if row["status"] is None}
    try:
        first_seed = precision.seed(op.name, case.name, dtype, 0)
        truth = precision.make_truth(op, case.dims, DTYPES[dtype], bench.device, first_seed)
    except Exception as error:
        for row in live.values():
            _fail(row, error, rows, "the float64 oracle")
        return list(rows.values())
    graphs = _capture_arms(bench, op, case, dtype, live, rows)
    check_arms(op, truth, live, rows, graphs)
    del truth
    live = {backend: row for backend, row in live.items() if row["status"] is None}
    if live:
        _time_arms(bench, op, case, dtype, live, rows, graphs)
    graphs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return list(rows.values())


def start_row(op: Op, case: Case, dtype: str, backend: str, bench: Bench | None) -> Row:
    """The row's fixed part: sizes and costs; `unsupported` where the card cannot do the dtype at all."""
    row = blank_row(op.name, case.name, dtype, backend, case.dims)
    cost = op.cost(case.dims, DTYPES[dtype].itemsize)
    row |= {"bytes_read": cost.bytes_read, "bytes_written": cost.bytes_written, "flops": cost.flops}
    row["tf32"] = torch.backends.cuda.matmul.allow_tf32 if dtype == "fp32" else None
    if bench is None:
        return row
    kind = "tf32" if row["tf32"] else dtype
    row["floor_us"] = limits.floor_us(bench.ceilings, cost.bytes_read, cost.bytes_written, cost.flops, kind)
    row["l2_resident"] = cost.bytes_read + cost.bytes_written <= bench.l2_bytes
    if dtype == "bf16" and bench.capability < (8, 0):
        has = ".".join(map(str, bench.capability))
        _set(row, "unsupported", f"bf16 needs compute capability 8.0, this card has {has}")
    return row


def check_arms(
    op: Op,
    truth: Truth,
    live: Mapping[str, Row],
    rows: Mapping[str, Row],
    graphs: Mapping[str, GraphedArm] | None = None,
) -> None:
    """Precision of every arm, eager first since it bounds the others; a wrong arm's row is `failed`."""
    baseline: Check | None = None
    for backend in sorted(live, key=lambda name: plain(name) != "eager"):
        row = live[backend]
        if row["status"] is not None:
            continue
        try:
            if is_graphed(backend):
                found = graphed.check((graphs or {})[backend], truth, baseline)
            else:
                found = precision.check(op, truth, backend, baseline)
        except Exception as error:
            _fail(row, error, rows)
            continue
        if plain(backend) == "eager" and baseline is None:
            baseline = found
        row["ulp"], row["ulp_out"], row["rel_err"] = found.ulp, found.ulps[OUTPUT], found.relative[OUTPUT]
        row["ulp_grads"] = {name: ulp for name, ulp in found.ulps.items() if name != OUTPUT}
        if found.reason is not None:
            _set(row, "failed", f"wrong result: {found.reason}")


def _capture_arms(
    bench: Bench, op: Op, case: Case, dtype: str, live: Mapping[str, Row], rows: Mapping[str, Row]
) -> dict[str, GraphedArm]:
    """The graphed arms' graphs; where there can be none, the row says why."""
    made = {}
    for backend, row in live.items():
        if is_graphed(backend):
            try:
                made[backend] = graphed.make(op, case, dtype, bench.device, backend)
            except Exception as error:
                _fail(row, error, rows, "capturing a CUDA graph")
    return made


def _calls(
    bench: Bench, op: Op, case: Case, dtype: str, arms: Sequence[str], graphs: Mapping[str, GraphedArm]
) -> dict[str, dict[str, Step]]:
    """{phase: {arm: the timed call}}, all on the same values."""
    leaves, grad = timed_inputs(op, case, dtype, bench.device)
    made = steps(op, leaves, grad, [arm for arm in arms if not is_graphed(arm)])
    for arm in arms:
        if is_graphed(arm):
            graphs[arm].load(leaves, grad)
    return {
        phase: {arm: graphs[arm].phases[phase].replay if is_graphed(arm) else made[phase][arm] for arm in arms}
        for phase in PHASES
    }


def _time_arms(
    bench: Bench,
    op: Op,
    case: Case,
    dtype: str,
    live: dict[str, Row],
    rows: Mapping[str, Row],
    graphs: Mapping[str, GraphedArm],
) -> None:
    calls = _calls(bench, op, case, dtype, tuple(live), graphs)
    before = throttle.state()
    gc.collect()
    for backend in tuple(live):
        try:
            _prepare(bench, {phase: calls[phase][backend] for phase in PHASES}, live[backend], graphs.get(backend))
        except Exception as error:
            _fail(live[backend], error, rows)
            _drop(backend, calls, live)
    captured = compiled.graphs()
    _prove(calls, live, captured)
    if "compile" in live and live["compile"]["status"] is not None:
        _drop("compile", calls, live)
    seen = []
    for phase in PHASES:
        device, wall = _time_phase(bench, phase, calls, live, rows)
        seen.append(throttle.state())
        for backend, row in live.items():
            _fill(row, phase, device[backend], wall[backend])
            reason = judge(row, phase, op, case, bench.ceilings, bench.l2_bytes)
            if reason is not None:
                _set(row, "invalid", f"{phase}: {reason}")
    _prove(calls, live, captured)
    for row in live.values():
        row["clock_mhz"] = seen[-1].clock_mhz
        row["throttled"] = None if before.throttled is None else any(reading.throttled for reading in (before, *seen))
        row["noisy"] = any(noise(row[phase]["dev_us"]) > NOISE for phase in PHASES) or throttle.drifted(*seen)
        if row["status"] is None:
            row["status"] = "ok"


def _prepare(bench: Bench, calls: Mapping[str, Step], row: Row, graph: GraphedArm | None) -> None:
    """Warms up and takes the peak memory, which a replay does not show: a graph's is what its capture asked for."""
    for phase, call in calls.items():
        for _ in range(bench.plan.warmup):
            call()
        row[f"vram_{phase}"] = peak_bytes(call) if graph is None else graph.phases[phase].peak_bytes


def _time_phase(
    bench: Bench, phase: str, calls: dict[str, dict[str, Step]], live: dict[str, Row], rows: Mapping[str, Row]
) -> tuple[dict[str, DeviceTime], dict[str, WallTime]]:
    """Times all live arms together; an arm that raises is dropped and the others start again."""
    plan = bench.plan
    while live:
        try:
            device = until_steady(
                lambda: device_times(calls[phase], bench.delimiters, windows=plan.windows, calls=plan.calls),
                lambda time: time.dev_us,
                DeviceTime.joined,
                STEADY["dev_us"],
                plan.extra,
            )
            wall = until_steady(
                lambda: wall_times(calls[phase], bench.delimiters, rounds=plan.rounds),
                lambda time: time.wall_us,
                WallTime.joined,
                STEADY["wall_us"],
                plan.extra,
            )
            return device, wall
        except ArmError as error:
            _fail(live[error.arm], error.__cause__ or error, rows)
            _drop(error.arm, calls, live)
        except Exception as error:  # raised between calls, so no arm can be named: none was measured
            for backend in tuple(live):
                _fail(live[backend], error, rows, f"while {', '.join(live)} were timed")
                _drop(backend, calls, live)
    return {}, {}


def _drop(backend: str, calls: dict[str, dict[str, Step]], live: dict[str, Row]) -> None:
    del live[backend]
    for phase in PHASES:
        del calls[phase][backend]


def _prove(calls: Mapping[str, Mapping[str, Step]], live: Mapping[str, Row], captured: int) -> None:
    """Marks the compile arm invalid unless it enters a compiled graph in each direction."""
    if "compile" not in live or live["compile"]["status"] is not None:
        return
    graphs = {"fwd": 1, "fwdbwd": 2}
    reason = compiled.problem({phase: (calls[phase]["compile"], graphs[phase]) for phase in PHASES}, captured)
    if reason is not None:
        _set(live["compile"], "invalid", reason)


def _fill(row: Row, phase: str, device: DeviceTime, wall: WallTime) -> None:
    row[phase] = {
        "dev_us": list(device.dev_us),
        "wall_us": wall.wall_us,
        "host_us": wall.host_us,
        "launches": device.launches,
    }
    if device.reason is not None:
        _set(row, "invalid", f"{phase}: {device.reason}")


def _set(row: Row, status: str, reason: str) -> None:
    """The first reason stays."""
    if row["status"] in (None, "ok"):
        row["status"], row["reason"] = status, reason


def _fail(row: Row, error: BaseException, rows: Mapping[str, Row], what: str = "") -> None:
    """Makes an exception the row's reason; DeadContext where the card no longer answers."""
    if isinstance(error, UnsupportedCase):
        _set(row, "unsupported", str(error))
        return
    if isinstance(error, torch.OutOfMemoryError):
        _set(row, "failed", "out of GPU memory")
        torch.cuda.empty_cache()
        return
    lines = str(error).strip().splitlines() or [""]
    prefix = f"{what}: " if what else ""
    _set(row, "failed", f"{prefix}{type(error).__name__}: {lines[0]}"[:500])
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as dead:
            raise DeadContext([found for found in rows.values() if found["status"] is not None]) from dead
