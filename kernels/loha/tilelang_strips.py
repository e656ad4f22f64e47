"""LoHa's merge backward in TileLang for small ranks, by the steps of triton_strips.py: G is read once.

A block walks down a strip of G, `subs` tiles wide, and makes both products of a tile before it waits for either. What it
sums for up is written once a strip and step, what it sums for down stays in registers to the end of the walk.

A factory in the sense of `kernels.common.tilelang_target`.
"""

from typing import Any

from kernels.common.tilelang_target import Dsl, Size
from kernels.loha.tilelang_products import landed, product


def operands(
    dsl: Dsl, value1: Any, value2: Any, operand1: Any, operand2: Any, row_top: Any, row_top2: Any, top: Any, inverse: Any
) -> Any:  # fmt: skip
    """Both float32 tiles as operands in shared memory; top[0] undoes their scaling (see `to_operand`), for float16."""
    T = dsl.T
    rows, cols = value1.shape

    @T.macro
    def scaled(value1, value2, operand1, operand2, row_top, row_top2, top, inverse):  # type: ignore[no-untyped-def]
        # One maximum for both: it is a wait for all warps.
        T.reduce_absmax(value1, row_top, dim=1)
        T.reduce_absmax(value2, row_top2, dim=1)
        for m in dsl.parallel(rows):
            row_top[m] = T.max(row_top[m], row_top2[m])
        T.reduce_max(row_top, top, dim=0)
        top[0] = T.reinterpret(T.reinterpret(T.max(T.min(top[0], 1e38), 16384.0), "int32") & 0x7F800000, "float32")
        inverse[0] = T.reinterpret(0x7F000000 - T.reinterpret(top[0], "int32"), "float32") * 16384.0
        top[0] = top[0] * (1.0 / 16384.0)
        for m, n in dsl.parallel(rows, cols):
            operand1[m, n] = value1[m, n] * inverse[0]
        for m, n in dsl.parallel(rows, cols):
            operand2[m, n] = value2[m, n] * inverse[0]

    @T.macro
    def cast(value1, value2, operand1, operand2):  # type: ignore[no-untyped-def]
        T.copy(value1, operand1)
        T.copy(value2, operand2)

    if operand1.dtype == "float16":
        return scaled(value1, value2, operand1, operand2, row_top, row_top2, top, inverse)
    return cast(value1, value2, operand1, operand2)


