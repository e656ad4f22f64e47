"""The code that Triton and TileLang generate for one call: intermediate code, PTX or CUDA source, registers and spills.

The call's host code runs on tensors without data, in a process of its own where Triton does not interpret and a stand-in
says which card it is. So no GPU is needed: Triton brings its assembler along, TileLang takes nvcc from the path.
"""

from __future__ import annotations

import html
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kernels import UnsupportedCase
from kernels.common.fused import FusedOp
from kernels.registry import Dims, ops

# A Hopper card, where this machine has none.
CAPABILITY, SMS = (9, 0), 132
BACKENDS = ("triton", "tilelang")
_NAMES = ("kernel", "launches", "registers", "spilled bytes", "shared bytes")


@dataclass(frozen=True)
class Generated:
    """One kernel of a call: how often it is launched, what it takes of an SM, and its code by name ("TTGIR", "PTX", "CUDA")."""

    name: str
    launches: int
    registers: int | None
    spilled_bytes: int | None
    shared_bytes: int | None
    code: dict[str, str]


def generated(
    op: str, dims: Dims, dtype: str, backend: str, *, backward: bool = True, timeout: float = 300
) -> list[Generated]:
    """The kernels of one call's forward and, unless left out, its backward, in the order of their first launch.

    Args:
        op: a registered op; dims: its sizes; dtype: "fp16", "bf16" or "fp32"; backend: "triton" or "tilelang".
        timeout: seconds; TileLang takes some ten for each kernel that it has not built before.

    Raises:
        UnsupportedCase: another backend, no compiler for this one here, or sizes that make no call; it says which.
    """
    if backend not in BACKENDS:
        raise UnsupportedCase(f"{backend} runs PyTorch's own kernels: there is nothing of this project's to show")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else CAPABILITY
    what = [op, dict(dims), dtype, backend, backward, list(capability)]
    command = [sys.executable, "-m", "harness.generated", json.dumps(what)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise UnsupportedCase(f"compiling took longer than {timeout:.0f} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["the compiling process died"]
        raise UnsupportedCase(lines[-1])
    return [Generated(**each) for each in json.loads(done.stdout.strip().splitlines()[-1])]


def as_html(
    kernels: Sequence[Generated], *, only: Sequence[str] = ("TTGIR", "PTX", "CUDA"), most: int | None = None
) -> str:
    """The kernels as a table, and their code of the kinds in `only` folded away beneath it, `most` characters of each."""
    head = "".join(f"<th scope=col>{name}</th>" for name in _NAMES)
    lines = []
    for each in kernels:
        cells = (each.launches, each.registers, each.spilled_bytes, each.shared_bytes)
        numbers = "".join(f"<td>{'–' if cell is None else cell}</td>" for cell in cells)
        lines.append(f"<tr><th scope=row>{html.escape(each.name)}</th>{numbers}</tr>")
    folded = [
        f"<details><summary>{html.escape(each.name)}: {name}</summary>"
        f'<pre tabindex="0" style="max-height: 30em; overflow: auto">{html.escape(_cut(text, most))}</pre></details>'
        for each in kernels
        for name, text in each.code.items()
        if name in only
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{''.join(folded)}"


def _cut(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    kept = text[:most].rpartition("\n")[0]
    return f"{kept}\n… and {text.count(chr(10)) - kept.count(chr(10))} lines more"


def fused_op(op: str) -> FusedOp:
    """The plumbing behind an op's public function."""
    package = importlib.import_module(f"kernels.{ops()[op].family}")
    return next(value for value in vars(package).values() if isinstance(value, FusedOp) and value.name == op)


def _hosts(op: str, backend: str) -> tuple[FusedOp, Callable[..., Any], Callable[..., Any]]:
    """An op's plumbing, and its backend's host code of both directions."""
    fused = fused_op(op)
    module = importlib.import_module(f"{fused.package}.{backend}_impl")
    return fused, getattr(module, f"{fused.stem}_forward"), getattr(module, f"{fused.stem}_backward")


def _call(op: str, dims: Dims, dtype: torch.dtype, backend: str, backward: bool) -> None:
    """The op's host code on tensors that have a shape and a dtype but no data."""
    fused, forward, back = _hosts(op, backend)
    shapes = ops()[op].shapes(dims)
    # An optional tensor that the op's cases leave out is absent here too.
    tensors = [torch.empty(shapes[arg], dtype=dtype, device="meta") if arg in shapes else None for arg in fused.args]
    scalars = [ops()[op].kwargs.get(name, 0.0) for name in fused.scalars]
    needs = tuple(backward and tensor is not None for tensor in tensors)
    out, saved = forward(*tensors, *scalars, base=None, out_dtype=dtype, needs=needs)
    if backward:
        back(torch.empty_like(out), *tensors, *scalars, saved=saved, needs=needs)


def _patch(replaced: Mapping[str, Any]) -> None:
    """Puts stand-ins in place of what host code asks about the card, wherever it was imported to."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for attribute, value in replaced.items():
                if hasattr(module, attribute):
                    setattr(module, attribute, value)


class _Card:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, capability: Sequence[int]) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _with_triton(run: Callable[[], None], capability: Sequence[int]) -> list[Generated]:
    import triton
    from triton.runtime import driver

    driver.set_active(_Card(capability))
    compile_run = triton.JITFunction.run
    found: dict[str, list[Any]] = {}

    def compiled_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_run(self, *args, grid=grid, warmup=True, **options)
        found.setdefault(kernel.hash, [kernel, 0])[1] += 1
        return kernel

    triton.JITFunction.run = compiled_only
    run()
    made = []
    for kernel, launches in found.values():
        registers, spilled, _ = _resources(kernel.asm["ptx"])
        # Half of it says which source line an operation comes from.
        ttgir = re.sub(
            r"^#loc.*\n| loc\(#?[^()]*(\([^()]*\))?[^()]*\)", "", str(kernel.asm["ttgir"]), flags=re.MULTILINE
        )
        code = {"TTGIR": ttgir, "PTX": str(kernel.asm["ptx"])}
        made.append(Generated(kernel.metadata.name, launches, registers, spilled, kernel.metadata.shared, code))
    return made


def _resources(ptx: str) -> tuple[int | None, int | None, int | None]:
    """Registers a thread, bytes spilled and static shared bytes a block, as an assembler reports them."""
    found = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    arch = found[1] if found else "sm_90a"
    for assembler in _assemblers():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(ptx, encoding="utf-8")
            command = [assembler, "-v", f"--gpu-name={arch}", str(source), "-o", str(source.with_suffix(".cubin"))]
            done = subprocess.run(command, capture_output=True, text=True)
        if not done.returncode:
            patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
            numbers = [re.search(pattern, done.stderr) for pattern in patterns]
            registers, spilled, shared = (int(number[1]) if number else None for number in numbers)
            return registers, spilled, shared or 0
    return None, None, None


def _assemblers() -> Iterator[str]:
    """The assembler on the path and the one that Triton brings along: an older one refuses newer code."""
    if (found := shutil.which("ptxas")) is not None:
        yield found
    if find_spec("triton") is not None:
        from triton.backends.nvidia.compiler import get_ptxas

        yield get_ptxas(10 * CAPABILITY[0] + CAPABILITY[1]).path


def _with_tilelang(run: Callable[[], None], capability: Sequence[int]) -> list[Generated]:
    from kernels.common.tilelang_target import Target, compiled

    major, minor = capability
    target = Target(f"sm_{major}{minor}{'a' if major >= 9 else ''}")
    found: dict[Any, int] = {}

    def build(factory: Callable[..., Any], target: Target, **constants: Any) -> Callable[..., None]:
        key = (factory, target, *constants.items())

        def launch(*args: Any) -> None:
            found[key] = found.get(key, 0) + 1

        return launch

    _patch({"build": build, "target_of": lambda tensor: target})
    run()
    made = []
    for (factory, _, *constants), launches in found.items():
        kernel = compiled(factory, target, **dict(constants))
        with tempfile.TemporaryDirectory() as folder:
            kernel.export_ptx(str(Path(folder) / "kernel.ptx"))
            ptx = (Path(folder) / "kernel.ptx").read_text(encoding="utf-8")
        registers, spilled, static = _resources(ptx)
        source = kernel.get_kernel_source(kernel_only=True)
        # What a launch adds to the static shared memory stands in the host's code.
        asked = re.search(r"extern __shared__", source) is not None
        code = {"CUDA": source, "PTX": ptx}
        made.append(Generated(factory.__name__, launches, registers, spilled, None if asked else static, code))
    return made


def main() -> None:
    """Compiles what the first argument says, and prints the kernels as one line of JSON."""
    from harness.stamp import DTYPES

    op, dims, dtype, backend, backward, capability = json.loads(sys.argv[1])
    _hosts(op, backend)
    _patch({"sm_count": lambda device: SMS})
    compile_with = _with_triton if backend == "triton" else _with_tilelang
    made = compile_with(lambda: _call(op, dims, DTYPES[dtype], backend, backward), capability)
    print(json.dumps([asdict(each) for each in made]))


if __name__ == "__main__":
    main()
