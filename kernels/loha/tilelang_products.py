"""Products of LoHa's TileLang kernels that are under way together, where the GPU has them (Hopper's wgmma)."""

from typing import Any

from kernels.common.tilelang_target import Dsl


def product(
    dsl: Dsl, a: Any, b: Any, c: Any, *, transpose_a: bool = False, transpose_b: bool = False, tall: bool = False,
    clear: bool = False, wait: bool = True,
) -> Any:  # fmt: skip
    """c = (c +) a @ b, as `Dsl.gemm`; `clear` leaves c out.

    Without `wait` c may be read only after `landed`, which comes after a later product of the same tile shapes that does
    wait; a and b must not be refilled before that. A pipelined loop would do so, unless all of it is one loop of its own.
    """
    T = dsl.T
    if dsl.target.arch != "sm_90a" or a.dtype == "float32":
        return _cleared(dsl)(a, b, c, transpose_a, transpose_b, tall) if clear else dsl.gemm(
            a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, tall=tall
        )  # fmt: skip
    policy = T.GemmWarpPolicy.FullRow if tall else T.GemmWarpPolicy.Square
    options = {} if wait else {"annotations": {"wg_wait": -1}}
    return T.gemm(
        a, b, c, transpose_A=transpose_a, transpose_B=transpose_b, policy=policy, clear_accum=clear, **options
    )


def _cleared(dsl: Dsl) -> Any:
    T = dsl.T

    @T.macro
    def cleared(a, b, c, transpose_a, transpose_b, tall):  # type: ignore[no-untyped-def]
        T.clear(c)
        dsl.gemm(a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, tall=tall)

    return cleared


def landed(dsl: Dsl, tile: Any, threads: int) -> Any:
    """Says that `tile`, which a product without `wait` made, is to be read only from here on."""
    if dsl.target.arch != "sm_90a":
        return dsl.T.evaluate(0)
    return dsl.T.warpgroup_fence_operand(tile, num_regs=tile.shape[0] * tile.shape[1] // threads)
