"""What only notebooks need: a family's recorded run, made where a GPU is there and none was recorded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness import record, stamp, sweeper
from harness.record import Record


def load_or_sweep(family: str, dtype: str = "fp16", *, echo: Callable[[str], None] = print) -> Record:
    """The recorded run of `family`, and in one fixed line whose card it is.

    With a GPU whose card has no record of this family and dtype, sweeps first; without one, loads a committed run.

    Raises:
        FileNotFoundError: no GPU and no recorded run of this family; RecordError: a bad file; BusyGpu.
    """
    paths = [path for folder in stamp.recorded_dirs() if (path := folder / f"{family}.json").exists()]
    if torch.cuda.is_available():
        path = stamp.data_dir() / f"{family}.json"
        if not path.exists() or not any(row["dtype"] == dtype for row in record.load(path).rows):
            sweeper.sweep(family, dtype, echo=echo)
        paths = [path]
    if not paths:
        raise FileNotFoundError(f"no recorded run of {family} under data/, and no GPU here to make one")
    run = record.load(paths[0])
    echo(f"{family}: {len(run.rows)} rows recorded on {run.meta['gpu']}, {str(run.meta['started'])[:10]}")
    return run
