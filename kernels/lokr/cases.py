"""LoKr's entry in the registry: its two ops, their cases, inputs and costs."""

from __future__ import annotations

from kernels import lokr
from kernels.common.factorization import factorization
from kernels.lokr.reference import bypass_reference, merge_reference
from kernels.registry import LINEAR_SHAPES, TOKENS, Case, Dims, Op, linear_cases

_O, _I = LINEAR_SHAPES["llm_qkv"]
FACTORS = (-1, 8)
# A multiply that every arm has to do, and that rounds nothing.
_SCALE = 0.5
# (O, I, factor): primes, which are left whole; widths that no vector divides; w1 the larger factor's equal.
_ODD = ((1, 1, -1), (127, 131, -1), (30, 42, -1), (96, 40, 8), (64, 320, 8), (25, 1, -1), (192, 229, 8), (53, 72, -1))
_ODD_TOKENS = (1, 7, 19, 5, 3, 7, 2, 33)


def _factors(d: Dims) -> dict[str, tuple[int, ...]]:
    """Shapes of both factors: w1 holds the smaller parts of O and I, w2 the larger ones."""
    (a, c), (b, k) = factorization(d["O"], d["factor"]), factorization(d["I"], d["factor"])
    return {"w1": (a, b), "w2": (c, k)}


def _merge_flops(d: Dims) -> tuple[int, int]:
    size = d["O"] * d["I"]
    return size, 5 * size


def _bypass_flops(d: Dims) -> tuple[int, int]:
    (a, b), (c, k) = _factors(d).values()
    product = 2 * d["T"] * min(b * c * (k + a), a * k * (b + c))
    return product, 3 * product


OPS = (
    Op(
        name="lokr",
        family="lokr",
        call=lokr.merge,
        oracle=merge_reference,
        args=("w1", "w2"),
        shapes=_factors,
        out_shape=lambda d: (d["O"], d["I"]),
        flops=_merge_flops,
        cases=linear_cases("f", "factor", FACTORS),
        quick=Case("quick", {"O": 1280, "I": 1280, "factor": -1}),
        tiny=Case("tiny", {"O": 48, "I": 80, "factor": -1}),
        odd=tuple(Case(f"{o}x{i}", {"O": o, "I": i, "factor": f}) for o, i, f in _ODD),
        kwargs={"scale": _SCALE},
    ),
    Op(
        name="lokr_bypass",
        family="lokr",
        call=lokr.bypass,
        oracle=bypass_reference,
        args=("x", "w1", "w2"),
        shapes=lambda d: {"x": (d["T"], d["I"]), **_factors(d)},
        out_shape=lambda d: (d["T"], d["O"]),
        flops=_bypass_flops,
        cases=tuple(Case(f"llm_qkv_t{t}", {"O": _O, "I": _I, "factor": -1, "T": t}) for t in TOKENS),
        quick=Case("quick", {"O": 1280, "I": 1280, "factor": -1, "T": 512}),
        tiny=Case("tiny", {"O": 48, "I": 80, "factor": -1, "T": 24}),
        odd=tuple(
            Case(f"{o}x{i}", {"O": o, "I": i, "factor": f, "T": t})
            for (o, i, f), t in zip(_ODD, _ODD_TOKENS, strict=True)
        ),
        kwargs={"scale": _SCALE},
        fan_in=lambda d: {"w1": _factors(d)["w1"][1], "w2": _factors(d)["w2"][1]},
    ),
)
