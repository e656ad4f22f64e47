"""Diag-OFT's bypass in TileLang: factories in the sense of `kernels.common.tilelang_target`.

A program takes N blocks' channels, each padded from S to P: a tile is [BLOCK_T, N * P]. Blocks meet only their own matrix.
"""

from typing import Any

from kernels.common.cayley_solve_tilelang import solve_inline
from kernels.common.cayley_tilelang import finish_tile, load_blocks, rotation
from kernels.common.tilelang_target import Dsl, Size


def _load(
    dsl: Dsl, source: Any, start: Any, first: Any, tile: Any, size: int, width: int, count: Any, lanes: int = 1
) -> Any:
    """tile[BLOCK_T, N * P] = the tokens from `start` on of the blocks from `first` on, zero where there is nothing.

    With `lanes` of one block, a row holds that many tokens in turn instead.
    """
    T = dsl.T

    @T.macro
    def folded(source, start, first, tile):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(tile.shape[0], tile.shape[1]):
            row, col = start + i * lanes + j // width, first * size + j % width
            exists = (row < source.shape[0]) & (j % width < size)
            value = source[T.min(row, source.shape[0] - 1), T.min(col, source.shape[1] - 1)]
            tile[i, j] = T.if_then_else(exists, value, T.cast(0.0, tile.dtype))

    @T.macro
    def whole(source, start, first, tile):  # type: ignore[no-untyped-def]
        T.copy(source[start, first * size], tile)

    @T.macro
    def padded(source, start, first, tile):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(tile.shape[0], tile.shape[1]):
            exists = (start + i < source.shape[0]) & (first + j // width < count) & (j % width < size)
            row, col = T.min(start + i, source.shape[0] - 1), (first + j // width) * size + j % width
            tile[i, j] = T.if_then_else(exists, source[row, T.min(col, source.shape[1] - 1)], T.cast(0.0, tile.dtype))

    if lanes > 1:
        return folded(source, start, first, tile)
    return (whole if size == width else padded)(source, start, first, tile)


def _store(
    dsl: Dsl, tile: Any, out: Any, start: Any, first: Any, size: int, width: int, count: Any, lanes: int = 1
) -> Any:
    """The reverse of `_load`."""
    T = dsl.T

    @T.macro
    def folded(tile, out, start, first):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(tile.shape[0], tile.shape[1]):
            if start + i * lanes + j // width < out.shape[0] and j % width < size:
                out[start + i * lanes + j // width, first * size + j % width] = tile[i, j]

    @T.macro
    def whole(tile, out, start, first):  # type: ignore[no-untyped-def]
        T.copy(tile, out[start, first * size])

    @T.macro
    def padded(tile, out, start, first):  # type: ignore[no-untyped-def]
        for i, j in dsl.parallel(tile.shape[0], tile.shape[1]):
            if start + i < out.shape[0] and first + j // width < count and j % width < size:
                out[start + i, (first + j // width) * size + j % width] = tile[i, j]

    if lanes > 1:
        return folded(tile, out, start, first)
    return (whole if size == width else padded)(tile, out, start, first)


def _turn(
    dsl: Dsl, tile: Any, high: Any, low: Any, factor: Any, accs: Any, result: Any, width: int, tall: bool = False
) -> Any:
    """result[:, block] = factor · tile[:, block] @ (high + low)[block] for every block of the tile; `accs` has one each.

    Where there is only one matrix, all blocks of the tile are its.
    """
    T = dsl.T
    alone = int(high.shape[0]) == width
    blocks = tuple(range(int(tile.shape[1]) // width))

    # Full float32 products run on CUDA cores, for which `Dsl.gemm` takes whole tiles only.
    plain = not dsl.cpu and tile.dtype == "float32" and not dsl.target.tf32

    @T.macro
    def turned(tile, high, low, factor, result):  # type: ignore[no-untyped-def]
        for b in blocks:
            T.clear(accs[b])
            if plain:
                for n in T.serial(width):
                    for i, j in dsl.parallel(tile.shape[0], width):
                        accs[b][i, j] += tile[i, b * width + n] * high[(0 if alone else b * width) + n, j]
            else:
                first = 0 if alone else b * width
                dsl.gemm(tile[:, b * width : (b + 1) * width], high[first : first + width, :], accs[b], tall=tall)
                if tile.dtype != "float32":
                    dsl.gemm(tile[:, b * width : (b + 1) * width], low[first : first + width, :], accs[b], tall=tall)
        for b in blocks:
            for i, j in dsl.parallel(tile.shape[0], width):
                accs[b][i, j] *= factor[0]
            T.copy(accs[b], result[:, b * width : (b + 1) * width])

    return turned(tile, high, low, factor, result)


def forward(
    dsl: Dsl, *, K: Size, S: int, P: int, dtype: str, out_dtype: str, base_dtype: str | None,
    has_rescale: bool, has_shrink: bool, inline: bool, save: bool, config: Any,
) -> Any:  # fmt: skip
    """out of N blocks' channels over a span of tokens; tokens are on their way while D is solved."""
    T = dsl.T
    n_t, n_k = T.dynamic("n_t"), dsl.size("n_k", K)
    N, BLOCK_T, tiles = config.blocks, config.block_t, tuple(range(config.tiles))

    @T.prim_func
    def kernel(
        y: T.Tensor((n_t, n_k * S), dtype),
        blocks: T.Tensor((n_k, S, S), dtype),
        rescale: T.Tensor((n_k * S,), dtype),
        shrink: T.Tensor((1,), "float32"),
        base: T.Tensor((n_t, n_k * S), base_dtype or out_dtype),
        out: T.Tensor((n_t, n_k * S), out_dtype),
        delta: T.Tensor((n_k, S, S), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(
            T.ceildiv(n_k, N), T.ceildiv(n_t, BLOCK_T * config.tiles * config.steps), threads=config.threads
        ) as (
            pid_k,
            pid_t,
        ):
            ahead = [dsl.fragment((BLOCK_T, N * P), dtype) for t in tiles]
            tile = dsl.shared((BLOCK_T, N * P), dtype)
            result = dsl.shared((BLOCK_T, N * P), "float32" if base_dtype is not None else out_dtype)
            if config.swizzled and not dsl.cpu:
                dsl.swizzle(result)
            accs = [dsl.fragment((BLOCK_T, P)) for b in tuple(range(N))]
            d = dsl.shared((N * P, P), "float32")
            high, low = dsl.shared((N * P, P), dtype), dsl.shared((N * P, P), dtype)
            factor = dsl.shared((1,), "float32")
            for t in tiles:
                _load(dsl, y, (pid_t * config.steps * config.tiles + t) * BLOCK_T, pid_k * N, ahead[t], S, P, n_k)
            if inline:
                solve_inline(dsl, blocks, pid_k * N, shrink[0] if has_shrink else 1.0, d, S, P, config.threads)
                if save:
                    if pid_t == 0:
                        for i, m in dsl.parallel(N * P, P):
                            if i % P < S and m < S and pid_k * N + i // P < n_k:
                                delta[pid_k * N + i // P, i % P, m] = d[i, m]
            rotation(
                dsl,
                None if inline else delta,
                rescale if has_rescale else None,
                pid_k * N,
                d,
                high,
                low,
                factor,
                S,
                P,
                False,
            )
            for step in T.serial(config.steps):
                for t in tiles:
                    start = ((pid_t * config.steps + step) * config.tiles + t) * BLOCK_T
                    T.copy(ahead[t], tile)
                    if config.steps > 1:
                        if step + 1 < config.steps:
                            _load(dsl, y, start + config.tiles * BLOCK_T, pid_k * N, ahead[t], S, P, n_k)
                    _turn(dsl, tile, high, low, factor, accs, result, P, config.tall)
                    if base_dtype is not None:
                        for i, j in dsl.parallel(BLOCK_T, N * P):
                            if start + i < n_t and pid_k * N + j // P < n_k and j % P < S:
                                col = (pid_k * N + j // P) * S + j % P
                                out[start + i, col] = result[i, j] + T.cast(base[start + i, col], "float32")
                    else:
                        _store(dsl, result, out, start, pid_k * N, S, P, n_k)

    return kernel


def backward(
    dsl: Dsl, *, K: Size, S: int, P: int, dtype: str, blocks_dtype: str, has_rescale: bool,
    need_y: bool, need_blocks: bool, need_rescale: bool, split: bool, STEPS: int, config: Any,
) -> Any:  # fmt: skip
    """grad_y = g Mᵀ and P = yᵀ g of N blocks over a span of tokens, y and g read once."""
    T = dsl.T
    n_t, splits, n_k = T.dynamic("n_t"), T.dynamic("splits"), dsl.size("n_k", K)
    N, BLOCK_T, LANES = config.blocks, config.block_t, config.lanes
    # The tile's columns: of all blocks, or of one in all lanes.
    ROWS, COLS = BLOCK_T // LANES, N * LANES * P
    lanes = tuple(range(LANES))
    need_p = need_blocks or need_rescale

    @T.prim_func
    def kernel(
        grad: T.Tensor((n_t, n_k * S), dtype),
        y: T.Tensor((n_t, n_k * S), dtype),
        rescale: T.Tensor((n_k * S,), dtype),
        delta: T.Tensor((n_k, S, S), "float32"),
        parts: T.Tensor((splits, n_k, S, S), "float32"),
        grad_y: T.Tensor((n_t, n_k * S), dtype),
        grad_blocks: T.Tensor((n_k, S, S), blocks_dtype),
        grad_rescale: T.Tensor((n_k * S,), dtype),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(n_k, N), T.ceildiv(n_t, BLOCK_T * STEPS), threads=config.threads) as (pid_k, pid_t):
            g = dsl.shared((ROWS, COLS), dtype)
            tile = dsl.shared((ROWS, COLS), dtype)
            result = dsl.shared((ROWS, COLS), dtype)
            if config.swizzled and not dsl.cpu:
                dsl.swizzle(result)
            accs = [dsl.fragment((ROWS, P)) for b in tuple(range(N * LANES))]
            # Every pair of blocks (or lanes), of which the diagonal ones are P: enough rows for all warps of a product.
            if need_p:
                product = dsl.fragment((COLS, COLS))
            d = dsl.shared((N * P, P), "float32")
            high, low = dsl.shared((N * P, P), dtype), dsl.shared((N * P, P), dtype)
            factor = dsl.shared((1,), "float32")
            if LANES > 1:
                # Through registers: the first tokens are on their way before D is.
                g_next, y_next = dsl.fragment((ROWS, COLS), dtype), dsl.fragment((ROWS, COLS), dtype)
                _load(dsl, grad, pid_t * STEPS * BLOCK_T, pid_k * N, g_next, S, P, n_k, LANES)
                if need_p:
                    _load(dsl, y, pid_t * STEPS * BLOCK_T, pid_k * N, y_next, S, P, n_k, LANES)
            if need_y:
                rotation(dsl, delta, rescale if has_rescale else None, pid_k * N, d, high, low, factor, S, P, True)
            if need_p:
                T.clear(product)
            if LANES > 1:
                for step in T.serial(STEPS):
                    start = (pid_t * STEPS + step) * BLOCK_T
                    T.copy(g_next, g)
                    if need_p:
                        T.copy(y_next, tile)
                    if step + 1 < STEPS:
                        _load(dsl, grad, start + BLOCK_T, pid_k * N, g_next, S, P, n_k, LANES)
                        if need_p:
                            _load(dsl, y, start + BLOCK_T, pid_k * N, y_next, S, P, n_k, LANES)
                    if need_p:
                        dsl.gemm(tile, g, product, transpose_a=True)
                    if need_y:
                        _turn(dsl, g, high, low, factor, accs, result, P, config.tall)
                        _store(dsl, result, grad_y, start, pid_k * N, S, P, n_k, LANES)
            else:
                for step in dsl.pipelined(STEPS, min(config.stages, STEPS) if S == P else 0):
                    start = (pid_t * STEPS + step) * BLOCK_T
                    _load(dsl, grad, start, pid_k * N, g, S, P, n_k)
                    if need_p:
                        _load(dsl, y, start, pid_k * N, tile, S, P, n_k)
                        dsl.gemm(tile, g, product, transpose_a=True)
                    if need_y:
                        _turn(dsl, g, high, low, factor, accs, result, P, config.tall)
                        _store(dsl, result, grad_y, start, pid_k * N, S, P, n_k)
            if need_p:
                if split and LANES == 1:
                    for i, j in dsl.parallel(N * P, N * P):
                        if i // P == j // P and i % P < S and j % P < S and pid_k * N + i // P < n_k:
                            parts[pid_t, pid_k * N + i // P, i % P, j % P] = product[i, j]
                else:
                    each = dsl.shared((COLS, P), "float32")
                    for i, j in dsl.parallel(COLS, COLS):
                        if i // P == j // P:
                            each[i, j % P] = product[i, j]
                    if LANES > 1:
                        total = dsl.shared((P, P), "float32")
                        for i, j in dsl.parallel(P, P):
                            total[i, j] = each[i, j]
                            for lane in lanes[1:]:
                                total[i, j] += each[lane * P + i, j]
                    if split:
                        for i, j in dsl.parallel(P, P):
                            if i < S and j < S and pid_k < n_k:
                                parts[pid_t, pid_k, i, j] = total[i, j]
                    else:
                        load_blocks(dsl, delta, pid_k * N, d, S, P)
                        finish_tile(
                            dsl, total if LANES > 1 else each, d, rescale if has_rescale else None, grad_blocks,
                            grad_rescale, pid_k * N, S, P, need_blocks, need_rescale,
                        )  # fmt: skip

    return kernel
