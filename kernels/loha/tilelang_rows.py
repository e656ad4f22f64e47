"""LoHa's merge backward in TileLang without large partials, by the steps of triton_rows.py: G read once for up, once for down.

A factory in the sense of `kernels.common.tilelang_target`.
"""

from typing import Any

from kernels.common.tilelang_target import Dsl, Size
from kernels.loha.tilelang_products import landed, product


def _in_registers(dsl: Dsl, block_m: int, threads: int, dtype: str) -> bool:
    """Whether the products that feed sums take their left operand from registers: 16 rows a warp, no other way to share."""
    return not dsl.cpu and dtype != "float32" and block_m % (threads // 2) == 0


def row_backward(
    dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, up_split: bool, down_split: bool,
    up_spans: int, up_steps: int, down_steps: int, needs: tuple[bool, ...], config: Any,
) -> Any:  # fmt: skip
    """ups1[span, O, R] and ups2, downs1[span, R, I] and downs2, those that `needs` asks for, each times its scale.

    Where a sum is split, both of a kind are one float32 tensor of partials, in which the second one's follow the first one's.
    A group of blocks walks a span of O for down, and up_rows of up's blocks, about the same rows of G.
    """
    T = dsl.T
    O, I, R = T.dynamic("O"), dsl.size("I", I), dsl.size("R", R)
    ups, downs = T.dynamic("ups"), T.dynamic("downs")
    BLOCK_M, BLOCK_N = config.block_m, config.block_n
    need_up1, need_down1, need_up2, need_down2 = needs
    up_dtype, down_dtype = "float32" if up_split else dtype, "float32" if down_split else dtype
    tall = _in_registers(dsl, BLOCK_M, config.threads, dtype)

    def walk(
        is_up: bool, block: Any, part: Any, span: int, scale: Any, g: Any, left: Any, right: Any, outs: Any
    ) -> Any:
        """The sums over a span of G's columns (`is_up`), or of its rows, for BLOCK_M rows, or columns."""
        need1, need2 = (need_up1, need_up2) if is_up else (need_down1, need_down2)
        split = up_split if is_up else down_split
        count = need1 + need2 if split else 1

        @T.macro
        def load(factor, at, along_rank, tile):  # type: ignore[no-untyped-def]
            if along_rank:
                T.copy(factor[at, 0], tile)
            else:
                T.copy(factor[0, at], tile)

        @T.macro
        def add(value, tile, operand, top, inverse, factor, r_tile, acc):  # type: ignore[no-untyped-def]
            # acc · factor + value @ rᵀ, with the power of two that a row of float16 is divided by, which only grows.
            for m, n in dsl.parallel(BLOCK_M, BLOCK_N):
                value[m, n] *= T.cast(tile[m, n] if is_up else tile[n, m], "float32")
            if dtype == "float16":
                T.reduce_absmax(value, top, dim=1)
                for m in dsl.parallel(BLOCK_M):
                    top[m] = T.max(
                        T.reinterpret(T.reinterpret(T.min(top[m], 1e38), "int32") & 0x7F800000, "float32")
                        * (1.0 / 16384.0),
                        factor[m],
                    )
                for m in dsl.parallel(BLOCK_M):
                    inverse[m] = T.reinterpret(0x7F000000 - T.reinterpret(top[m], "int32"), "float32")
                for m, n in dsl.parallel(BLOCK_M, BLOCK_N):
                    operand[m, n] = value[m, n] * inverse[m]
                for m in dsl.parallel(BLOCK_M):
                    inverse[m] *= factor[m]
                for m, r in dsl.parallel(BLOCK_M, BLOCK_R):
                    acc[m, r] *= inverse[m]
                for m in dsl.parallel(BLOCK_M):
                    factor[m] = top[m]
            else:
                T.copy(value, operand)
            dsl.gemm(operand, r_tile, acc, transpose_b=is_up, tall=tall)

        @T.macro
        def both(
            l1_tile, l2_tile, r1_tile, r2_tile, tile, value, value2, operand, top, inverse, factor1, factor2, acc1, acc2
        ):  # type: ignore[no-untyped-def]
            # Both products before either is waited for.
            sides = {"transpose_a": not is_up, "transpose_b": not is_up, "tall": tall}
            product(dsl, l2_tile, r2_tile, value, clear=True, wait=False, **sides)
            product(dsl, l1_tile, r1_tile, value2, clear=True, **sides)
            landed(dsl, value, config.threads)
            add(value, tile, operand, top, inverse, factor1, r1_tile, acc1)
            add(value2, tile, operand, top, inverse, factor2, r2_tile, acc2)

        @T.macro
        def store(acc, factor, out, at, first):  # type: ignore[no-untyped-def]
            for m, r in dsl.parallel(BLOCK_M, BLOCK_R):
                if is_up:
                    if first + m < O and r < R:
                        out[at, first + m, r] = acc[m, r] * (factor[m] * scale)
                else:
                    if first + m < I and r < R:
                        out[at, r, first + m] = acc[m, r] * (factor[m] * scale)

        @T.macro
        def sums(block, part):  # type: ignore[no-untyped-def]
            l1_tile = dsl.shared((BLOCK_M, BLOCK_R) if is_up else (BLOCK_R, BLOCK_M), dtype)
            l2_tile = dsl.shared((BLOCK_M, BLOCK_R) if is_up else (BLOCK_R, BLOCK_M), dtype)
            r1_tile = dsl.shared((BLOCK_R, BLOCK_N) if is_up else (BLOCK_N, BLOCK_R), dtype)
            r2_tile = dsl.shared((BLOCK_R, BLOCK_N) if is_up else (BLOCK_N, BLOCK_R), dtype)
            tile = dsl.shared((BLOCK_M, BLOCK_N) if is_up else (BLOCK_N, BLOCK_M), dtype)
            value = dsl.fragment((BLOCK_M, BLOCK_N))
            if not dsl.cpu and dtype != "float32":
                dsl.swizzle(tile)
            operand = (dsl.fragment if tall else dsl.shared)((BLOCK_M, BLOCK_N), dtype)
            top, inverse = (dsl.fragment((BLOCK_M,)) for _ in range(2))
            load(left[0], block * BLOCK_M, is_up, l1_tile)
            load(left[1], block * BLOCK_M, is_up, l2_tile)
            # Only what is used: TileLang finds no layout for registers that are merely cleared.
            if need1:
                factor1 = dsl.fragment((BLOCK_M,))
                acc1 = dsl.fragment((BLOCK_M, BLOCK_R))
                T.clear(acc1)
                T.fill(factor1, 1.0)
            if need2:
                factor2 = dsl.fragment((BLOCK_M,))
                acc2 = dsl.fragment((BLOCK_M, BLOCK_R))
                T.clear(acc2)
                T.fill(factor2, 1.0)
            for step in dsl.pipelined(span, config.stages):
                n = (part * span + step) * BLOCK_N
                if is_up:
                    T.copy(g[block * BLOCK_M, n], tile)
                else:
                    T.copy(g[n, block * BLOCK_M], tile)
                load(right[0], n, not is_up, r1_tile)
                load(right[1], n, not is_up, r2_tile)
                if need1 and need2:
                    value2 = dsl.fragment((BLOCK_M, BLOCK_N))
                    # A loop, so that the pipeline refills no tile before the products that read it are waited for.
                    for _ in T.serial(T.min(O, 1)):
                        both(
                            l1_tile, l2_tile, r1_tile, r2_tile, tile, value, value2, operand, top, inverse,
                            factor1, factor2, acc1, acc2,
                        )  # fmt: skip
                if need1 and not need2:
                    T.clear(value)
                    dsl.gemm(l2_tile, r2_tile, value, transpose_a=not is_up, transpose_b=not is_up, tall=tall)
                    add(value, tile, operand, top, inverse, factor1, r1_tile, acc1)
                if need2 and not need1:
                    T.clear(value)
                    dsl.gemm(l1_tile, r1_tile, value, transpose_a=not is_up, transpose_b=not is_up, tall=tall)
                    add(value, tile, operand, top, inverse, factor2, r2_tile, acc2)
            if need1:
                store(acc1, factor1, outs[0], part * count, block * BLOCK_M)
            if need2:
                store(acc2, factor2, outs[1], part * count + (need1 if split else 0), block * BLOCK_M)

        # A macro renames the kernel's scalars that are its arguments, and two of one name don't compile.
        return sums(block, part)

    @T.prim_func
    def kernel(
        g: T.Tensor((O, I), dtype),
        up1: T.Tensor((O, R), dtype),
        down1: T.Tensor((R, I), dtype),
        up2: T.Tensor((O, R), dtype),
        down2: T.Tensor((R, I), dtype),
        ups1: T.Tensor((ups, O, R), up_dtype),
        ups2: T.Tensor((ups, O, R), up_dtype),
        downs1: T.Tensor((downs, R, I), down_dtype),
        downs2: T.Tensor((downs, R, I), down_dtype),
        up_scale: T.float32,
        down_scale: T.float32,
        groups: T.int32,
        up_rows: T.int32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        up_group = up_rows * up_spans if need_up1 or need_up2 else 0
        down_group = T.ceildiv(I, BLOCK_M) if need_down1 or need_down2 else 0
        with T.Kernel(up_group + down_group, groups, threads=config.threads) as (pid, group):
            if need_up1 or need_up2:
                if pid < up_group:
                    walk(
                        True, group * up_rows + pid // up_spans, pid % up_spans, up_steps, up_scale,
                        g, (up1, up2), (down1, down2), (ups1, ups2),
                    )  # fmt: skip
            if need_down1 or need_down2:
                if pid >= up_group:
                    walk(
                        False, pid - up_group, group, down_steps, down_scale,
                        g, (down1, down2), (up1, up2), (downs1, downs2),
                    )  # fmt: skip

    return kernel
