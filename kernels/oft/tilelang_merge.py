"""Diag-OFT's merge in TileLang: factories in the sense of `kernels.common.tilelang_target`.

A block is padded from S to P rows and columns inside the tiles. Sums over more than one program go to float32 partials.
"""

from typing import Any

from kernels.common.cayley_solve_tilelang import solve_inline, solve_scalars
from kernels.common.cayley_tilelang import finish_scalars, finish_tile, load_blocks, rotation
from kernels.common.tilelang_target import Dsl, Size


def _weighted(dsl: Dsl, weights: Any, tiles: Any, lane: Any, v: Any) -> Any:
    """Σ_n weights[n] · tiles[n][lane, v] in float32."""
    value = weights[0] * dsl.T.cast(tiles[0][lane, v], "float32")
    for weight, tile in zip(weights[1:], tiles[1:], strict=True):
        value = value + weight * dsl.T.cast(tile[lane, v], "float32")
    return value


def scalars(
    dsl: Dsl, *, I: Size, S: int, WIDTH: int, dtype: str, out_dtype: str, base_dtype: str | None,
    has_rescale: bool, has_shrink: bool, save: bool, config: Any,
) -> Any:  # fmt: skip
    """ΔW of one block of up to 4 rows: D in scalars, rows as vectors of WIDTH columns, I of them; no tensor core."""
    T = dsl.T
    n_k, n_o, I = T.dynamic("n_k"), T.dynamic("n_o"), dsl.size("I", I)
    LANES = config.block_i // WIDTH
    each, tiles = tuple(range(S)), tuple(range(config.tiles))

    @T.prim_func
    def kernel(
        blocks: T.Tensor((n_k, S, S), dtype),
        weight: T.Tensor((n_o, I, WIDTH), dtype),
        rescale: T.Tensor((n_o,), dtype),
        shrink: T.Tensor((1,), "float32"),
        base: T.Tensor((n_o, I, WIDTH), base_dtype or out_dtype),
        out: T.Tensor((n_o, I, WIDTH), out_dtype),
        delta: T.Tensor((n_k, S, S), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, LANES * config.tiles), n_k, threads=config.threads) as (pid_i, pid_k):
            rows = [[dsl.fragment((LANES, WIDTH), dtype) for n in each] for t in tiles]
            value = dsl.fragment((LANES, WIDTH), out_dtype)
            d = T.alloc_local((S * S,), "float32")
            for t in tiles:
                for n in each:
                    T.copy(weight[pid_k * S + n, (pid_i * config.tiles + t) * LANES, 0], rows[t][n])
            solve_scalars(dsl, blocks, pid_k, shrink[0] if has_shrink else 1.0, d, S)
            if save:
                if pid_i == 0:
                    for n in each:
                        for m in each:
                            delta[pid_k, n, m] = d[n * S + m]
            if has_rescale:
                for m in each:
                    for n in each:
                        d[n * S + m] *= T.cast(rescale[pid_k * S + m], "float32")
                    d[m * S + m] += T.cast(rescale[pid_k * S + m], "float32") - 1.0
            if base_dtype is not None:
                added = dsl.fragment((LANES, WIDTH), base_dtype)
            for t in tiles:
                for m in each:
                    if base_dtype is not None:
                        T.copy(base[pid_k * S + m, (pid_i * config.tiles + t) * LANES, 0], added)
                    for lane, v in dsl.parallel(LANES, WIDTH):
                        total = _weighted(dsl, [d[n * S + m] for n in each], rows[t], lane, v)
                        value[lane, v] = total + T.cast(added[lane, v], "float32") if base_dtype is not None else total
                    T.copy(value, out[pid_k * S + m, (pid_i * config.tiles + t) * LANES, 0])

    return kernel


