"""Measures the kernels honestly, records the runs, judges and draws them; `python -m harness` or from a notebook."""

from harness.comparison import compare
from harness.figure import METRICS, draw, figures
from harness.notebook import load_or_sweep
from harness.quickcheck import quick
from harness.record import Record, RecordError, load
from harness.stamp import environment, interpret_without_gpu
from harness.sweeper import sweep
from harness.verdicts import verdict

__all__ = [
    "METRICS",
    "Record",
    "RecordError",
    "compare",
    "draw",
    "environment",
    "figures",
    "load",
    "load_or_sweep",
    "quick",
    "sweep",
    "verdict",
]

# Nothing above imports Triton, which decides when it is imported whether it interprets.
interpret_without_gpu()
