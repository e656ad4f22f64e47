"""What a number depends on: the card, the software, the sources. Kept in every record's `meta`."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import tokenize
from collections.abc import Mapping
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
    """Hash of the code that decides how fast `family` runs: its folder, and what that imports from `kernels`.

    Comments, docstrings and layout don't count: a record is stale once the code differs, not its description.
    """
    found: dict[Path, str] = {}
    pending = sorted((ROOT / "kernels" / family).glob("**/*.py"))
    while pending:
        path = pending.pop()
        if path not in found:
            source = path.read_text(encoding="utf-8")
            found[path] = _bare(source)
            pending += _imported(source)
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{found[path]}\0".encode())
    return digest.hexdigest()


def _imported(source: str) -> list[Path]:
    """The files of this project's `kernels` that a source imports."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    bases = [ROOT.joinpath(*module.split(".")) for module in modules if module.split(".")[0] == "kernels"]
    return [path for base in bases for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]


def _bare(source: str) -> str:
    """A source without comments, docstrings, white space and commas before a closing bracket."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            for line in range(first.lineno, (first.end_lineno or first.lineno) + 1):
                lines[line - 1] = ""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", "".join(lines)))


@cache
def _current_hashes() -> frozenset[str]:
    return frozenset(kernels_sha256(path.name) for path in (ROOT / "kernels").iterdir() if path.is_dir())


def labels(meta: Mapping[str, Any]) -> list[str]:
    """What a reader of a run has to be told: made from a dirty tree, or by kernels that have changed since.

    meta: a record's, or several runs' as `combined` makes it.
    """
    hashes = meta.get("kernels_sha256")
    known = [hashes] if isinstance(hashes, str) else list(hashes or ())
    found = ["dirty tree"] if meta.get("git_dirty") else []
    return found + (["stale kernels"] if set(known) - _current_hashes() else [])


def combined(metas: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One meta that stands for several runs of a card: the last one's date, dirty or stale where any of them is.

    metas: by the runs' families, by which `of_family` and `warning` tell whose a label is.
    """
    hashes = sorted({meta["kernels_sha256"] for meta in metas.values() if meta.get("kernels_sha256")})
    last = max(metas.values(), key=lambda meta: str(meta.get("started")))
    own = {name: {key: meta.get(key) for key in ("kernels_sha256", "git_dirty")} for name, meta in metas.items()}
    dirty = any(meta.get("git_dirty") for meta in metas.values())
    return {**last, "kernels_sha256": hashes, "git_dirty": dirty, "families": own}


def of_family(meta: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The meta of several runs with one family's own labels, for what shows that family alone; another meta as it is."""
    own = (meta.get("families") or {}).get(family)
    return {**meta, **own, "families": None} if own else dict(meta)


def warning(meta: Mapping[str, Any]) -> str:
    """The labels as a sentence for a caption, with a space before it; empty where there is nothing to warn of."""
    own = {name: labels(found) for name, found in (meta.get("families") or {}).items()}
    found = []
    for label in labels(meta):
        names = [name for name, has in own.items() if label in has]
        found.append(f"{label.upper()} ({', '.join(names)})" if names else label.upper())
    return f" {', '.join(found)}." if found else ""


def cite(meta: Mapping[str, Any]) -> str:
    """How to cite a run, in one line: the card, the day, the revision and the software that its numbers depend on."""
    hashes = meta.get("kernels_sha256")
    known = [hashes] if isinstance(hashes, str) else list(hashes or ())
    state = labels(meta) + (["state of the tree not recorded"] if meta.get("git_dirty") is None else [])
    parts = [
        f"adapter-kernels, run of {str(meta.get('started'))[:10]} on {meta.get('gpu')}",
        f"revision {str(meta.get('git_revision') or 'unknown')[:12]}",
        *([f"kernels {'+'.join(each[:8] for each in known)}"] if known else []),
        *(f"{name} {meta[name]}" for name in ("driver", "cuda", "torch", "triton", "tilelang") if meta.get(name)),
    ]
    return ", ".join(parts) + (f" ({', '.join(state)})" if state else "")


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
        "argv": argv(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if family is not None:
        stamp["kernels_sha256"] = kernels_sha256(family)
    return stamp


def argv() -> list[str]:
    """The command line, where this is one."""
    return ["harness", *sys.argv[1:]] if Path(sys.argv[0]).parent.name == "harness" else ["harness (imported)"]


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
        # A copy of the tree without its repository can be told which revision it is, and whether it was dirty.
        dirty = {"0": False, "1": True}.get(os.environ.get("HARNESS_GIT_DIRTY", ""))
        return {"git_revision": os.environ.get("HARNESS_GIT_REVISION"), "git_dirty": dirty}
    return {"git_revision": revision, "git_dirty": bool(git("status", "--porcelain", "--", "kernels", "harness"))}