def scalars_backward(
    dsl: Dsl, *, I: Size, S: int, WIDTH: int, dtype: str, blocks_dtype: str, has_rescale: bool,
    need_blocks: bool, need_weight: bool, need_rescale: bool, split: bool, config: Any,
) -> Any:  # fmt: skip
    """grad_W and P of one block of up to 4 rows over a span of columns; the gradients themselves where that is all of them."""
    T = dsl.T
    n_k, n_o, splits, I = T.dynamic("n_k"), T.dynamic("n_o"), T.dynamic("splits"), dsl.size("I", I)
    LANES = config.block_i // WIDTH
    each, tiles = tuple(range(S)), tuple(range(config.tiles))
    need_p = need_blocks or need_rescale

    @T.macro
    def gather(sums, product):  # type: ignore[no-untyped-def]
        lanes = dsl.shared((S * S, LANES), "float32")
        part = dsl.fragment((S * S, LANES))
        total = dsl.fragment((S * S,))
        shared_total = dsl.shared((S * S,), "float32")
        for i in tuple(range(S * S)):
            for lane in dsl.parallel(LANES):
                lanes[i, lane] = sums[i][lane]
        T.copy(lanes, part)
        dsl.reduce_sum(part, total, dim=1)
        T.copy(total, shared_total)
        for i in tuple(range(S * S)):
            product[i] = shared_total[i]

    @T.prim_func
    def kernel(
        grad: T.Tensor((n_o, I, WIDTH), dtype),
        weight: T.Tensor((n_o, I, WIDTH), dtype),
        rescale: T.Tensor((n_o,), dtype),
        delta: T.Tensor((n_k, S, S), "float32"),
        parts: T.Tensor((splits, n_k, S, S), "float32"),
        grad_blocks: T.Tensor((n_k, S, S), blocks_dtype),
        grad_weight: T.Tensor((n_o, I, WIDTH), dtype),
        grad_rescale: T.Tensor((n_o,), dtype),
        steps: T.int32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, LANES * config.tiles * steps), n_k, threads=config.threads) as (pid_i, pid_k):
            g = [[dsl.fragment((LANES, WIDTH), dtype) for n in each] for t in tiles]
            w = [[dsl.fragment((LANES, WIDTH), dtype) for n in each] for t in tiles]
            value = dsl.fragment((LANES, WIDTH), dtype)
            sums = [dsl.fragment((LANES,)) for i in tuple(range(S * S))]
            d, r = T.alloc_local((S * S,), "float32"), T.alloc_local((S,), "float32")
            total, result = T.alloc_local((S * S,), "float32"), T.alloc_local((S * S,), "float32")
            for n in each:
                r[n] = T.cast(rescale[pid_k * S + n], "float32") if has_rescale else 1.0
                for m in each:
                    d[n * S + m] = delta[pid_k, n, m]
                    if need_p:
                        T.clear(sums[n * S + m])
            for step in T.serial(steps):
                for t in tiles:
                    first = ((pid_i * steps + step) * config.tiles + t) * LANES
                    for n in each:
                        T.copy(grad[pid_k * S + n, first, 0], g[t][n])
                        if need_p:
                            T.copy(weight[pid_k * S + n, first, 0], w[t][n])
                for t in tiles:
                    first = ((pid_i * steps + step) * config.tiles + t) * LANES
                    if need_p:
                        for lane in dsl.parallel(LANES):
                            for v in T.unroll(WIDTH):
                                for n in each:
                                    for m in each:
                                        sums[n * S + m][lane] += T.cast(w[t][n][lane, v], "float32") * T.cast(
                                            g[t][m][lane, v], "float32"
                                        )
                    for n in each:
                        if need_weight:
                            for lane, v in dsl.parallel(LANES, WIDTH):
                                turned = _weighted(dsl, [d[n * S + m] * r[m] for m in each], g[t], lane, v)
                                value[lane, v] = turned + (r[n] - 1.0) * T.cast(g[t][n][lane, v], "float32")
                            T.copy(value, grad_weight[pid_k * S + n, first, 0])
            if need_p:
                gather(sums, total)
                if split:
                    for n in each:
                        for m in each:
                            parts[pid_i, pid_k, n, m] = total[n * S + m]
                else:
                    for m in each:
                        if need_rescale:
                            r_grad = T.alloc_var("float32")
                            r_grad = total[m * S + m]
                            for n in each:
                                r_grad += d[n * S + m] * total[n * S + m]
                            grad_rescale[pid_k * S + m] = r_grad
                        for n in each:
                            total[n * S + m] *= r[m]
                    if need_blocks:
                        finish_scalars(dsl, total, d, result, S)
                        for n in each:
                            for m in each:
                                grad_blocks[pid_k, n, m] = result[n * S + m]

    return kernel


