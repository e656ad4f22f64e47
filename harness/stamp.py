"""What a number depends on: the card, the software, the sources. Kept in every record's `meta`."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from harness import throttle

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# Rows whose records differ in one of these are never mixed in one file.
IDENTITY = ("gpu", "driver", "cuda", "torch", "triton", "tilelang", "kernels_sha256")


def interpret_without_gpu() -> None:
    """Makes Triton kernels run in its CPU interpreter where there is no GPU, unless the user decided already.

    Triton reads the variable when it is imported, so this has to come before the first kernel.
    """
    if "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def dtype_names(choice: str) -> tuple[str, ...]:
    """("fp16",) for "fp16", every dtype for "all"; ValueError for anything else."""
    if choice == "all":
        return tuple(DTYPES)
    if choice not in DTYPES:
        raise ValueError(f"dtype: got {choice!r}, wanted one of {', '.join(DTYPES)}, all")
    return (choice,)


def slug(gpu: str) -> str:
    """The folder of a card's records: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def data_dir(gpu: str | None = None) -> Path:
    """data/<gpu> of that card, or of the one in this machine."""
    return DATA / slug(gpu or torch.cuda.get_device_name())


def recorded_dirs() -> list[Path]:
    """Folders under data/ that hold a recorded run."""
    return sorted(path.parent for path in DATA.glob("*/ceilings.json"))


def kernels_sha256(family: str) -> str:
    """Hash of the sources that decide how fast `family` runs: its folder, what the families share, the registry."""
    kernels = ROOT / "kernels"
    files = {kernels / "registry.py", *kernels.glob("common*/**/*.py"), *(kernels / family).glob("**/*.py")}
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def environment(family: str | None = None) -> dict[str, Any]:
    """The stamp of a run that starts now, on the current device; the card's entries are None without one."""
    stamp = {
        **_card(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "tilelang": _version("tilelang"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        **_git(),
        "argv": ["harness", *sys.argv[1:]] if Path(sys.argv[0]).parent.name == "harness" else ["harness (imported)"],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if family is not None:
        stamp["kernels_sha256"] = kernels_sha256(family)
    return stamp


def _card() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return dict.fromkeys(("gpu", "capability", "sms", "l2_bytes", "memory_bytes", "driver"))
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": throttle.driver_version(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git() -> dict[str, Any]:
    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD")
    if revision is None:
        # A copy of the tree without its repository can be told which revision it is; whether it is dirty, nobody knows.
        return {"git_revision": os.environ.get("HARNESS_GIT_REVISION"), "git_dirty": None}
    return {"git_revision": revision, "git_dirty": bool(git("status", "--porcelain", "--", "kernels", "harness"))}
