"""Compiles an op's Triton kernels for a Hopper card, and looks at what the interpreter cannot show.

`python triton_builds.py OP`, in a process of its own: where Triton interprets it compiles nothing. Prints how many backwards
compiled; fails where one does not, or where a kernel sums over lanes that Triton 3.6 mistakes.

A base of a wider dtype makes the output as wide, with pointers of two dtypes in one kernel, which only the compiler minds.
What a backward does not read is None to its kernels, which the interpreter forgives and the compiler does not: so each argument
in turn is the only one that wants a gradient, and then all do.
"""

from __future__ import annotations

import ast
import re
import sys

import torch
from torch import Tensor

from harness import generated
from kernels.common.plans import unread
from kernels.registry import ops

Shapes = dict[str, tuple[int, ...]]
_FULL: Shapes = {"w1": (6, 8), "w2": (8, 10)}
_PAIR1: Shapes = {"w1": (6, 3), "w1_b": (3, 8)}
_PAIR2: Shapes = {"w2": (8, 4), "w2_b": (4, 10)}
_KRONECKER: list[Shapes] = [{**_PAIR1, "w2": (8, 10)}, {"w1": (6, 8), **_PAIR2}, {**_PAIR1, **_PAIR2}]
# Optional arguments, which the ops' own cases leave out.
EXTRA: dict[str, list[Shapes]] = {
    "lokr": _KRONECKER,
    "lokr_bypass": [{"x": (7, 80), **kind} for kind in _KRONECKER],
    "oft": [{"blocks": (4, 8, 8), "weight": (32, 40), "rescale": (32,)}],
    "oft_bypass": [{"blocks": (4, 8, 8), "y": (7, 32), "rescale": (32,)}],
}
# Factors whose w2, in these strides, had a product with G whose sum lay on lanes that are no neighbours.
STRIDED: dict[str, list[tuple[Shapes, tuple[int, int]]]] = {
    "lokr": [
        (_FULL, (1, 8)),
        ({"w1": (4, 4), "w2": (16, 16)}, (1, 16)),
        ({"w1": (4, 4), "w2": (16, 16)}, (32, 2)),
        ({"w1": (16, 2), "w2": (3, 64)}, (1, 3)),
        ({"w1": (16, 2), "w2": (3, 64)}, (128, 2)),
    ]
}


def split_lanes(ttgir: str) -> list[str]:
    """Sources of reductions over an axis that lies on lanes which are not neighbours, such as lanes 1 and 16 apart.

    Only linear layouts can have such an axis; an axis of a blocked one, or of a product's, has its lanes in one run.
    """
    linear = dict(re.findall(r"^#(\w+) = #ttg\.linear<\{.*?lane = (\[\[.*?\]\])", ttgir, re.MULTILINE))
    found = []
    for axis, source in re.findall(
        r'"tt\.reduce"\([^)]*\) <\{axis = (\d+).*?\}\) : \(tensor<([^>]*)>', ttgir, re.DOTALL
    ):
        lanes = linear.get(source.rpartition("#")[2])
        bits = [bit for bit, base in enumerate(ast.literal_eval(lanes or "[]")) if base[int(axis)]]
        if bits and bits[-1] - bits[0] >= len(bits):
            found.append(source)
    return found


def main(name: str) -> None:
    op = ops()[name]
    fused, forward, backward = generated._hosts(name, "triton")
    generated._patch({"sm_count": lambda device: generated.SMS})
    scalars = [op.kwargs.get(scalar, 0.0) for scalar in fused.scalars]
    count = 0

    def compile_with_base(shapes: Shapes) -> None:
        made = (
            torch.empty(shapes[arg], dtype=torch.bfloat16, device="meta") if arg in shapes else None
            for arg in fused.args
        )
        base = torch.empty(op.out_shape(op.tiny.dims), device="meta")
        forward(*made, *scalars, base=base, out_dtype=torch.float32, needs=(False,) * len(fused.args))

    def compile_one(tensors: tuple[Tensor | None, ...], trained: tuple[str, ...]) -> None:
        nonlocal count
        needs = tuple(arg in trained for arg in fused.args)
        dtype = next(t.dtype for t in tensors if t is not None)
        out, saved = forward(*tensors, *scalars, base=None, out_dtype=dtype, needs=needs)
        reads = fused._reads(needs, tensors, tuple(scalars))
        read = tuple(
            t if t is None or wanted else unread(tuple(t.shape), t.dtype, t.device)
            for t, wanted in zip(tensors, reads, strict=True)
        )
        backward(torch.empty_like(out), *read, *scalars, saved=saved, needs=needs)
        count += 1

    def compile_all() -> None:
        compile_with_base(op.shapes(op.tiny.dims))
        for shapes in (op.shapes(op.tiny.dims), *EXTRA.get(name, [])):
            tensors = tuple(torch.empty(shapes[arg], device="meta") if arg in shapes else None for arg in fused.args)
            for trained in (*((arg,) for arg in shapes), tuple(shapes)):
                compile_one(tensors, trained)
        for shapes, strides in STRIDED.get(name, []):
            for dtype in (torch.float32, torch.float16):
                made = {arg: torch.empty(shape, dtype=dtype, device="meta") for arg, shape in shapes.items()}
                made["w2"] = torch.empty_strided(shapes["w2"], strides, dtype=dtype, device="meta")
                compile_one(tuple(made.get(arg) for arg in fused.args), tuple(made))

    for kernel in generated._with_triton(compile_all, generated.CAPABILITY):
        wrong = split_lanes(kernel.code["TTGIR"])
        if wrong:
            raise SystemExit(f"{kernel.name} sums over lanes that are not neighbours: {', '.join(wrong)}")
    print(count)


if __name__ == "__main__":
    main(sys.argv[1])