def strip_backward(dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, config: Any) -> Any:
    """up_parts[strip, 1 and 2, O, R] and down_parts[span, 1 and 2, R, I] from ΔW's gradient g[O, I]."""
    T = dsl.T
    O, I, R = T.dynamic("O"), dsl.size("I", I), dsl.size("R", R)
    ups, downs = T.dynamic("ups"), T.dynamic("downs")
    BLOCK_O, BLOCK_I, SPAN, SUBS = config.block_o, config.block_i, config.span, config.subs
    scaled = dtype == "float16"

    @T.macro
    def add(acc, added, top):  # type: ignore[no-untyped-def]
        for m, r in dsl.parallel(acc.shape[0], BLOCK_R):
            acc[m, r] += added[m, r] * top[0]

    @T.macro
    def store_down(acc, down_parts, part, col):  # type: ignore[no-untyped-def]
        for i, r in dsl.parallel(BLOCK_I, BLOCK_R):
            if r < R and col + i < I:
                down_parts[part, r, col + i] = acc[i, r]

    @T.macro
    def tile_shares(g_tile, first, u1, u2, d1, d2, up_sum1, up_sum2, sum1, sum2, operand1, operand2):  # type: ignore[no-untyped-def]
        value1 = dsl.fragment((BLOCK_O, BLOCK_I))
        value2 = dsl.fragment((BLOCK_O, BLOCK_I))
        row_top = dsl.fragment((BLOCK_O,))
        row_top2 = dsl.fragment((BLOCK_O,))
        top = dsl.fragment((1,))
        inverse = dsl.fragment((1,))
        product(dsl, u2, d2, value1, clear=True, wait=False)
        product(dsl, u1, d1, value2, clear=True)
        landed(dsl, value1, config.threads)
        for m, n in dsl.parallel(BLOCK_O, BLOCK_I):
            value1[m, n] *= T.cast(g_tile[m, first + n], "float32")
        for m, n in dsl.parallel(BLOCK_O, BLOCK_I):
            value2[m, n] *= T.cast(g_tile[m, first + n], "float32")
        operands(dsl, value1, value2, operand1, operand2, row_top, row_top2, top, inverse)
        if scaled:
            up1 = dsl.fragment((BLOCK_O, BLOCK_R))
            up2 = dsl.fragment((BLOCK_O, BLOCK_R))
            down1 = dsl.fragment((BLOCK_I, BLOCK_R))
            down2 = dsl.fragment((BLOCK_I, BLOCK_R))
            product(dsl, operand1, d1, up1, clear=True, transpose_b=True, wait=False)
            product(dsl, operand2, d2, up2, clear=True, transpose_b=True, wait=False)
            product(dsl, operand1, u1, down1, clear=True, transpose_a=True, wait=False)
            product(dsl, operand2, u2, down2, clear=True, transpose_a=True)
            landed(dsl, up1, config.threads)
            landed(dsl, up2, config.threads)
            landed(dsl, down1, config.threads)
            add(up_sum1, up1, top)
            add(up_sum2, up2, top)
            add(sum1, down1, top)
            add(sum2, down2, top)
        else:
            product(dsl, operand1, d1, up_sum1, transpose_b=True, wait=False)
            product(dsl, operand2, d2, up_sum2, transpose_b=True, wait=False)
            product(dsl, operand1, u1, sum1, transpose_a=True, wait=False)
            product(dsl, operand2, u2, sum2, transpose_a=True)
            landed(dsl, up_sum1, config.threads)
            landed(dsl, up_sum2, config.threads)
            landed(dsl, sum1, config.threads)

    @T.prim_func
    def kernel(
        g: T.Tensor((O, I), dtype),
        up1: T.Tensor((O, R), dtype),
        down1: T.Tensor((R, I), dtype),
        up2: T.Tensor((O, R), dtype),
        down2: T.Tensor((R, I), dtype),
        up_parts: T.Tensor((ups, O, R), "float32"),
        down_parts: T.Tensor((downs, R, I), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_I * SUBS), T.ceildiv(O, SPAN), threads=config.threads) as (pid_i, pid_s):
            u1 = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            u2 = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            d1a = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            d2a = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            g_tile = dsl.shared((BLOCK_O, BLOCK_I * SUBS), dtype)
            if not dsl.cpu and dtype != "float32":
                dsl.swizzle(g_tile)
            operand1 = dsl.shared((BLOCK_O, BLOCK_I), dtype)
            operand2 = dsl.shared((BLOCK_O, BLOCK_I), dtype)
            up_sum1 = dsl.fragment((BLOCK_O, BLOCK_R))
            up_sum2 = dsl.fragment((BLOCK_O, BLOCK_R))
            sum1a = dsl.fragment((BLOCK_I, BLOCK_R))
            sum2a = dsl.fragment((BLOCK_I, BLOCK_R))
            col = pid_i * (BLOCK_I * SUBS)
            T.copy(down1[0, col], d1a)
            T.copy(down2[0, col], d2a)
            T.clear(sum1a)
            T.clear(sum2a)
            if SUBS == 2:
                d1b = dsl.shared((BLOCK_R, BLOCK_I), dtype)
                d2b = dsl.shared((BLOCK_R, BLOCK_I), dtype)
                sum1b = dsl.fragment((BLOCK_I, BLOCK_R))
                sum2b = dsl.fragment((BLOCK_I, BLOCK_R))
                T.copy(down1[0, col + BLOCK_I], d1b)
                T.copy(down2[0, col + BLOCK_I], d2b)
                T.clear(sum1b)
                T.clear(sum2b)
            for step in dsl.pipelined(SPAN // BLOCK_O, config.stages):
                o = pid_s * SPAN + step * BLOCK_O
                T.copy(g[o, col], g_tile)
                T.copy(up1[o, 0], u1)
                T.copy(up2[o, 0], u2)
                # A loop, so that the pipeline refills no tile before the products that read it are waited for.
                for _ in T.serial(T.min(O, 1)):
                    T.clear(up_sum1)
                    T.clear(up_sum2)
                    tile_shares(g_tile, 0, u1, u2, d1a, d2a, up_sum1, up_sum2, sum1a, sum2a, operand1, operand2)
                    if SUBS == 2:
                        tile_shares(
                            g_tile, BLOCK_I, u1, u2, d1b, d2b, up_sum1, up_sum2, sum1b, sum2b, operand1, operand2
                        )
                T.copy(up_sum1, up_parts[pid_i * 2, o, 0])
                T.copy(up_sum2, up_parts[pid_i * 2 + 1, o, 0])
            store_down(sum1a, down_parts, pid_s * 2, col)
            store_down(sum2a, down_parts, pid_s * 2 + 1, col)
            if SUBS == 2:
                store_down(sum1b, down_parts, pid_s * 2, col + BLOCK_I)
                store_down(sum2b, down_parts, pid_s * 2 + 1, col + BLOCK_I)

    return kernel
