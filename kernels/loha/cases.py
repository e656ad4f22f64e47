"""LoHa's entry in the registry: its two ops, their cases, inputs and costs."""

from __future__ import annotations

from kernels import loha
from kernels.loha.reference import bypass_reference, merge_reference
from kernels.registry import LINEAR_SHAPES, RANKS, TOKENS, Case, Dims, Op, linear_cases

_O, _I = LINEAR_SHAPES["dit_qkv"]
# A multiply that every arm has to do, and that rounds nothing.
_SCALE = 0.5
# (O, I, R): ranks that were reported to break a kernel, at sizes that no tile divides, and tokens for the bypass, whose
# form changes between ranks 16 and 17.
_ODD = ((1, 1, 1), (37, 229, 1), (96, 48, 8), (131, 192, 24), (53, 101, 33), (65, 129, 64))
_ODD_TOKENS = ((1, 1, 1, 1), (37, 229, 1, 7), (229, 67, 12, 65), (131, 48, 24, 7), (53, 101, 33, 19))


def _factor_shapes(d: Dims) -> dict[str, tuple[int, ...]]:
    up, down = (d["O"], d["R"]), (d["R"], d["I"])
    return {"up1": up, "down1": down, "up2": up, "down2": down}


def _merge_flops(d: Dims) -> tuple[int, int]:
    """Two rank-R products and their Hadamard product; backward, four rank-R products and two Hadamard products."""
    size = d["O"] * d["I"]
    product = 2 * size * d["R"]
    return 2 * product + size, 6 * product + 3 * size


def _bypass_flops(d: Dims) -> tuple[int, int]:
    """The cheaper of the two forms: x against ΔW, or x against the R² pairs of rows of down1 and down2, then up."""
    merge, merge_both = _merge_flops(d)
    dense = 2 * d["T"] * d["O"] * d["I"]
    pairs = 2 * d["T"] * (d["O"] + d["I"]) * d["R"] ** 2
    return min(dense + merge, pairs), min(3 * dense + merge_both, 3 * pairs)


OPS = (
    Op(
        name="loha",
        family="loha",
        call=loha.merge,
        oracle=merge_reference,
        args=("up1", "down1", "up2", "down2"),
        shapes=_factor_shapes,
        out_shape=lambda d: (d["O"], d["I"]),
        flops=_merge_flops,
        cases=linear_cases("r", "R", RANKS),
        quick=Case("quick", {"O": 1280, "I": 1280, "R": 16}),
        tiny=Case("tiny", {"O": 48, "I": 80, "R": 4}),
        odd=tuple(Case(f"r{r}_i{i}", {"O": o, "I": i, "R": r}) for o, i, r in _ODD),
        kwargs={"scale": _SCALE},
        fan_in=lambda d: {"down1": d["R"], "down2": d["R"]},
    ),
    Op(
        name="loha_bypass",
        family="loha",
        call=loha.bypass,
        oracle=bypass_reference,
        args=("x", "up1", "down1", "up2", "down2"),
        shapes=lambda d: {"x": (d["T"], d["I"]), **_factor_shapes(d)},
        out_shape=lambda d: (d["T"], d["O"]),
        flops=_bypass_flops,
        cases=tuple(Case(f"dit_qkv_t{t}", {"O": _O, "I": _I, "R": 16, "T": t}) for t in TOKENS),
        quick=Case("quick", {"O": 1280, "I": 1280, "R": 16, "T": 512}),
        tiny=Case("tiny", {"O": 48, "I": 80, "R": 4, "T": 24}),
        odd=tuple(Case(f"r{r}_t{t}", {"O": o, "I": i, "R": r, "T": t}) for o, i, r, t in _ODD_TOKENS),
        kwargs={"scale": _SCALE},
        fan_in=lambda d: {"x": d["I"], "down1": d["R"], "down2": d["R"]},
    ),
)
