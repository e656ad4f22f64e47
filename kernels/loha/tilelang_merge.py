"""LoHa's TileLang kernels that make tiles of ΔW or of its gradient; `tilelang_impl` says how they make up the ops.

Factories in the sense of `kernels.common.tilelang_target`: row counts are known at run time only. A rank is
padded to BLOCK_R, a power of two from 16 on, inside the tiles. Sums over more than one block go to float32 partials.
"""

from typing import Any

from kernels.common.tilelang_ops import store_tile, to_operand
from kernels.common.tilelang_target import Dsl, Size
from kernels.loha.tilelang_products import landed
from kernels.loha.tilelang_products import product as under_way


def store(dsl: Dsl, acc: Any, base: Any, out: Any, row: Any, col: Any, config: Any) -> Any:
    """As `store_tile`; for 16-byte stores, a staged tile that is written by columns and read by rows is laid out for both."""
    T = dsl.T
    if dsl.cpu or not config.staged or "disable_tma_lower" not in config.passes:
        return store_tile(dsl, acc, base, out, row, col, config.staged)

    @T.macro
    def staged(acc, out, row, col):  # type: ignore[no-untyped-def]
        if base is not None:
            for i, j in dsl.parallel(acc.shape[0], acc.shape[1]):
                if row + i < out.shape[0] and col + j < out.shape[1]:
                    acc[i, j] += T.cast(base[row + i, col + j], "float32")
        tile = dsl.shared(acc.shape, out.dtype)
        dsl.swizzle(tile)
        T.copy(acc, tile)
        T.copy(tile, out[row, col])

    return staged(acc, out, row, col)


def merge(
    dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, out_dtype: str, base_dtype: str | None, config: Any
) -> Any:
    """out[O, I] = scale · (up1 @ down1) ∘ (up2 @ down2) (+ base).

    A block keeps its rows of up and walks along I or, where the config says so, keeps its columns of down and walks along O.
    """
    T = dsl.T
    O, I, R = T.dynamic("O"), dsl.size("I", I), dsl.size("R", R)
    BLOCK_O, BLOCK_I, STEPS = config.block_o, config.block_i, config.steps
    steps_o, steps_i = (STEPS, 1) if config.by_rows else (1, STEPS)
    # What a block keeps is waited for with the first tiles of its walk, where rows are as wide as such a copy takes.
    whole = not dsl.cpu and R * 2 % 16 == 0 and I * 2 % 16 == 0
    fetch = T.async_copy if config.overlap and whole and config.stages > 0 and STEPS > config.stages else T.copy

    @T.prim_func
    def kernel(
        up1: T.Tensor((O, R), dtype),
        down1: T.Tensor((R, I), dtype),
        up2: T.Tensor((O, R), dtype),
        down2: T.Tensor((R, I), dtype),
        base: T.Tensor((O, I), base_dtype or out_dtype),
        out: T.Tensor((O, I), out_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_I * steps_i), T.ceildiv(O, BLOCK_O * steps_o), threads=config.threads) as (
            pid_i,
            pid_o,
        ):
            if config.per_sm > 1 and not dsl.cpu:
                T.annotate_min_blocks_per_sm(config.per_sm)
            up1_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            up2_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            down1_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            down2_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            product1 = dsl.fragment((BLOCK_O, BLOCK_I))
            product2 = dsl.fragment((BLOCK_O, BLOCK_I))
            if config.by_rows:
                fetch(down1[0, pid_i * BLOCK_I], down1_tile)
                fetch(down2[0, pid_i * BLOCK_I], down2_tile)
            else:
                fetch(up1[pid_o * BLOCK_O, 0], up1_tile)
                fetch(up2[pid_o * BLOCK_O, 0], up2_tile)
            for step in dsl.pipelined(STEPS, config.stages):
                o = (pid_o * STEPS + step) * BLOCK_O if config.by_rows else pid_o * BLOCK_O
                i = pid_i * BLOCK_I if config.by_rows else (pid_i * STEPS + step) * BLOCK_I
                if config.by_rows:
                    T.copy(up1[o, 0], up1_tile)
                    T.copy(up2[o, 0], up2_tile)
                else:
                    T.copy(down1[0, i], down1_tile)
                    T.copy(down2[0, i], down2_tile)
                if config.overlap:
                    # A loop, so that the pipeline refills no tile before both products are waited for.
                    for _ in T.serial(T.min(O, 1)):
                        under_way(dsl, up1_tile, down1_tile, product1, clear=True, wait=False)
                        under_way(dsl, up2_tile, down2_tile, product2, clear=True)
                    landed(dsl, product1, config.threads)
                else:
                    T.clear(product1)
                    T.clear(product2)
                    dsl.gemm(up1_tile, down1_tile, product1)
                    dsl.gemm(up2_tile, down2_tile, product2)
                for m, n in dsl.parallel(BLOCK_O, BLOCK_I):
                    product1[m, n] *= product2[m, n] * scale
                store(dsl, product1, base if base_dtype is not None else None, out, o, i, config)

    return kernel


