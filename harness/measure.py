"""One case: every arm checked, then all right arms timed together; what comes out are rows.

A failure of one arm is that arm's row; the others go on. A CUDA error that leaves the whole process unable to compute
is `DeadContext`, which carries the rows so far.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness import ceilings as limits
from harness import compiled, precision, throttle
from harness.delimiters import Delimiters, make_delimiters
from harness.precision import OUTPUT, Check, Truth
from harness.profile import CALLS, WINDOWS, ArmError, DeviceTime, device_times
from harness.record import Row, blank_row
from harness.stamp import DTYPES
from harness.wall import ROUNDS, WallTime, peak_bytes, wall_times
from kernels import UnsupportedCase
from kernels.registry import Case, Op

BACKENDS = ("eager", "compile", "triton", "tilelang")
PHASES = ("fwd", "fwdbwd")
# A time this far under the floor has lost kernels; nearer, the ceiling's own measurement may be what was slow.
FLOOR_SLACK = 0.95
# On a call this long the events around it must agree with the sum of its kernels, or with the host's time to issue them.
LONG_US = 1000.0
LONG_RATIO = 1.5
# Windows that differ by more than this make a row noisy.
NOISE = 0.05
Step = Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    windows: int = WINDOWS
    calls: int = CALLS
    rounds: int = ROUNDS
    warmup: int = 3


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
    check_arms(op, truth, live, rows)
    del truth
    live = {backend: row for backend, row in live.items() if row["status"] is None}
    if live:
        _time_arms(bench, op, case, dtype, live, rows)
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


def check_arms(op: Op, truth: Truth, live: Mapping[str, Row], rows: Mapping[str, Row]) -> None:
    """Precision of every arm, eager first since it bounds the others; a wrong arm's row is `failed`."""
    baseline: Check | None = None
    for backend in sorted(live, key=lambda name: name != "eager"):
        row = live[backend]
        try:
            found = precision.check(op, truth, backend, baseline)
        except Exception as error:
            _fail(row, error, rows)
            continue
        if backend == "eager":
            baseline = found
        row["ulp"], row["ulp_out"], row["rel_err"] = found.ulp, found.ulps[OUTPUT], found.relative[OUTPUT]
        row["ulp_grads"] = {name: ulp for name, ulp in found.ulps.items() if name != OUTPUT}
        if found.reason is not None:
            _set(row, "failed", f"wrong result: {found.reason}")


def steps(op: Op, case: Case, dtype: str, device: torch.device, backends: Sequence[str]) -> dict[str, dict[str, Step]]:
    """{phase: {backend: the timed call}} over one set of inputs.

    The forward runs without autograd. Forward + backward clears the gradients, as a training step does, and feeds back
    one gradient that was made outside.
    """
    leaves = op.make(case.dims, DTYPES[dtype], device, precision.seed(op.name, case.name, dtype, 1), requires_grad=True)
    plain = {name: leaf.detach() for name, leaf in leaves.items()}
    grad = torch.randn(op.out_shape(case.dims), device=device).to(DTYPES[dtype])
    tensors: list[Tensor] = list(leaves.values())

    def forward(backend: str) -> Step:
        def call() -> Tensor:
            with torch.no_grad():
                return op.run(plain, backend)

        return call

    def both(backend: str) -> Step:
        def call() -> Tensor:
            for leaf in tensors:
                leaf.grad = None
            output = op.run(leaves, backend)
            output.backward(grad)
            return output

        return call

    return {"fwd": {b: forward(b) for b in backends}, "fwdbwd": {b: both(b) for b in backends}}


def _time_arms(bench: Bench, op: Op, case: Case, dtype: str, live: dict[str, Row], rows: Mapping[str, Row]) -> None:
    calls = steps(op, case, dtype, bench.device, tuple(live))
    before = throttle.state()
    gc.collect()
    for backend in tuple(live):
        try:
            _prepare(bench, {phase: calls[phase][backend] for phase in PHASES}, live[backend])
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
            _judge(row, phase, op, case, bench)
    _prove(calls, live, captured)
    for row in live.values():
        row["clock_mhz"] = seen[-1].clock_mhz
        row["throttled"] = None if before.throttled is None else any(reading.throttled for reading in (before, *seen))
        row["noisy"] = any(_spread(row[phase]["dev_us"]) > NOISE for phase in PHASES) or throttle.drifted(*seen)
        if row["status"] is None:
            row["status"] = "ok"


def _prepare(bench: Bench, calls: Mapping[str, Step], row: Row) -> None:
    for phase, call in calls.items():
        for _ in range(bench.plan.warmup):
            call()
        row[f"vram_{phase}"] = peak_bytes(call)


def _time_phase(
    bench: Bench, phase: str, calls: dict[str, dict[str, Step]], live: dict[str, Row], rows: Mapping[str, Row]
) -> tuple[dict[str, DeviceTime], dict[str, WallTime]]:
    """Times all live arms together; an arm that raises is dropped and the others start again."""
    plan = bench.plan
    while live:
        try:
            device = device_times(calls[phase], bench.delimiters, windows=plan.windows, calls=plan.calls)
            return device, wall_times(calls[phase], bench.delimiters, rounds=plan.rounds)
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


def _judge(row: Row, phase: str, op: Op, case: Case, bench: Bench) -> None:
    """Marks a time invalid that the card cannot have reached, or that events around the call contradict."""
    times = row[phase]
    cost = op.cost(case.dims, DTYPES[row["dtype"]].itemsize, backward=phase == "fwdbwd")
    kind = "tf32" if row["tf32"] else row["dtype"]
    floor = limits.floor_us(bench.ceilings, cost.bytes_read, cost.bytes_written, cost.flops, kind)
    times["floor_us"] = floor
    if not times["dev_us"]:
        return
    # A call can end before its last writes leave the L2, and its backward can find there what its forward read.
    written = max(0, cost.bytes_written - bench.l2_bytes)
    read = cost.bytes_read - (row["bytes_read"] if phase == "fwdbwd" else 0)
    least = limits.floor_us(bench.ceilings, read, written, cost.flops, kind)
    reason = implausible(min(times["dev_us"]), min(times["wall_us"]), times["host_us"], least, bool(row["l2_resident"]))
    if reason is not None:
        _set(row, "invalid", f"{phase}: {reason}")


def implausible(dev_us: float, wall_us: float, host_us: float, floor: float | None, l2_resident: bool) -> str | None:
    """Why a device time cannot be right, or None; `floor` is the least time that the card needs."""
    if floor is not None and not l2_resident and dev_us < FLOOR_SLACK * floor:
        return f"{dev_us:.2f} µs is under the floor of {floor:.2f} µs"
    if wall_us > LONG_US and wall_us > LONG_RATIO * max(dev_us, host_us):
        return f"profiler saw {dev_us:.0f} µs of kernels, events around the call {wall_us:.0f} µs"
    return None


def _spread(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1 if values else 0.0


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
