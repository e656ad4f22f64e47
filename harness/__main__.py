"""`python -m harness quick | sweep | verdict | figures | compare | selfcheck | crosscheck | host`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import comparison, figure, quickcheck, stamp, sweeper, throttle, verdicts
from harness.measure import DeadContext
from harness.record import RecordError
from harness.steps import ARMS, BACKENDS, chosen

DTYPES = ("fp16", "bf16", "fp32", "all")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m harness", description="Measures, records and judges the kernels.")
    commands = top.add_subparsers(dest="command", required=True)

    quick = commands.add_parser("quick", help="seconds: every op, every backend")
    quick.add_argument("--dtype", choices=DTYPES, default="fp16")
    quick.add_argument("--op", help="only this op")

    sweep = commands.add_parser("sweep", help="ceilings, every case of every family, figures; resumes")
    sweep.add_argument("--family", help="only this family")
    sweep.add_argument("--dtype", choices=DTYPES, default="fp16")
    sweep.add_argument("--out", help="folder of the records, data/<gpu> by default")
    sweep.add_argument("--op", help="only this op")
    sweep.add_argument("--case", default="*", help="only cases whose name matches this shell pattern")
    sweep.add_argument("--jobs", type=int, help="processes that compile beforehand (number of CPUs; 0: none)")
    sweep.add_argument(
        "--workers", metavar="N|ADDRESS", help="on N GPUs of this machine, or on the workers of a Dask scheduler"
    )
    sweep.add_argument("--retry", action="store_true", help="measure failed and invalid rows again")
    sweep.add_argument("--figures", default="out/figures", help="folder of the figures")

    for command in (quick, sweep):
        command.add_argument("--backends", help=f"arms, comma-separated; of {', '.join(ARMS)}")
        command.add_argument("--allow-busy", action="store_true", help="measure though the GPU is busy")

    verdict = commands.add_parser("verdict", help="geometric means over the cases of a recorded run")
    verdict.add_argument("--dir", help="data/<gpu>")
    verdict.add_argument("--dtype", choices=DTYPES, default="fp16")
    verdict.add_argument("--format", choices=("text", "json", "markdown"), default="text")

    figures = commands.add_parser("figures", help="PNG and SVG of a recorded run, no GPU needed")
    figures.add_argument("--dir", help="data/<gpu>")
    figures.add_argument("--out", default="out/figures")

    compare = commands.add_parser("compare", help="faster | same | slower | unclear per row; exits 1 on slower")
    compare.add_argument("run_a", metavar="RUN_A", help="file or folder")
    compare.add_argument("run_b", metavar="RUN_B", help="file or folder")
    compare.add_argument("--foreign", action="store_true", help="compare runs of two cards or schemas all the same")

    cross = commands.add_parser("crosscheck", help="device time three ways on six cases, kept in ceilings.json")
    cross.add_argument("--dir", help="folder of the records, data/<gpu> by default")
    cross.add_argument("--dtype", choices=DTYPES[:3], default="fp16")

    host = commands.add_parser("host", help="where the host's time goes in one call of each op, kept in ceilings.json")
    host.add_argument("--dir", help="folder of the records, data/<gpu> by default")
    host.add_argument("--dtype", choices=DTYPES[:3], default="fp16")

    commands.add_parser("selfcheck", help="plants faults that have to be caught; on a GPU also checks the timing")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 fine, 1 a row failed or became slower, 2 it could not be done (the message says why)."""
    arguments = parser().parse_args(argv)
    try:
        return int(globals()[f"_{arguments.command}"](arguments))
    except (sweeper.NoGpu, throttle.BusyGpu, RecordError, FileNotFoundError, ValueError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("harness: stopped; finished cases are kept, and the same command goes on from there", file=sys.stderr)
        return 130


def _quick(arguments: argparse.Namespace) -> int:
    if stamp.environment()["gpu"] is None:
        print("no GPU: the maths of every backend at tiny sizes on the CPU, no times")
    arms = chosen(arguments.backends, BACKENDS)
    rows = quickcheck.quick(arguments.op, arguments.dtype, backends=arms, allow_busy=arguments.allow_busy, echo=print)
    return 0 if quickcheck.passed(rows) else 1


def _sweep(arguments: argparse.Namespace) -> int:
    if arguments.workers:
        return _sweep_workers(arguments)
    try:
        folder = sweeper.sweep(
            arguments.family,
            arguments.dtype,
            arguments.out,
            case=arguments.case,
            op=arguments.op,
            backends=chosen(arguments.backends, ARMS),
            jobs=arguments.jobs,
            retry=arguments.retry,
            allow_busy=arguments.allow_busy,
        )
    except DeadContext as error:
        row = error.rows[-1]
        print(f"{row['op']} {row['case']} {row['backend']}: {row['reason']}; going on in a new process", flush=True)
        again = [argument for argument in sys.argv[1:] if argument != "--retry"]
        # Replacing this process frees the memory that its dead context holds.
        os.execv(sys.executable, [sys.executable, "-m", "harness", *again])
    _show(folder, arguments)
    return 0


def _sweep_workers(arguments: argparse.Namespace) -> int:
    try:
        from harness import cluster, spread
    except ImportError as error:
        print(f"harness: --workers needs the extra `cluster` ({error}): pip install -e '.[cluster]'", file=sys.stderr)
        return 2
    options = ("family", "dtype", "out", "case", "op", "jobs", "retry", "allow_busy")
    try:
        folders = spread.sweep(arguments.workers, **{name: getattr(arguments, name) for name in options})
    except (cluster.NoWorkers, spread.LostScheduler, OSError) as error:
        print(f"harness: {error}", file=sys.stderr)
        return 2
    for folder in folders:
        _show(folder, arguments, Path(arguments.figures) / folder.name if len(folders) > 1 else None)
    return 0


def _show(folder: Path, arguments: argparse.Namespace, figures: Path | None = None) -> None:
    print(f"figures in {figure.figures(folder, figures or arguments.figures)}")
    for dtype in stamp.dtype_names(arguments.dtype):
        print(verdicts.verdict(folder, dtype, format="text"))


def _verdict(arguments: argparse.Namespace) -> int:
    for dtype in stamp.dtype_names(arguments.dtype):
        print(verdicts.verdict(arguments.dir, dtype, format=arguments.format))
    return 0


def _figures(arguments: argparse.Namespace) -> int:
    print(f"figures in {figure.figures(arguments.dir, arguments.out)}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    changes = comparison.compare(arguments.run_a, arguments.run_b, foreign=arguments.foreign)
    for line in comparison.report(changes) + comparison.differences(arguments.run_a, arguments.run_b, changes):
        print(line)
    print(comparison.summary(changes))
    return 1 if comparison.worse(changes) else 0


def _crosscheck(arguments: argparse.Namespace) -> int:
    from harness import crosscheck

    run = sweeper.crosscheck_into(arguments.dir, arguments.dtype)
    for row in run.rows:
        found = crosscheck.times(row) or {}
        values = " · ".join(f"{way} {value:.2f}" for way, value in found.items())
        print(f"{row['op']} {row['case']} {row['arm']} {row['phase']}: {values}  {crosscheck.explain(row, run.meta)}")
    return 0 if crosscheck.explained(run.rows, run.meta) else 1


def _host(arguments: argparse.Namespace) -> int:
    from harness import hostprofile

    for row in sweeper.host_into(arguments.dir, arguments.dtype):
        values = " · ".join(f"{step} {value:.1f}" for step, value in hostprofile.times(row).items())
        print(f"{row['op']} {row['backend']}: {row['launches']} launches, {hostprofile.ratio(row):.2f}: {values}")
    return 0


def _selfcheck(arguments: argparse.Namespace) -> int:
    from harness import selfcheck

    return selfcheck.main()


if __name__ == "__main__":
    sys.exit(main())
