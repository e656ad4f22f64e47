"""Compiles an op's Triton kernels for a Hopper card with each argument in turn the only one that wants a gradient.

`python triton_builds.py OP`, in a process of its own: where Triton interprets it compiles nothing. What a backward does not
read is None to its kernels, which the interpreter forgives and the compiler does not. Prints how many backwards compiled.
"""

from __future__ import annotations

import sys

import torch

from harness import generated
from kernels.common.plans import unread
from kernels.registry import ops

# Optional arguments, which the ops' own cases leave out.
EXTRA = {
    "lokr": {"w1": (6, 3), "w1_b": (3, 8), "w2": (8, 4), "w2_b": (4, 10)},
    "lokr_bypass": {"x": (7, 80), "w1": (6, 3), "w1_b": (3, 8), "w2": (8, 4), "w2_b": (4, 10)},
    "oft": {"blocks": (4, 8, 8), "weight": (32, 40), "rescale": (32,)},
    "oft_bypass": {"blocks": (4, 8, 8), "y": (7, 32), "rescale": (32,)},
}


def main(name: str) -> None:
    op = ops()[name]
    fused, forward, backward = generated._hosts(name, "triton")
    generated._patch({"sm_count": lambda device: generated.SMS})
    scalars = [op.kwargs.get(scalar, 0.0) for scalar in fused.scalars]
    count = 0

    def compile_all() -> None:
        nonlocal count
        for shapes in (op.shapes(op.tiny.dims), *([EXTRA[name]] if name in EXTRA else [])):
            tensors = tuple(torch.empty(shapes[arg], device="meta") if arg in shapes else None for arg in fused.args)
            for trained in shapes:
                needs = tuple(arg == trained for arg in fused.args)
                options = {"base": None, "out_dtype": torch.float32, "needs": needs}
                out, saved = forward(*tensors, *scalars, **options)
                reads = fused._reads(needs, tensors, tuple(scalars))
                read = tuple(
                    t if t is None or wanted else unread(tuple(t.shape), t.dtype, t.device)
                    for t, wanted in zip(tensors, reads, strict=True)
                )
                backward(torch.empty_like(out), *read, *scalars, saved=saved, needs=needs)
                count += 1

    generated._with_triton(compile_all, generated.CAPABILITY)
    print(count)


if __name__ == "__main__":
    main(sys.argv[1])
