"""LoKr's entry in the registry: its two ops, their cases, inputs and costs."""

from __future__ import annotations

from kernels import lokr
from kernels.lokr.reference import bypass_reference, factorization, merge_reference
from kernels.registry import LINEAR_SHAPES, TOKENS, Case, Dims, Op, linear_cases

_O, _I = LINEAR_SHAPES["llm_qkv"]
FACTORS = (-1, 8)
# A multiply that every arm has to do, and that rounds nothing.
_SCALE = 0.5


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
        kwargs={"scale": _SCALE},
        fan_in=lambda d: {"w1": _factors(d)["w1"][1], "w2": _factors(d)["w2"][1]},
    ),
)