def dots(
    dsl: Dsl, *, I: Size, S: int, P: int, dtype: str, out_dtype: str, base_dtype: str | None,
    has_rescale: bool, has_shrink: bool, inline: bool, save: bool, config: Any,
) -> Any:  # fmt: skip
    """ΔW of one block: its columns are on their way while D is solved, then Mᵀ @ tile by tensor cores."""
    T = dsl.T
    n_k, n_o, I = T.dynamic("n_k"), T.dynamic("n_o"), dsl.size("I", I)
    BLOCK_I, tiles = config.block_i, tuple(range(config.tiles))

    @T.prim_func
    def kernel(
        blocks: T.Tensor((n_k, S, S), dtype),
        weight_rows: T.Tensor(dsl.declared((n_k, S, I), (n_o, I)), dtype),
        rescale: T.Tensor((n_o,), dtype),
        shrink: T.Tensor((1,), "float32"),
        base_rows: T.Tensor(dsl.declared((n_k, S, I), (n_o, I)), base_dtype or out_dtype),
        out_rows: T.Tensor(dsl.declared((n_k, S, I), (n_o, I)), out_dtype),
        delta: T.Tensor((n_k, S, S), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        weight, out = dsl.reshaped(weight_rows, (n_k, S, I)), dsl.reshaped(out_rows, (n_k, S, I))
        base = dsl.reshaped(base_rows, (n_k, S, I))
        with T.Kernel(T.ceildiv(I, BLOCK_I * config.tiles), n_k, threads=config.threads) as (pid_i, pid_k):
            ahead = [dsl.fragment((P, BLOCK_I), dtype) for t in tiles]
            tile = dsl.shared((P, BLOCK_I), dtype)
            result = dsl.shared((P, BLOCK_I), out_dtype)
            acc = dsl.fragment((P, BLOCK_I))
            d = dsl.shared((P, P), "float32")
            high, low = dsl.shared((P, P), dtype), dsl.shared((P, P), dtype)
            factor = dsl.shared((1,), "float32")
            for t in tiles:
                T.copy(weight[pid_k, 0, (pid_i * config.tiles + t) * BLOCK_I], ahead[t])
            if inline:
                solve_inline(dsl, blocks, pid_k, shrink[0] if has_shrink else 1.0, d, S, P, config.threads)
                if save:
                    if pid_i == 0:
                        for n, m in dsl.parallel(P, P):
                            if n < S and m < S:
                                delta[pid_k, n, m] = d[n, m]
            rotation(
                dsl,
                None if inline else delta,
                rescale if has_rescale else None,
                pid_k,
                d,
                high,
                low,
                factor,
                S,
                P,
                True,
            )
            for t in tiles:
                first = (pid_i * config.tiles + t) * BLOCK_I
                T.copy(ahead[t], tile)
                T.clear(acc)
                dsl.gemm(high, tile, acc)
                if dtype != "float32":
                    dsl.gemm(low, tile, acc)
                for n, i in dsl.parallel(P, BLOCK_I):
                    acc[n, i] *= factor[0]
                if base_dtype is not None:
                    for n, i in dsl.parallel(P, BLOCK_I):
                        if n < S and first + i < I:
                            acc[n, i] += T.cast(base[pid_k, n, first + i], "float32")
                T.copy(acc, result)
                T.copy(result, out[pid_k, 0, first])

    return kernel


def dots_backward(
    dsl: Dsl, *, I: Size, S: int, P: int, dtype: str, blocks_dtype: str, has_rescale: bool,
    need_blocks: bool, need_weight: bool, need_rescale: bool, split: bool, STEPS: int, config: Any,
) -> Any:  # fmt: skip
    """grad_W = M G and P = W Gᵀ of one block over a span of columns, W and G read once."""
    T = dsl.T
    n_k, n_o, splits, I = T.dynamic("n_k"), T.dynamic("n_o"), T.dynamic("splits"), dsl.size("I", I)
    BLOCK_I = config.block_i
    need_p = need_blocks or need_rescale

    @T.prim_func
    def kernel(
        grad: T.Tensor((n_k, S, I), dtype),
        weight: T.Tensor((n_k, S, I), dtype),
        rescale: T.Tensor((n_o,), dtype),
        delta: T.Tensor((n_k, S, S), "float32"),
        parts: T.Tensor((splits, n_k, S, S), "float32"),
        grad_blocks: T.Tensor((n_k, S, S), blocks_dtype),
        grad_weight: T.Tensor((n_k, S, I), dtype),
        grad_rescale: T.Tensor((n_o,), dtype),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_I * STEPS), n_k, threads=config.threads) as (pid_i, pid_k):
            g = dsl.shared((P, BLOCK_I), dtype)
            w = dsl.shared((P, BLOCK_I), dtype)
            result = dsl.shared((P, BLOCK_I), dtype)
            acc = dsl.fragment((P, BLOCK_I))
            if need_p:
                product = dsl.fragment((P, P))
            d = dsl.shared((P, P), "float32")
            high, low = dsl.shared((P, P), dtype), dsl.shared((P, P), dtype)
            factor = dsl.shared((1,), "float32")
            if need_weight:
                rotation(dsl, delta, rescale if has_rescale else None, pid_k, d, high, low, factor, S, P, False)
            if need_p:
                T.clear(product)
            for step in dsl.pipelined(STEPS, min(config.stages, STEPS)):
                first = (pid_i * STEPS + step) * BLOCK_I
                T.copy(grad[pid_k, 0, first], g)
                if need_p:
                    T.copy(weight[pid_k, 0, first], w)
                    dsl.gemm(w, g, product, transpose_b=True)
                if need_weight:
                    T.clear(acc)
                    dsl.gemm(high, g, acc)
                    if dtype != "float32":
                        dsl.gemm(low, g, acc)
                    for n, i in dsl.parallel(P, BLOCK_I):
                        acc[n, i] *= factor[0]
                    T.copy(acc, result)
                    T.copy(result, grad_weight[pid_k, 0, first])
            if need_p:
                if split:
                    for n, m in dsl.parallel(P, P):
                        if n < S and m < S:
                            parts[pid_i, pid_k, n, m] = product[n, m]
                else:
                    total = dsl.shared((P, P), "float32")
                    T.copy(product, total)
                    load_blocks(dsl, delta, pid_k, d, S, P)
                    finish_tile(
                        dsl, total, d, rescale if has_rescale else None, grad_blocks, grad_rescale, pid_k, S, P,
                        need_blocks, need_rescale,
                    )  # fmt: skip

    return kernel
