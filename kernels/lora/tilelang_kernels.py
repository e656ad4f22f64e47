"""LoRA's TileLang kernels; `tilelang_impl` says how they make up the ops.

Factories in the sense of `kernels.common.tilelang_target`: row counts are known at run time only. A rank is
padded to BLOCK_R, a multiple of 16, inside the tiles. Sums over more than one block go to float32 partials.
"""

from typing import Any

from kernels.common.tilelang_ops import to_operand
from kernels.common.tilelang_target import Dsl, Size


def merge(
    dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, out_dtype: str, base_dtype: str | None, config: Any
) -> Any:
    """out[O, I] = scale · up @ down (+ base), one tile of out a block."""
    T = dsl.T
    O, I, R = T.dynamic("O"), dsl.size("I", I), dsl.size("R", R)
    BLOCK_O, BLOCK_I = config.block_o, config.block_i

    @T.prim_func
    def kernel(
        up: T.Tensor((O, R), dtype),
        down: T.Tensor((R, I), dtype),
        base: T.Tensor((O, I), base_dtype or out_dtype),
        out: T.Tensor((O, I), out_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_I), T.ceildiv(O, BLOCK_O), threads=config.threads) as (pid_i, pid_o):
            up_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            down_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            acc = dsl.fragment((BLOCK_O, BLOCK_I))
            T.copy(up[pid_o * BLOCK_O, 0], up_tile)
            T.copy(down[0, pid_i * BLOCK_I], down_tile)
            T.clear(acc)
            dsl.gemm(up_tile, down_tile, acc)
            for i, j in dsl.parallel(BLOCK_O, BLOCK_I):
                acc[i, j] *= scale
            store_tile(
                dsl, acc, base if base_dtype is not None else None, out, pid_o * BLOCK_O, pid_i * BLOCK_I, config.staged
            )

    return kernel


def store_tile(dsl: Dsl, acc: Any, base: Any, out: Any, row: Any, col: Any, staged: bool) -> Any:
    """out[row:, col:] = acc (+ base); `staged` gathers the tile in shared memory, for 16-byte or bulk stores."""
    T = dsl.T
    rows, cols = acc.shape

    @T.macro
    def store(acc, out, row, col):  # type: ignore[no-untyped-def]
        if base is not None:
            for i, j in dsl.parallel(rows, cols):
                if row + i < out.shape[0] and col + j < out.shape[1]:
                    acc[i, j] += T.cast(base[row + i, col + j], "float32")
        if staged:
            tile = dsl.shared((rows, cols), out.dtype)
            T.copy(acc, tile)
            T.copy(tile, out[row, col])
        else:
            T.copy(acc, out[row, col])

    return store(acc, out, row, col)


