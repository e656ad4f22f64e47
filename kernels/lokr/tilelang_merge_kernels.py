"""TileLang kernels of LoKr's merge; `tilelang_merge` says how they make up the op.

Factories in the sense of `kernels.common.tilelang_target`. Axes: w1 is [A, B], w2 is [C, D]. A side comes as two tensors, wa and
wb: the factor itself and nothing where its rank is 0, else the two whose product it is.
"""

from typing import Any

from kernels.common.tilelang_target import Dsl, Size
from kernels.lokr.tilelang_factors import load_factor, side_shapes


def merge(
    dsl: Dsl, *, A: Size, B: Size, C: Size, D: Size, R1: Size, R2: Size, BLOCK_R1: int, BLOCK_R2: int,
    dtype: str, out_dtype: str, base_dtype: str | None, config: Any,
) -> Any:  # fmt: skip
    """out[a, c, b·d] = scale · w1[a, b] · w2[c, d] (+ base): BLOCK_A × BLOCK_C rows and BLOCK_K runs of VEC columns a block."""
    T = dsl.T
    A, B, C, D = dsl.size("A", A), dsl.size("B", B), dsl.size("C", C), dsl.size("D", D)
    BLOCK_A, BLOCK_C, BLOCK_K, VEC = config.block_a, config.block_c, config.block_k, config.vec
    wa1_shape, wb1_shape = side_shapes(A, B, dsl.size("R1", R1), BLOCK_R1)
    wa2_shape, wb2_shape = side_shapes(C, D, dsl.size("R2", R2), BLOCK_R2)
    RUNS = D // VEC

    @T.prim_func
    def kernel(
        wa1: T.Tensor(wa1_shape, dtype),
        wb1: T.Tensor(wb1_shape, dtype),
        wa2: T.Tensor(wa2_shape, dtype),
        wb2: T.Tensor(wb2_shape, dtype),
        base_rows: T.Tensor(dsl.declared((A, C, B * D), (A * C, B * D)), base_dtype or out_dtype),
        out_rows: T.Tensor(dsl.declared((A, C, B * D), (A * C, B * D)), out_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        base, out = dsl.reshaped(base_rows, (A, C, B * D)), dsl.reshaped(out_rows, (A, C, B * D))
        with T.Kernel(
            T.ceildiv(B * RUNS, BLOCK_K), T.ceildiv(C, BLOCK_C), T.ceildiv(A, BLOCK_A), threads=config.threads
        ) as (pid_k, pid_c, pid_a):
            a0, c0, k0 = pid_a * BLOCK_A, pid_c * BLOCK_C, pid_k * BLOCK_K
            # Products of pairs are made once a block; a full factor is read where it is used.
            if BLOCK_R1:
                w1 = dsl.shared((BLOCK_A, BLOCK_K), "float32")
                load_factor(
                    dsl, wa1, wb1, BLOCK_R1, w1, config.threads, lambda i: a0 + i, lambda k: (k0 + k) // RUNS, True
                )
            if BLOCK_R2:
                w2 = dsl.shared((BLOCK_C, BLOCK_K * VEC), "float32")
                load_factor(dsl, wa2, wb2, BLOCK_R2, w2, config.threads, lambda j: c0 + j, lambda n: (k0 * VEC + n) % D)
            for i, j, k, v in dsl.parallel(BLOCK_A, BLOCK_C, BLOCK_K, VEC):
                if a0 + i < A and c0 + j < C and k0 + k < B * RUNS:
                    left = w1[i, k] if BLOCK_R1 else T.cast(wa1[a0 + i, (k0 + k) // RUNS], "float32")
                    right = (
                        w2[j, k * VEC + v] if BLOCK_R2 else T.cast(wa2[c0 + j, (k0 + k) % RUNS * VEC + v], "float32")
                    )
                    value = left * scale * right
                    if base_dtype is not None:
                        value += T.cast(base[a0 + i, c0 + j, (k0 + k) * VEC + v], "float32")
                    out[a0 + i, c0 + j, (k0 + k) * VEC + v] = T.cast(value, out_dtype)

    return kernel


def merge_grad(
    dsl: Dsl, *, A: Size, B: Size, C: Size, D: Size, R1: Size, R2: Size, BLOCK_R1: int, BLOCK_R2: int,
    dtype: str, out1: str | None, out2: str | None, config: Any,
) -> Any:  # fmt: skip
    """parts1[tile of w2, a, b] and parts2[(span of a, tile of b), c, d] of both gradients times their scale, G read once.

    out1 and out2 are the parts' dtypes, None where a gradient is not needed. A block's tile of w2 is BLOCK_C × BLOCK_D; it walks SPAN a's over BLOCK_B b's. Each b is one warp's, whose lanes share the tile.
    """
    T = dsl.T
    A, B, C, D = dsl.size("A", A), dsl.size("B", B), dsl.size("C", C), dsl.size("D", D)
    BLOCK_B, BLOCK_C, BLOCK_D, SPAN = config.block_b, config.block_c, config.block_d, config.span
    TILE = BLOCK_C * BLOCK_D
    wa1_shape, wb1_shape = side_shapes(A, B, dsl.size("R1", R1), BLOCK_R1)
    wa2_shape, wb2_shape = side_shapes(C, D, dsl.size("R2", R2), BLOCK_R2)
    need1, need2 = out1 is not None, out2 is not None
    TILES_B, TILES_D = T.ceildiv(B, BLOCK_B), T.ceildiv(D, BLOCK_D)
    tiles, splits = T.dynamic("tiles"), T.dynamic("splits")

    @T.prim_func
    def kernel(
        g: T.Tensor((A, C, B, D), dtype),
        wa1: T.Tensor(wa1_shape, dtype),
        wb1: T.Tensor(wb1_shape, dtype),
        wa2: T.Tensor(wa2_shape, dtype),
        wb2: T.Tensor(wb2_shape, dtype),
        parts1: T.Tensor((tiles, A, B), out1 or "float32"),
        parts2: T.Tensor((splits, C, D), out2 or "float32"),
        scale1: T.float32,
        scale2: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(C, BLOCK_C) * TILES_D, T.ceildiv(A, SPAN) * TILES_B, threads=config.threads) as (
            pid_t,
            pid_s,
        ):
            c0, d0 = pid_t // TILES_D * BLOCK_C, pid_t % TILES_D * BLOCK_D
            a0, b0 = pid_s // TILES_B * SPAN, pid_s % TILES_B * BLOCK_B
            grad = dsl.shared((BLOCK_C, BLOCK_B, BLOCK_D), dtype)
            if need1:
                w2 = dsl.shared((BLOCK_C, BLOCK_D), "float32")
                by_b = dsl.fragment((BLOCK_B, TILE))
                sum1 = dsl.fragment((BLOCK_B,))
                if not dsl.cpu:
                    T.annotate_layout({by_b: by_warp(dsl, by_b, config.threads)})
                load_factor(dsl, wa2, wb2, BLOCK_R2, w2, config.threads, lambda i: c0 + i, lambda j: d0 + j)
            if need2:
                w1 = dsl.shared((SPAN, BLOCK_B), "float32")
                acc = dsl.fragment((BLOCK_B, TILE))
                sum2 = dsl.fragment((TILE,))
                if not dsl.cpu:
                    T.annotate_layout({acc: by_warp(dsl, acc, config.threads)})
                load_factor(dsl, wa1, wb1, BLOCK_R1, w1, config.threads, lambda i: a0 + i, lambda j: b0 + j)
                T.clear(acc)
            # The last span may pass the end: its w1 is zero there, and G's last rows are read again.
            for step in dsl.pipelined(SPAN, config.stages):
                T.copy(g[T.min(a0 + step, A - 1), c0, b0, d0], grad)
                for b, k in dsl.parallel(BLOCK_B, TILE):
                    if need2:
                        acc[b, k] += T.cast(grad[k // BLOCK_D, b, k % BLOCK_D], "float32") * w1[step, b]
                    if need1:
                        by_b[b, k] = (
                            T.cast(grad[k // BLOCK_D, b, k % BLOCK_D], "float32") * w2[k // BLOCK_D, k % BLOCK_D]
                        )
                if need1:
                    sum_rows(dsl, by_b, sum1, 1, config.threads)
                    for b in dsl.parallel(BLOCK_B):
                        if a0 + step < A and b0 + b < B:
                            parts1[pid_t, a0 + step, b0 + b] = sum1[b] * scale1
            if need2:
                sum_rows(dsl, acc, sum2, 0, config.threads)
                for k in dsl.parallel(TILE):
                    if c0 + k // BLOCK_D < C and d0 + k % BLOCK_D < D:
                        parts2[pid_s, c0 + k // BLOCK_D, d0 + k % BLOCK_D] = sum2[k] * scale2

    return kernel


def by_warp(dsl: Dsl, tile: Any, threads: int) -> Any:
    """A layout of a register tile that gives each row to one warp, four neighbouring columns at a time to its lanes."""
    warps, columns = threads // 32, tile.shape[1] // 32

    def place(row: Any, column: Any) -> tuple[Any, Any]:
        thread = row % warps * 32 + column // 4 % 32
        return thread, row // warps * columns + column // 128 * 4 + column % 4

    return dsl.T.Fragment(tile.shape, forward_fn=place)


def sum_rows(dsl: Dsl, tile: Any, out: Any, dim: int, threads: int) -> Any:
    """out = the sums over axis `dim` of a tile laid out `by_warp`, exchanging a thread's sums all at once."""
    if dsl.cpu:
        return dsl.reduce_sum(tile, out, dim)
    return dsl.T.reduce_sum(
        tile, out, dim=dim, batch=tile.shape[0] // (threads // 32) if dim == 1 else tile.shape[1] // 32
    )
