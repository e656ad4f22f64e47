"""Diag-OFT's entry in the registry: its two ops, their cases, inputs and costs."""

from __future__ import annotations

from kernels import oft
from kernels.common.factorization import factorization
from kernels.oft.reference import bypass_reference, merge_reference
from kernels.registry import LINEAR_SHAPES, Case, Dims, Op, linear_cases

_SHAPES = {name: LINEAR_SHAPES[name] for name in ("sdxl_attn", "sdxl_attn_xl", "sdxl_ff_in", "sdxl_ff_out")}
_O = LINEAR_SHAPES["sdxl_attn_xl"][0]


def _blocks(d: Dims) -> tuple[int, int, int]:
    size, count = factorization(d["O"], d["dim"])
    return count, size, size


def _cayley_flops(d: Dims) -> tuple[int, int]:
    """Solving (I - Q) D = 2 Q per block, and for the gradient two more products of blocks."""
    count, size, _ = _blocks(d)
    solve = count * 8 * size**3 // 3
    return solve, solve + count * 4 * size**3


def _flops(d: Dims, columns: int) -> tuple[int, int]:
    cayley, both = _cayley_flops(d)
    product = 2 * d["O"] * columns * _blocks(d)[1]
    return cayley + product, both + 3 * product


# Blocks of this variance give entries of Q around 0.2: a rotation well away from I, as after training.
_FAN_IN = {"blocks": 50}

OPS = (
    Op(
        name="oft",
        family="oft",
        call=oft.merge,
        oracle=merge_reference,
        args=("blocks", "weight"),
        shapes=lambda d: {"blocks": _blocks(d), "weight": (d["O"], d["I"])},
        out_shape=lambda d: (d["O"], d["I"]),
        flops=lambda d: _flops(d, d["I"]),
        cases=linear_cases("d", "dim", (4, 16), _SHAPES),
        quick=Case("quick", {"O": 1280, "I": 1280, "dim": 16}),
        tiny=Case("tiny", {"O": 48, "I": 80, "dim": 4}),
        odd=(
            Case("i1", {"O": 12, "I": 1, "dim": 3}),
            Case("s5_i37", {"O": 35, "I": 37, "dim": 5}),
            Case("s12_i70", {"O": 144, "I": 70, "dim": 12}),
            Case("s16_i300", {"O": 272, "I": 300, "dim": 16}),
        ),
        fan_in=lambda d: _FAN_IN,
    ),
    Op(
        name="oft_bypass",
        family="oft",
        call=oft.bypass,
        oracle=bypass_reference,
        args=("y", "blocks"),
        shapes=lambda d: {"y": (d["T"], d["O"]), "blocks": _blocks(d)},
        out_shape=lambda d: (d["T"], d["O"]),
        flops=lambda d: _flops(d, d["T"]),
        cases=tuple(Case(f"c1280_t{t}", {"O": _O, "dim": 16, "T": t}) for t in (77, 1024, 4096)),
        quick=Case("quick", {"O": 1280, "dim": 16, "T": 512}),
        tiny=Case("tiny", {"O": 48, "dim": 4, "T": 24}),
        odd=(
            Case("s3_t1", {"O": 12, "dim": 3, "T": 1}),
            Case("s5_t7", {"O": 35, "dim": 5, "T": 7}),
            Case("s12_t70", {"O": 144, "dim": 12, "T": 70}),
            Case("s16_t150", {"O": 272, "dim": 16, "T": 150}),
        ),
        fan_in=lambda d: _FAN_IN,
    ),
)
