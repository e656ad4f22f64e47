"""The quick check: every op on every backend on one small case; with a GPU also timed, without one the maths alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from harness import compiled, precision, stamp, throttle
from harness.measure import DeadContext, Plan, check_arms, make_bench, measure_case, start_row
from harness.record import Row
from harness.steps import BACKENDS, is_graphed
from kernels.registry import Op, ops

PLAN = Plan(windows=2, calls=20, rounds=10, extra=0)
COLUMNS = ("op", "dtype", "backend", "status", "ULP", "eager ULP", "fwd µs", "fwd+bwd µs", "wall µs", "note")


def quick(
    op: str | None = None,
    dtype: str = "fp16",
    *,
    backends: Sequence[str] = BACKENDS,
    allow_busy: bool = False,
    echo: Callable[[str], None] | None = None,
) -> list[Row]:
    """One row per op, dtype and backend, as in a recorded run; times are None without a GPU.

    Args:
        op: only this op.
        dtype: "fp16", "bf16", "fp32" or "all".
        backends: the arms; the plain ones by default.
        allow_busy: measure on a card that is busy with other work.
        echo: gets a formatted line per row as soon as it is there.
    """
    if op is not None and op not in ops():
        raise ValueError(f"op: got {op!r}, wanted one of {', '.join(ops())}")
    bench = None
    if torch.cuda.is_available():
        throttle.refuse_busy(allow_busy)
        bench = make_bench(None, PLAN)
    chosen = list(ops().values()) if op is None else [ops()[op]]
    rows: list[Row] = []
    if echo is not None:
        echo(format_row(COLUMNS))
    for name in stamp.dtype_names(dtype):
        for each in chosen:
            dead = False
            try:
                made = (
                    measure_case(bench, each, each.quick, name, backends) if bench else _checked(each, name, backends)
                )
            except DeadContext as error:
                made, dead = error.rows, True
            rows += made
            if echo is not None:
                for row in made:
                    echo(format_row(cells(row, made)))
                if dead:
                    echo("the GPU answers no more in this process, so what would follow was not checked")
            if dead:
                return rows
    return rows


def _checked(op: Op, dtype: str, backends: Sequence[str]) -> list[Row]:
    """Tiny sizes on the CPU: Triton in its interpreter, TileLang on its CPU target."""
    rows = {backend: start_row(op, op.tiny, dtype, backend, None) for backend in backends}
    for backend, row in rows.items():
        if is_graphed(backend):
            row |= {"status": "unsupported", "reason": "CUDA graphs need a GPU"}
    compiled.fresh()
    inputs_seed = precision.seed(op.name, op.tiny.name, dtype, 0)
    truth = precision.make_truth(op, op.tiny.dims, stamp.DTYPES[dtype], torch.device("cpu"), inputs_seed)
    check_arms(op, truth, rows, rows)
    if "compile" in rows and rows["compile"]["status"] is None and compiled.graphs() == 0:
        rows["compile"] |= {"status": "invalid", "reason": "not compiled: no graph was captured, the arm ran eagerly"}
    for row in rows.values():
        row["status"] = row["status"] or "ok"
    return list(rows.values())


def passed(rows: Sequence[Row]) -> bool:
    """Whether something ran and nothing that ran was wrong."""
    return any(row["status"] == "ok" for row in rows) and all(row["status"] in ("ok", "unsupported") for row in rows)


def cells(row: Row, beside: Sequence[Row]) -> tuple[str, ...]:
    """A row as COLUMNS shows it; `beside` holds the eager arm."""
    eager = next((other["ulp"] for other in beside if other["backend"] == "eager"), None)
    status = "unavailable" if row["status"] == "unsupported" else row["status"]
    times = [f"{min(row[p]['dev_us']):.1f}" if row[p] and row[p]["dev_us"] else "–" for p in ("fwd", "fwdbwd")]
    wall = f"{min(row['fwdbwd']['wall_us']):.0f}" if row["fwdbwd"] else "–"
    ulps = [f"{value:.2f}" if value is not None else "–" for value in (row["ulp"], eager)]
    return row["op"], row["dtype"], row["backend"], status, *ulps, *times, wall, row["reason"] or ""


def format_row(values: Sequence[str]) -> str:
    """COLUMNS side by side."""
    widths = (14, 5, 8, 11, 8, 9, 8, 10, 8, 0)
    return "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)).rstrip()