def token_tile(dsl: Dsl, g: Any, x: Any, row: Any, col: Any, acc: Any, block_t: int, stages: int) -> Any:
    """acc = the tile gᵀ @ x of ΔW's gradient at (row, col), over all tokens."""
    T = dsl.T
    rows, cols = acc.shape

    @T.macro
    def sum_tokens(g, x, row, col, acc):  # type: ignore[no-untyped-def]
        g_tile = dsl.shared((block_t, rows), g.dtype)
        x_tile = dsl.shared((block_t, cols), x.dtype)
        T.clear(acc)
        for step in dsl.pipelined(T.ceildiv(g.shape[0], block_t), stages):
            T.copy(g[step * block_t, row], g_tile)
            T.copy(x[step * block_t, col], x_tile)
            dsl.gemm(g_tile, x_tile, acc, transpose_a=True)

    return sum_tokens(g, x, row, col, acc)


def factor_share(
    dsl: Dsl,
    product: Any,
    up: Any,
    down: Any,
    down_acc: Any,
    up_parts: Any,
    part: Any,
    row: Any,
    needs: tuple[bool, bool],
) -> Any:
    """One product's share of a tile `product` of ΔW's gradient ∘ the other product.

    up_parts[part, row:] = product @ downᵀ and down_acc += productᵀ @ up, those that `needs` = (up's, down's).
    """
    T = dsl.T
    need_up, need_down = needs
    rows, cols = product.shape
    rank = up.shape[1]
    scaled = up.dtype == "float16"

    @T.macro
    def share(product, up, down, up_parts, part, row):  # type: ignore[no-untyped-def]
        operand = dsl.shared((rows, cols), up.dtype)
        factor = dsl.shared((1,), "float32")
        to_operand(dsl, product, operand, factor)
        if need_up:
            up_acc = dsl.fragment((rows, rank))
            T.clear(up_acc)
            dsl.gemm(operand, down, up_acc, transpose_b=True)
            for o, r in dsl.parallel(rows, rank):
                up_acc[o, r] *= factor[0]
            T.copy(up_acc, up_parts[part, row, 0])
        if need_down:
            if scaled:
                added = dsl.fragment((cols, rank))
                T.clear(added)
                dsl.gemm(operand, up, added, transpose_a=True)
                for i, r in dsl.parallel(cols, rank):
                    down_acc[i, r] += added[i, r] * factor[0]
            else:
                dsl.gemm(operand, up, down_acc, transpose_a=True)

    return share(product, up, down, up_parts, part, row)


