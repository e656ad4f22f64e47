"""Measures the kernels honestly, records the runs, judges and draws them; `python -m harness` or from a notebook."""

from harness.stamp import environment, interpret_without_gpu

# Has to precede the imports below: they import Triton, which decides then whether it interprets.
interpret_without_gpu()

from harness.comparison import compare  # noqa: E402
from harness.figure import METRICS, draw, figures  # noqa: E402
from harness.notebook import load_or_sweep  # noqa: E402
from harness.quickcheck import quick  # noqa: E402
from harness.record import Record, RecordError, load  # noqa: E402
from harness.sweeper import sweep  # noqa: E402
from harness.verdicts import verdict  # noqa: E402

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