def dual(
    dsl: Dsl, *, N: Size, R: Size, BLOCK_R: int, dtype: str, left_dtype: str,
    need_right: bool, need_left: bool, right_by_rank: bool, left_by_rank: bool, config: Any,
) -> Any:  # fmt: skip
    """right_parts[n, M, R] = G[:, n] @ right[n] and left_parts[m] = left[m]ᵀ @ G[m], with G[M, N] read once.

    A block walks SPAN rows of G over BLOCK_N columns. right is [R, N] (`right_by_rank`) or [N, R]; left is [M, R]; a left
    partial is [R, N] (`left_by_rank`) or [N, R].
    """
    T = dsl.T
    M, N, R = T.dynamic("M"), dsl.size("N", N), dsl.size("R", R)
    strips, spans = T.dynamic("strips"), T.dynamic("spans")
    BLOCK_M, BLOCK_N, SPAN = config.block_m, config.block_n, config.span
    cast = left_dtype != dtype

    @T.prim_func
    def kernel(
        g: T.Tensor((M, N), dtype),
        right: T.Tensor((R, N) if right_by_rank else (N, R), dtype),
        left: T.Tensor((M, R), left_dtype),
        right_parts: T.Tensor((strips, M, R), "float32"),
        left_parts: T.Tensor((spans, R, N) if left_by_rank else (spans, N, R), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(N, BLOCK_N), T.ceildiv(M, SPAN), threads=config.threads) as (pid_n, pid_m):
            tile = dsl.shared((BLOCK_M, BLOCK_N), dtype)
            if need_right:
                right_tile = dsl.shared((BLOCK_R, BLOCK_N) if right_by_rank else (BLOCK_N, BLOCK_R), dtype)
                right_acc = dsl.fragment((BLOCK_M, BLOCK_R))
                if right_by_rank:
                    T.copy(right[0, pid_n * BLOCK_N], right_tile)
                else:
                    T.copy(right[pid_n * BLOCK_N, 0], right_tile)
            if need_left:
                left_tile = dsl.shared((SPAN if cast else BLOCK_M, BLOCK_R), dtype)
                left_acc = dsl.fragment((BLOCK_N, BLOCK_R))
                T.clear(left_acc)
                if cast:
                    value = dsl.fragment((SPAN, BLOCK_R))
                    factor = dsl.shared((1,), "float32")
                    T.copy(left[pid_m * SPAN, 0], value)
                    to_operand(dsl, value, left_tile, factor)
            for step in dsl.pipelined(SPAN // BLOCK_M, config.stages):
                m = pid_m * SPAN + step * BLOCK_M
                T.copy(g[m, pid_n * BLOCK_N], tile)
                if need_left and not cast:
                    T.copy(left[m, 0], left_tile)
                if need_right:
                    T.clear(right_acc)
                    dsl.gemm(tile, right_tile, right_acc, transpose_b=right_by_rank)
                    T.copy(right_acc, right_parts[pid_n, m, 0])
                if need_left:
                    first = step * BLOCK_M if cast else 0
                    dsl.gemm(tile, left_tile[first : first + BLOCK_M, :], left_acc, transpose_a=True)
            if need_left:
                for n, r in dsl.parallel(BLOCK_N, BLOCK_R):
                    if cast:
                        left_acc[n, r] *= factor[0]
                    if left_by_rank and r < R and pid_n * BLOCK_N + n < N:
                        left_parts[pid_m, r, pid_n * BLOCK_N + n] = left_acc[n, r]
                if not left_by_rank:
                    T.copy(left_acc, left_parts[pid_m, pid_n * BLOCK_N, 0])

    return kernel


def down_rows(dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, config: Any) -> Any:
    """parts[s, T, R] = x[:, s] @ down[:, s]ᵀ over the s-th SPAN columns of x."""
    T = dsl.T
    tokens, I, R = T.dynamic("tokens"), dsl.size("I", I), dsl.size("R", R)
    splits = T.dynamic("splits")
    BLOCK_T, BLOCK_I, SPAN = config.block_t, config.block_i, config.span

    @T.prim_func
    def kernel(
        x: T.Tensor((tokens, I), dtype),
        down: T.Tensor((R, I), dtype),
        parts: T.Tensor((splits, tokens, R), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(tokens, BLOCK_T), T.ceildiv(I, SPAN), threads=config.threads) as (pid_t, pid_s):
            x_tile = dsl.shared((BLOCK_T, BLOCK_I), dtype)
            down_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            acc = dsl.fragment((BLOCK_T, BLOCK_R))
            T.clear(acc)
            for step in dsl.pipelined(SPAN // BLOCK_I, config.stages):
                i = pid_s * SPAN + step * BLOCK_I
                T.copy(x[pid_t * BLOCK_T, i], x_tile)
                T.copy(down[0, i], down_tile)
                dsl.gemm(x_tile, down_tile, acc, transpose_b=True)
            T.copy(acc, parts[pid_s, pid_t * BLOCK_T, 0])

    return kernel


def sum_parts(dsl: Dsl, parts: Any, row: Any, total: Any, part: Any) -> Any:
    """total = Σ_s parts[s, row:, :] in the order of s; `part` is a register tile like `total`."""
    T = dsl.T

    @T.macro
    def sum_rows(parts, row, total, part):  # type: ignore[no-untyped-def]
        T.copy(parts[0, row, 0], total)
        for s in T.serial(parts.shape[0] - 1):
            T.copy(parts[s + 1, row, 0], part)
            for i, r in dsl.parallel(total.shape[0], total.shape[1]):
                total[i, r] += part[i, r]

    return sum_rows(parts, row, total, part)


def up_tile(
    dsl: Dsl,
    *,
    O: Size,
    R: Size,
    BLOCK_R: int,
    dtype: str,
    out_dtype: str,
    base_dtype: str | None,
    save_z: bool,
    config: Any,
) -> Any:
    """out = scale · z @ upᵀ (+ base), z = Σ_s parts[s], which the first column of blocks also writes."""
    T = dsl.T
    tokens, O, R = T.dynamic("tokens"), dsl.size("O", O), dsl.size("R", R)
    splits = T.dynamic("splits")
    BLOCK_T, BLOCK_O = config.block_t, config.block_o

    @T.prim_func
    def kernel(
        parts: T.Tensor((splits, tokens, R), "float32"),
        up: T.Tensor((O, R), dtype),
        base: T.Tensor((tokens, O), base_dtype or out_dtype),
        out: T.Tensor((tokens, O), out_dtype),
        z: T.Tensor((tokens, R), "float32"),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(O, BLOCK_O), T.ceildiv(tokens, BLOCK_T), threads=config.threads) as (pid_o, pid_t):
            up_part = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            operand = dsl.shared((BLOCK_T, BLOCK_R), dtype)
            factor = dsl.shared((1,), "float32")
            value = dsl.fragment((BLOCK_T, BLOCK_R))
            part = dsl.fragment((BLOCK_T, BLOCK_R))
            acc = dsl.fragment((BLOCK_T, BLOCK_O))
            T.copy(up[pid_o * BLOCK_O, 0], up_part)
            sum_parts(dsl, parts, pid_t * BLOCK_T, value, part)
            if save_z:
                if pid_o == 0:
                    T.copy(value, z[pid_t * BLOCK_T, 0])
            to_operand(dsl, value, operand, factor)
            T.clear(acc)
            dsl.gemm(operand, up_part, acc, transpose_b=True)
            for i, j in dsl.parallel(BLOCK_T, BLOCK_O):
                acc[i, j] *= factor[0] * scale
            store_tile(
                dsl, acc, base if base_dtype is not None else None, out, pid_t * BLOCK_T, pid_o * BLOCK_O, config.staged
            )

    return kernel


def down_backward(
    dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, need_x: bool, need_down: bool, config: Any
) -> Any:
    """grad_x = scale · h @ down and down_parts[t, I, R] = x[t]ᵀ @ h[t], h = Σ_s h_parts[s], with x read once."""
    T = dsl.T
    tokens, I, R = T.dynamic("tokens"), dsl.size("I", I), dsl.size("R", R)
    splits, spans = T.dynamic("splits"), T.dynamic("spans")
    BLOCK_T, BLOCK_I, SPAN = config.block_m, config.block_n, config.span

    @T.prim_func
    def kernel(
        h_parts: T.Tensor((splits, tokens, R), "float32"),
        x: T.Tensor((tokens, I), dtype),
        down: T.Tensor((R, I), dtype),
        grad_x: T.Tensor((tokens, I), dtype),
        down_parts: T.Tensor((spans, R, I), "float32"),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_I), T.ceildiv(tokens, SPAN), threads=config.threads) as (pid_i, pid_t):
            value = dsl.fragment((SPAN, BLOCK_R))
            part = dsl.fragment((SPAN, BLOCK_R))
            operand = dsl.shared((SPAN, BLOCK_R), dtype)
            factor = dsl.shared((1,), "float32")
            sum_parts(dsl, h_parts, pid_t * SPAN, value, part)
            to_operand(dsl, value, operand, factor)
            if need_x:
                down_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
                x_acc = dsl.fragment((BLOCK_T, BLOCK_I))
                T.copy(down[0, pid_i * BLOCK_I], down_tile)
            if need_down:
                x_tile = dsl.shared((BLOCK_T, BLOCK_I), dtype)
                down_acc = dsl.fragment((BLOCK_I, BLOCK_R))
                T.clear(down_acc)
            for step in dsl.pipelined(SPAN // BLOCK_T, config.stages if need_down else 0):
                first = step * BLOCK_T
                if need_down:
                    T.copy(x[pid_t * SPAN + first, pid_i * BLOCK_I], x_tile)
                    dsl.gemm(x_tile, operand[first : first + BLOCK_T, :], down_acc, transpose_a=True)
                if need_x:
                    T.clear(x_acc)
                    dsl.gemm(operand[first : first + BLOCK_T, :], down_tile, x_acc)
                    for i, j in dsl.parallel(BLOCK_T, BLOCK_I):
                        x_acc[i, j] *= factor[0] * scale
                    store_tile(dsl, x_acc, None, grad_x, pid_t * SPAN + first, pid_i * BLOCK_I, config.staged)
            if need_down:
                for i, r in dsl.parallel(BLOCK_I, BLOCK_R):
                    if r < R and pid_i * BLOCK_I + i < I:
                        down_parts[pid_t, r, pid_i * BLOCK_I + i] = down_acc[i, r] * factor[0]

    return kernel
