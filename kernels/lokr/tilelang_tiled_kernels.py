"""TileLang kernels of LoKr's bypass for factors of any size; `tilelang_tiled` says how they make up the op.

Factories in the sense of `kernels.common.tilelang_target`. Axes: w1 is [A, B], w2 is [C, D]. `exchanged` swaps the roles of both factors:
the tensors are then seen as [tokens, D, B] and [tokens, C, A]. `blocks` are the sizes of the tiles of tokens, A, B, C and D.
"""

from typing import Any

from kernels.common.tilelang_target import Dsl, Size
from kernels.lokr.tilelang_factors import factor_operand, side_shapes, to_operand, unscaled

Blocks = tuple[int, int, int, int, int]


def apply(
    dsl: Dsl, *, A: Size, B: Size, C: Size, D: Size, R1: Size, R2: Size, BLOCK_R1: int, BLOCK_R2: int, transposed: bool,
    exchanged: bool, blocks: Blocks, dtype: str, out_dtype: str, base_dtype: str | None, config: Any,
) -> Any:  # fmt: skip
    """out[t, a, c] = scale · Σ_b w1[a, b] Σ_d w2[c, d] x[t, b, d] (+ base), a tile of (t, a, c) a block.

    `transposed`: the factors come as w1ᵀ and w2ᵀ.
    """
    T = dsl.T
    A, B, C, D = dsl.size("A", A), dsl.size("B", B), dsl.size("C", C), dsl.size("D", D)
    BLOCK_T, BLOCK_A, BLOCK_B, BLOCK_C, BLOCK_D = blocks
    wa1_shape, wb1_shape = side_shapes(*((B, A) if transposed else (A, B)), dsl.size("R1", R1), BLOCK_R1)
    wa2_shape, wb2_shape = side_shapes(*((D, C) if transposed else (C, D)), dsl.size("R2", R2), BLOCK_R2)
    tokens = T.dynamic("tokens")
    zero = T.cast(0, dtype)

    def seen(t: Any, outer: Any, inner: Any) -> tuple[Any, Any, Any]:
        return (t, inner, outer) if exchanged else (t, outer, inner)

    @T.prim_func
    def kernel(
        x: T.Tensor(seen(tokens, B, D), dtype),
        wa1: T.Tensor(wa1_shape, dtype),
        wb1: T.Tensor(wb1_shape, dtype),
        wa2: T.Tensor(wa2_shape, dtype),
        wb2: T.Tensor(wb2_shape, dtype),
        base: T.Tensor(seen(tokens, A, C), base_dtype or out_dtype),
        out: T.Tensor(seen(tokens, A, C), out_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(
            T.ceildiv(C, BLOCK_C), T.ceildiv(A, BLOCK_A), T.ceildiv(tokens, BLOCK_T), threads=config.threads
        ) as (pid_c, pid_a, pid_t):
            t0, a0, c0 = pid_t * BLOCK_T, pid_a * BLOCK_A, pid_c * BLOCK_C
            x_tile = dsl.shared((BLOCK_T * BLOCK_B, BLOCK_D), dtype)
            w1 = dsl.shared((BLOCK_A, BLOCK_B), dtype)
            w2 = dsl.shared((BLOCK_C, BLOCK_D), dtype)
            factors = dsl.shared((2,), "float32")
            z = dsl.fragment((BLOCK_T * BLOCK_B, BLOCK_C))
            z_part = dsl.fragment((BLOCK_T * BLOCK_B, BLOCK_C))
            z_operand = dsl.shared((BLOCK_T * BLOCK_B, BLOCK_C), dtype)
            z_factor = dsl.shared((1,), "float32")
            by_b = dsl.shared((BLOCK_B, BLOCK_T * BLOCK_C), dtype)
            part = dsl.fragment((BLOCK_A, BLOCK_T * BLOCK_C))
            acc = dsl.fragment((BLOCK_A, BLOCK_T * BLOCK_C))
            T.clear(acc)
            for step_b in T.serial(T.ceildiv(B, BLOCK_B)):
                b0 = step_b * BLOCK_B
                T.clear(z)
                for step_d in T.serial(T.ceildiv(D, BLOCK_D)):
                    d0 = step_d * BLOCK_D
                    for i, k in dsl.parallel(BLOCK_T * BLOCK_B, BLOCK_D):
                        t, b, d = t0 + i // BLOCK_B, b0 + i % BLOCK_B, d0 + k
                        inside = T.And(t < tokens, T.And(b < B, d < D))
                        x_tile[i, k] = T.if_then_else(inside, x[seen(t, b, d)], zero)
                    factor_operand(dsl, wa2, wb2, BLOCK_R2, w2, factors, 1, c0, d0, transposed)
                    T.clear(z_part)
                    dsl.gemm(x_tile, w2, z_part, transpose_b=True)
                    for i, j in dsl.parallel(BLOCK_T * BLOCK_B, BLOCK_C):
                        z[i, j] += unscaled(factors, 0, BLOCK_R2, z_part[i, j])
                to_operand(dsl, z, z_operand, z_factor)
                for i, n in dsl.parallel(BLOCK_B, BLOCK_T * BLOCK_C):
                    by_b[i, n] = z_operand[n // BLOCK_C * BLOCK_B + i, n % BLOCK_C]
                factor_operand(dsl, wa1, wb1, BLOCK_R1, w1, factors, 0, a0, b0, transposed)
                T.clear(part)
                dsl.gemm(w1, by_b, part)
                for i, n in dsl.parallel(BLOCK_A, BLOCK_T * BLOCK_C):
                    acc[i, n] += unscaled(factors, BLOCK_R1, 0, part[i, n] * z_factor[0])
            for i, n in dsl.parallel(BLOCK_A, BLOCK_T * BLOCK_C):
                t, a, c = t0 + n // BLOCK_C, a0 + i, c0 + n % BLOCK_C
                if t < tokens and a < A and c < C:
                    value = acc[i, n] * scale
                    if base_dtype is not None:
                        value += T.cast(base[seen(t, a, c)], "float32")
                    out[seen(t, a, c)] = T.cast(value, out_dtype)

    return kernel


def gradient(
    dsl: Dsl, *, A: Size, B: Size, C: Size, D: Size, R1: Size, R2: Size, BLOCK_R1: int, BLOCK_R2: int, exchanged: bool,
    blocks: Blocks, dtype: str, out_dtype: str, config: Any,
) -> Any:  # fmt: skip
    """parts[s, c, d] = scale · Σ_{t,b} P[t, b, c] x[t, b, d] over the s-th `span` tokens, P[t, b, c] = Σ_a w1[a, b] g[t, a, c]."""
    T = dsl.T
    A, B, C, D = dsl.size("A", A), dsl.size("B", B), dsl.size("C", C), dsl.size("D", D)
    BLOCK_T, BLOCK_A, BLOCK_B, BLOCK_C, BLOCK_D = blocks
    wa1_shape, wb1_shape = side_shapes(A, B, dsl.size("R1", R1), BLOCK_R1)
    tokens, splits = T.dynamic("tokens"), T.dynamic("splits")
    zero = T.cast(0, dtype)

    def seen(t: Any, outer: Any, inner: Any) -> tuple[Any, Any, Any]:
        return (t, inner, outer) if exchanged else (t, outer, inner)

    @T.prim_func
    def kernel(
        g: T.Tensor(seen(tokens, A, C), dtype),
        x: T.Tensor(seen(tokens, B, D), dtype),
        wa1: T.Tensor(wa1_shape, dtype),
        wb1: T.Tensor(wb1_shape, dtype),
        parts: T.Tensor((splits, C, D), out_dtype),
        span: T.int32,
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(D, BLOCK_D), T.ceildiv(C, BLOCK_C), splits, threads=config.threads) as (
            pid_d,
            pid_c,
            pid_s,
        ):
            c0, d0 = pid_c * BLOCK_C, pid_d * BLOCK_D
            g_tile = dsl.shared((BLOCK_A, BLOCK_T * BLOCK_C), dtype)
            x_tile = dsl.shared((BLOCK_T * BLOCK_B, BLOCK_D), dtype)
            w1 = dsl.shared((BLOCK_A, BLOCK_B), dtype)
            factors = dsl.shared((2,), "float32")
            p = dsl.fragment((BLOCK_B, BLOCK_T * BLOCK_C))
            p_part = dsl.fragment((BLOCK_B, BLOCK_T * BLOCK_C))
            p_operand = dsl.shared((BLOCK_B, BLOCK_T * BLOCK_C), dtype)
            p_factor = dsl.shared((1,), "float32")
            by_t = dsl.shared((BLOCK_T * BLOCK_B, BLOCK_C), dtype)
            part = dsl.fragment((BLOCK_C, BLOCK_D))
            acc = dsl.fragment((BLOCK_C, BLOCK_D))
            T.clear(acc)
            for step_t in T.serial(T.ceildiv(T.min(span, tokens - pid_s * span), BLOCK_T)):
                t0 = pid_s * span + step_t * BLOCK_T
                for step_b in T.serial(T.ceildiv(B, BLOCK_B)):
                    b0 = step_b * BLOCK_B
                    T.clear(p)
                    for step_a in T.serial(T.ceildiv(A, BLOCK_A)):
                        a0 = step_a * BLOCK_A
                        for i, n in dsl.parallel(BLOCK_A, BLOCK_T * BLOCK_C):
                            t, a, c = t0 + n // BLOCK_C, a0 + i, c0 + n % BLOCK_C
                            inside = T.And(t < tokens, T.And(a < A, c < C))
                            g_tile[i, n] = T.if_then_else(inside, g[seen(t, a, c)], zero)
                        factor_operand(dsl, wa1, wb1, BLOCK_R1, w1, factors, 0, a0, b0)
                        T.clear(p_part)
                        dsl.gemm(w1, g_tile, p_part, transpose_a=True)
                        for i, n in dsl.parallel(BLOCK_B, BLOCK_T * BLOCK_C):
                            p[i, n] += unscaled(factors, BLOCK_R1, 0, p_part[i, n])
                    to_operand(dsl, p, p_operand, p_factor)
                    for m, j in dsl.parallel(BLOCK_T * BLOCK_B, BLOCK_C):
                        by_t[m, j] = p_operand[m % BLOCK_B, m // BLOCK_B * BLOCK_C + j]
                    for m, k in dsl.parallel(BLOCK_T * BLOCK_B, BLOCK_D):
                        t, b, d = t0 + m // BLOCK_B, b0 + m % BLOCK_B, d0 + k
                        inside = T.And(t < tokens, T.And(b < B, d < D))
                        x_tile[m, k] = T.if_then_else(inside, x[seen(t, b, d)], zero)
                    T.clear(part)
                    dsl.gemm(by_t, x_tile, part, transpose_a=True)
                    for j, k in dsl.parallel(BLOCK_C, BLOCK_D):
                        acc[j, k] += part[j, k] * p_factor[0]
            for j, k in dsl.parallel(BLOCK_C, BLOCK_D):
                if c0 + j < C and d0 + k < D:
                    parts[pid_s, c0 + j, d0 + k] = T.cast(acc[j, k] * scale, out_dtype)

    return kernel