def factor_backward(
    dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, has_x: bool, needs: tuple[bool, ...], config: Any
) -> Any:
    """up_parts[strip, 1 and 2, O, R] and down_parts[span, 1 and 2, R, I], those that `needs` asks for.

    ΔW's gradient is g[O, I], read once, or, with x, g[T, O]ᵀ @ x[T, I], made tile by tile and not stored. A block walks
    SPAN rows of it over BLOCK_I columns.
    """
    T = dsl.T
    O, I, R = T.dynamic("O"), dsl.size("I", I), dsl.size("R", R)
    tokens, ups, downs = T.dynamic("tokens"), T.dynamic("ups"), T.dynamic("downs")
    BLOCK_O, BLOCK_I, SPAN = config.block_o, config.block_i, config.span
    need_up1, need_down1, need_up2, need_down2 = needs

    @T.macro
    def store_down(acc, down_parts, part, col):  # type: ignore[no-untyped-def]
        for i, r in dsl.parallel(BLOCK_I, BLOCK_R):
            if r < R and col + i < I:
                down_parts[part, r, col + i] = acc[i, r]

    @T.macro
    def times(product, tile):  # type: ignore[no-untyped-def]
        for o, i in dsl.parallel(BLOCK_O, BLOCK_I):
            product[o, i] *= T.cast(tile[o, i], "float32")

    @T.prim_func
    def kernel(
        g: T.Tensor((tokens, O) if has_x else (O, I), dtype),
        x: T.Tensor((tokens, I), dtype),
        up1: T.Tensor((O, R), dtype),
        down1: T.Tensor((R, I), dtype),
        up2: T.Tensor((O, R), dtype),
        down2: T.Tensor((R, I), dtype),
        up_parts: T.Tensor((ups, O, R), "float32"),
        down_parts: T.Tensor((downs, R, I), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_I), T.ceildiv(O, SPAN), threads=config.threads) as (pid_i, pid_s):
            up1_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            up2_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            down1_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            down2_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            tile = dsl.fragment((BLOCK_O, BLOCK_I)) if has_x else dsl.shared((BLOCK_O, BLOCK_I), dtype)
            product = dsl.fragment((BLOCK_O, BLOCK_I))
            T.copy(down1[0, pid_i * BLOCK_I], down1_tile)
            T.copy(down2[0, pid_i * BLOCK_I], down2_tile)
            # Only what is used: TileLang finds no layout for registers that are merely cleared.
            if need_down1:
                acc1 = dsl.fragment((BLOCK_I, BLOCK_R))
                T.clear(acc1)
            if need_down2:
                acc2 = dsl.fragment((BLOCK_I, BLOCK_R))
                T.clear(acc2)
            for step in dsl.pipelined(SPAN // BLOCK_O, 0 if has_x else config.stages):
                o = pid_s * SPAN + step * BLOCK_O
                if has_x:
                    token_tile(dsl, g, x, o, pid_i * BLOCK_I, tile, 32, config.stages)
                else:
                    T.copy(g[o, pid_i * BLOCK_I], tile)
                T.copy(up1[o, 0], up1_tile)
                T.copy(up2[o, 0], up2_tile)
                if need_up1 or need_down1:
                    T.clear(product)
                    dsl.gemm(up2_tile, down2_tile, product)
                    times(product, tile)
                    factor_share(
                        dsl, product, up1_tile, down1_tile, acc1 if need_down1 else None, up_parts, pid_i * (need_up1 + need_up2), o,
                        (need_up1, need_down1),
                    )  # fmt: skip
                if need_up2 or need_down2:
                    T.clear(product)
                    dsl.gemm(up1_tile, down1_tile, product)
                    times(product, tile)
                    factor_share(
                        dsl, product, up2_tile, down2_tile, acc2 if need_down2 else None, up_parts, pid_i * (need_up1 + need_up2) + need_up1, o,
                        (need_up2, need_down2),
                    )  # fmt: skip
            if need_down1:
                store_down(acc1, down_parts, pid_s * (need_down1 + need_down2), pid_i * BLOCK_I)
            if need_down2:
                store_down(acc2, down_parts, pid_s * (need_down1 + need_down2) + need_down1, pid_i * BLOCK_I)

    return kernel
