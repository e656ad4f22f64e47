"""TileLang kernels of LoKr's bypass where both factors fit on an SM; `tilelang_bypass` says how they make up the op.

Factories in the sense of `kernels.common.tilelang_target`. Axes: w1 is [A, B], w2 is [C, D]; `blocks` are the sizes of the tiles that
hold them. A block loads both factors once and walks over `span`
tokens; past the last token it computes that one again and leaves the result.
"""

from typing import Any

from kernels.common.tilelang_ops import to_operand_by_row
from kernels.common.tilelang_target import Dsl, Size
from kernels.lokr.tilelang_factors import factor_operand, side_shapes, to_operand, unscaled

Blocks = tuple[int, int, int, int]


def forward(
    dsl: Dsl, *, A: Size, B: Size, C: Size, D: Size, R1: Size, R2: Size, BLOCK_R1: int, BLOCK_R2: int, blocks: Blocks,
    dtype: str, out_dtype: str, base_dtype: str | None, config: Any,
) -> Any:  # fmt: skip
    """out[t] = scale · w1 @ (x[t] @ w2ᵀ) (+ base[t]) for every token t."""
    T = dsl.T
    A, B, C, D = dsl.size("A", A), dsl.size("B", B), dsl.size("C", C), dsl.size("D", D)
    BLOCK_A, BLOCK_B, BLOCK_C, BLOCK_D = blocks
    wa1_shape, wb1_shape = side_shapes(A, B, dsl.size("R1", R1), BLOCK_R1)
    wa2_shape, wb2_shape = side_shapes(C, D, dsl.size("R2", R2), BLOCK_R2)
    tokens = T.dynamic("tokens")

    in_registers = _rows_suit(dsl, BLOCK_A, config.threads, dtype)

    @T.prim_func
    def kernel(
        x_rows: T.Tensor(dsl.declared((tokens, B, D), (tokens, B * D)), dtype),
        wa1: T.Tensor(wa1_shape, dtype),
        wb1: T.Tensor(wb1_shape, dtype),
        wa2: T.Tensor(wa2_shape, dtype),
        wb2: T.Tensor(wb2_shape, dtype),
        base_rows: T.Tensor(dsl.declared((tokens, A, C), (tokens, A * C)), base_dtype or out_dtype),
        out_rows: T.Tensor(dsl.declared((tokens, A, C), (tokens, A * C)), out_dtype),
        scale: T.float32,
        programs: T.int32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        x, out = dsl.reshaped(x_rows, (tokens, B, D)), dsl.reshaped(out_rows, (tokens, A, C))
        base = dsl.reshaped(base_rows, (tokens, A, C))
        with T.Kernel(programs, threads=config.threads) as pid:
            w1 = dsl.shared((BLOCK_A, BLOCK_B), dtype)
            w2 = dsl.shared((BLOCK_C, BLOCK_D), dtype)
            factors = dsl.shared((2,), "float32")
            x_next = dsl.fragment((BLOCK_B, BLOCK_D), dtype)
            x_tile = dsl.shared((BLOCK_B, BLOCK_D), dtype)
            u = dsl.fragment((BLOCK_A, BLOCK_D))
            u_operand = (dsl.fragment if in_registers else dsl.shared)((BLOCK_A, BLOCK_D), dtype)
            top, u_factor, inverse = (dsl.fragment((BLOCK_A,)) for _ in range(3))
            y = dsl.fragment((BLOCK_A, BLOCK_C))
            y_tile = dsl.shared((BLOCK_A, BLOCK_C), out_dtype)
            if config.swizzled and not dsl.cpu:
                dsl.swizzle(y_tile)
            # Through registers and before the factors: all of a block's first loads are in flight at once.
            T.copy(x[pid, 0, 0], x_next)
            factor_operand(dsl, wa1, wb1, BLOCK_R1, w1, factors, 0)
            factor_operand(dsl, wa2, wb2, BLOCK_R2, w2, factors, 1)
            for step in T.serial(T.ceildiv(tokens - pid, programs) if config.walks else 1):
                t = pid + step * programs
                T.copy(x_next, x_tile)
                if config.walks:
                    if t + programs < tokens:
                        T.copy(x[t + programs, 0, 0], x_next)
                T.clear(u)
                dsl.gemm(w1, x_tile, u, tall=in_registers)
                to_operand_by_row(dsl, u, u_operand, top, u_factor, inverse)
                T.clear(y)
                dsl.gemm(u_operand, w2, y, transpose_b=True, tall=in_registers)
                for i, j in dsl.parallel(BLOCK_A, BLOCK_C):
                    y[i, j] *= unscaled(factors, BLOCK_R1, BLOCK_R2, scale * u_factor[i])
                if base_dtype is not None:
                    for i, j in dsl.parallel(BLOCK_A, BLOCK_C):
                        if i < A and j < C:
                            y[i, j] += T.cast(base[t, i, j], "float32")
                T.copy(y, y_tile)
                T.copy(y_tile, out[t, 0, 0])

    return kernel


def _rows_suit(dsl: Dsl, rows: int, threads: int, dtype: str) -> bool:
    """Whether a product of that many rows can take its left operand from registers: 16 rows a warp, no other way to share."""
    return not dsl.cpu and dtype != "float32" and rows % (threads // 2) == 0


def backward(
    dsl: Dsl, *, A: Size, B: Size, C: Size, D: Size, R1: Size, R2: Size, BLOCK_R1: int, BLOCK_R2: int, blocks: Blocks,
    dtype: str, need_x: bool, out1: str | None, out2: str | None, config: Any,
) -> Any:  # fmt: skip
    """grad_x = scale · w1ᵀ @ g @ w2 for every token, and each block's sums over its tokens of the factors' gradients.

    parts1[block, a, b] = scale1 · Σ_t g[t] @ (x[t] @ w2ᵀ)ᵀ and parts2[block, c, d] = scale2 · Σ_t (w1ᵀ @ g[t])ᵀ @ x[t], in the dtypes
    out1 and out2; None where a gradient is not needed.
    """
    T = dsl.T
    A, B, C, D = dsl.size("A", A), dsl.size("B", B), dsl.size("C", C), dsl.size("D", D)
    BLOCK_A, BLOCK_B, BLOCK_C, BLOCK_D = blocks
    wa1_shape, wb1_shape = side_shapes(A, B, dsl.size("R1", R1), BLOCK_R1)
    wa2_shape, wb2_shape = side_shapes(C, D, dsl.size("R2", R2), BLOCK_R2)
    tokens, programs = T.dynamic("tokens"), T.dynamic("programs")
    need1, need2 = out1 is not None, out2 is not None

    @T.macro
    def accumulate(acc, a, b, factor, product, transpose_a, transpose_b):  # type: ignore[no-untyped-def]
        # Only a scaled operand, which is a float16 one, needs a sum of its own before it is added.
        if dtype == "float16":
            T.clear(product)
            dsl.gemm(a, b, product, transpose_a=transpose_a, transpose_b=transpose_b)
            for i, j in dsl.parallel(acc.shape[0], acc.shape[1]):
                acc[i, j] += product[i, j] * factor[0]
        else:
            dsl.gemm(a, b, acc, transpose_a=transpose_a, transpose_b=transpose_b)

    @T.prim_func
    def kernel(
        g: T.Tensor((tokens, A, C), dtype),
        x: T.Tensor((tokens, B, D), dtype),
        wa1: T.Tensor(wa1_shape, dtype),
        wb1: T.Tensor(wb1_shape, dtype),
        wa2: T.Tensor(wa2_shape, dtype),
        wb2: T.Tensor(wb2_shape, dtype),
        grad_x: T.Tensor((tokens, B, D), dtype),
        parts1: T.Tensor((programs, A, B), out1 or "float32"),
        parts2: T.Tensor((programs, C, D), out2 or "float32"),
        scale: T.float32,
        scale1: T.float32,
        scale2: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(tokens, config.span), threads=config.threads) as pid:
            w1 = dsl.shared((BLOCK_A, BLOCK_B), dtype)
            w2 = dsl.shared((BLOCK_C, BLOCK_D), dtype)
            factors = dsl.shared((2,), "float32")
            g_tile = dsl.shared((BLOCK_A, BLOCK_C), dtype)
            x_tile = dsl.shared((BLOCK_B, BLOCK_D), dtype)
            middle = dsl.fragment((BLOCK_B, BLOCK_C))
            factor_operand(dsl, wa1, wb1, BLOCK_R1, w1, factors, 0)
            factor_operand(dsl, wa2, wb2, BLOCK_R2, w2, factors, 1)
            if need_x or need2:
                p = dsl.shared((BLOCK_B, BLOCK_C), dtype)
                p_factor = dsl.shared((1,), "float32")
            if need_x:
                x_acc = dsl.fragment((BLOCK_B, BLOCK_D))
                x_out = dsl.shared((BLOCK_B, BLOCK_D), dtype)
            if need1:
                z = dsl.shared((BLOCK_B, BLOCK_C), dtype)
                z_factor = dsl.shared((1,), "float32")
                acc1 = dsl.fragment((BLOCK_A, BLOCK_B))
                product1 = dsl.fragment((BLOCK_A, BLOCK_B))
                T.clear(acc1)
            if need2:
                acc2 = dsl.fragment((BLOCK_C, BLOCK_D))
                product2 = dsl.fragment((BLOCK_C, BLOCK_D))
                T.clear(acc2)
            for step in dsl.pipelined(config.span, config.stages):
                t = T.min(pid * config.span + step, tokens - 1)
                T.copy(g[t, 0, 0], g_tile)
                if need1 or need2:
                    T.copy(x[t, 0, 0], x_tile)
                if need_x or need2:
                    T.clear(middle)
                    dsl.gemm(w1, g_tile, middle, transpose_a=True)
                    to_operand(dsl, middle, p, p_factor)
                if need_x:
                    T.clear(x_acc)
                    dsl.gemm(p, w2, x_acc)
                    for i, j in dsl.parallel(BLOCK_B, BLOCK_D):
                        x_acc[i, j] *= unscaled(factors, BLOCK_R1, BLOCK_R2, scale * p_factor[0])
                    T.copy(x_acc, x_out)
                    if pid * config.span + step < tokens:
                        T.copy(x_out, grad_x[t, 0, 0])
                if need2:
                    if pid * config.span + step < tokens:
                        accumulate(acc2, p, x_tile, p_factor, product2, True, False)
                if need1:
                    T.clear(middle)
                    dsl.gemm(x_tile, w2, middle, transpose_b=True)
                    to_operand(dsl, middle, z, z_factor)
                    if pid * config.span + step < tokens:
                        accumulate(acc1, g_tile, z, z_factor, product1, False, True)
            if need1:
                for i, j in dsl.parallel(BLOCK_A, BLOCK_B):
                    if i < A and j < B:
                        parts1[pid, i, j] = unscaled(factors, 0, BLOCK_R2, acc1[i, j] * scale1)
            if need2:
                for i, j in dsl.parallel(BLOCK_C, BLOCK_D):
                    if i < C and j < D:
                        parts2[pid, i, j] = unscaled(factors, BLOCK_R1, 0, acc2[i, j] * scale2)

    return kernel
