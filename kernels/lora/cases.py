"""LoRA's entry in the registry: its two ops, their cases, inputs and costs."""

from __future__ import annotations

from kernels import lora
from kernels.lora.reference import bypass_reference, merge_reference
from kernels.registry import LINEAR_SHAPES, RANKS, TOKENS, Case, Dims, Op, linear_cases

_O, _I = LINEAR_SHAPES["dit_qkv"]
# A multiply that every arm has to do, and that rounds nothing.
_SCALE = 0.5
# (O, I, R): every rank that was reported to break a kernel, at sizes that no tile divides.
_ODD = ((1, 1, 1), (37, 229, 1), (192, 24, 4), (96, 48, 8), (229, 67, 12), (131, 192, 24), (53, 101, 33), (65, 129, 64))
_ODD_TOKENS = (1, 7, 1, 16, 65, 7, 33, 19)


def _merge_flops(d: Dims) -> tuple[int, int]:
    product = 2 * d["O"] * d["I"] * d["R"]
    return product, 3 * product


def _bypass_flops(d: Dims) -> tuple[int, int]:
    product = 2 * d["T"] * d["R"] * (d["I"] + d["O"])
    return product, 3 * product


OPS = (
    Op(
        name="lora",
        family="lora",
        call=lora.merge,
        oracle=merge_reference,
        args=("up", "down"),
        shapes=lambda d: {"up": (d["O"], d["R"]), "down": (d["R"], d["I"])},
        out_shape=lambda d: (d["O"], d["I"]),
        flops=_merge_flops,
        cases=linear_cases("r", "R", RANKS),
        quick=Case("quick", {"O": 1280, "I": 1280, "R": 16}),
        tiny=Case("tiny", {"O": 48, "I": 80, "R": 4}),
        odd=tuple(Case(f"r{r}", {"O": o, "I": i, "R": r}) for o, i, r in _ODD),
        kwargs={"scale": _SCALE},
        fan_in=lambda d: {"down": d["R"]},
    ),
    Op(
        name="lora_bypass",
        family="lora",
        call=lora.bypass,
        oracle=bypass_reference,
        args=("x", "up", "down"),
        shapes=lambda d: {"x": (d["T"], d["I"]), "up": (d["O"], d["R"]), "down": (d["R"], d["I"])},
        out_shape=lambda d: (d["T"], d["O"]),
        flops=_bypass_flops,
        cases=tuple(Case(f"dit_qkv_t{t}", {"O": _O, "I": _I, "R": 16, "T": t}) for t in TOKENS),
        quick=Case("quick", {"O": 1280, "I": 1280, "R": 16, "T": 512}),
        tiny=Case("tiny", {"O": 48, "I": 80, "R": 4, "T": 24}),
        odd=tuple(
            Case(f"r{r}_t{t}", {"O": o, "I": i, "R": r, "T": t}) for (o, i, r), t in zip(_ODD, _ODD_TOKENS, strict=True)
        ),
        kwargs={"scale": _SCALE},
        fan_in=lambda d: {"down": d["I"], "up": d["R"]},
    ),
)
