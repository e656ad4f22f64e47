"""LoHa's TileLang kernels of the bypass through pairs of ranks p = (r, s), P of them (see kernels/loha/pairs.py).

Factories in the sense of `kernels.common.tilelang_target`. The steps, their names and their scaling of float16 are
those of triton_pairs.py.
"""

from typing import Any

from kernels.common.tilelang_ops import store_tile
from kernels.common.tilelang_target import Dsl, Size


def _exponent(T: Any, top: Any, log: int) -> Any:
    """The bits of the power of two at or under `top`, kept within float32's middle; of 2^log for a top of 0."""
    bounded = T.if_then_else(top > 0.0, T.min(T.max(top, 1e-30), 1e30), 2.0**log)
    return T.reinterpret(bounded, "int32") & 0x7F800000


def factor_of(T: Any, top: Any, log: int) -> Any:
    """The power of two that a row with this largest entry is divided by to bring it into [2^log, 2^(log+1))."""
    return T.reinterpret(_exponent(T, top, log), "float32") * 2.0**-log


def inverse_of(T: Any, top: Any, log: int) -> Any:
    """1 / factor_of(top)."""
    return T.reinterpret(0x7F000000 - _exponent(T, top, log), "float32") * 2.0**log


def expand(dsl: Dsl, *, I: Size, O: Size, R: Size, RANK: int, dtype: str, config: Any) -> Any:
    """d[p, i] = down1[r, i] · down2[s, i] / factors[0, p] and u[p, o] = up1[o, r] · up2[o, s] / factors[1, p].

    Each block looks for the largest entry of every rank by itself, with both factors' loads in flight at once.
    """
    T = dsl.T
    I, O, R = dsl.size("I", I), dsl.size("O", O), dsl.size("R", R)
    BLOCK_N, CHUNK = config.block_n, config.chunk
    scaled = dtype == "float16"
    P = RANK * RANK

    def fill(first: Any, f1: Any, f2: Any, out: Any, factors: Any, row: int) -> Any:
        by_rank = row == 0
        count = f1.shape[1] if by_rank else f1.shape[0]
        chunk_shape = (RANK, CHUNK) if by_rank else (CHUNK, RANK)
        tile_shape = (RANK, BLOCK_N) if by_rank else (BLOCK_N, RANK)

        @T.macro
        def load(f, first, tile):  # type: ignore[no-untyped-def]
            if by_rank:
                T.copy(f[0, first], tile)
            else:
                T.copy(f[first, 0], tile)

        @T.macro
        def find_top(chunk, most):  # type: ignore[no-untyped-def]
            for i, j in dsl.parallel(*chunk_shape):
                value = T.abs(T.cast(chunk[i, j], "float32"))
                most[i, j] = T.max(most[i, j], T.if_then_else(value <= 65504.0, value, 0.0))

        @T.macro
        def block(first):  # type: ignore[no-untyped-def]
            tile1 = dsl.shared(tile_shape, dtype)
            tile2 = dsl.shared(tile_shape, dtype)
            pairs_tile = dsl.shared((P, BLOCK_N), dtype)
            top1 = dsl.shared((RANK,), "float32")
            top2 = dsl.shared((RANK,), "float32")
            inverse1 = dsl.shared((RANK,), "float32")
            inverse2 = dsl.shared((RANK,), "float32")
            load(f1, first, tile1)
            load(f2, first, tile2)
            if scaled:
                chunk1 = dsl.fragment(chunk_shape, dtype)
                chunk2 = dsl.fragment(chunk_shape, dtype)
                most1 = dsl.fragment(chunk_shape)
                most2 = dsl.fragment(chunk_shape)
                top = dsl.fragment((RANK,))
                T.clear(most1)
                T.clear(most2)
                for step in T.serial(T.ceildiv(count, CHUNK)):
                    load(f1, step * CHUNK, chunk1)
                    load(f2, step * CHUNK, chunk2)
                    find_top(chunk1, most1)
                    find_top(chunk2, most2)
                dsl.reduce_max(most1, top, 1 if by_rank else 0)
                T.copy(top, top1)
                dsl.reduce_max(most2, top, 1 if by_rank else 0)
                T.copy(top, top2)
                for r in dsl.parallel(RANK):
                    inverse1[r] = inverse_of(T, top1[r], 6)
                    inverse2[r] = inverse_of(T, top2[r], 7)
            for p, n in dsl.parallel(P, BLOCK_N):
                value1 = T.cast(tile1[p // RANK, n] if by_rank else tile1[n, p // RANK], "float32")
                value2 = T.cast(tile2[p % RANK, n] if by_rank else tile2[n, p % RANK], "float32")
                if scaled:
                    pairs_tile[p, n] = T.cast((value1 * inverse1[p // RANK]) * (value2 * inverse2[p % RANK]), dtype)
                else:
                    pairs_tile[p, n] = T.cast(value1 * value2, dtype)
            T.copy(pairs_tile, out[0, first])
            if first == 0:
                for p in dsl.parallel(P):
                    if scaled:
                        factors[row, p] = factor_of(T, top1[p // RANK], 6) * factor_of(T, top2[p % RANK], 7)
                    else:
                        factors[row, p] = 1.0

        return block(first)

    @T.prim_func
    def kernel(
        down1: T.Tensor((R, I), dtype),
        down2: T.Tensor((R, I), dtype),
        up1: T.Tensor((O, R), dtype),
        up2: T.Tensor((O, R), dtype),
        d: T.Tensor((P, I), dtype),
        u: T.Tensor((P, O), dtype),
        factors: T.Tensor((2, P), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_N) + T.ceildiv(O, BLOCK_N), threads=config.threads) as pid:
            if pid < T.ceildiv(I, BLOCK_N):
                fill(pid * BLOCK_N, down1, down2, d, factors, 0)
            else:
                fill((pid - T.ceildiv(I, BLOCK_N)) * BLOCK_N, up1, up2, u, factors, 1)

    return kernel


def project(dsl: Dsl, *, N: Size, P: int, dtype: str, config: Any) -> Any:
    """parts[s, T, P] = (a[:, s] @ pairs[:, s]ᵀ) · both factors[p], and each tile's largest finite |value| in tops."""
    T = dsl.T
    tokens, N, splits, tiles = T.dynamic("tokens"), dsl.size("N", N), T.dynamic("splits"), T.dynamic("tiles")
    BLOCK_T, BLOCK_P, BLOCK_N, SPAN = config.block_t, config.block_p, config.block_n, config.span
    scaled = dtype == "float16"

    @T.prim_func
    def kernel(
        a: T.Tensor((tokens, N), dtype),
        pairs: T.Tensor((P, N), dtype),
        factors: T.Tensor((2, P), "float32"),
        parts: T.Tensor((splits, tokens, P), "float32"),
        tops: T.Tensor((splits, tiles, P // BLOCK_P), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(P // BLOCK_P, T.ceildiv(tokens, BLOCK_T), T.ceildiv(N, SPAN), threads=config.threads) as (
            pid_p,
            pid_t,
            pid_s,
        ):
            a_tile = dsl.shared((BLOCK_T, BLOCK_N), dtype)
            pairs_tile = dsl.shared((BLOCK_P, BLOCK_N), dtype)
            acc = dsl.fragment((BLOCK_T, BLOCK_P))
            T.clear(acc)
            for step in dsl.pipelined(SPAN // BLOCK_N, config.stages):
                n = pid_s * SPAN + step * BLOCK_N
                T.copy(a[pid_t * BLOCK_T, n], a_tile)
                T.copy(pairs[pid_p * BLOCK_P, n], pairs_tile)
                dsl.gemm(a_tile, pairs_tile, acc, transpose_b=True)
            if scaled:
                row_top = dsl.fragment((BLOCK_T,))
                tops_tile = dsl.shared((BLOCK_T,), "float32")
                finite = dsl.fragment((BLOCK_T,))
                top = dsl.fragment((1,))
                for t, p in dsl.parallel(BLOCK_T, BLOCK_P):
                    acc[t, p] *= factors[0, pid_p * BLOCK_P + p] * factors[1, pid_p * BLOCK_P + p]
                T.reduce_absmax(acc, row_top, dim=1)
                # A row with an inf says nothing about the others' range; NaN is passed over by the maximum.
                T.copy(row_top, tops_tile)
                for t in dsl.parallel(BLOCK_T):
                    finite[t] = T.if_then_else(tops_tile[t] <= 3e38, tops_tile[t], 0.0)
                T.reduce_max(finite, top, dim=0)
                tops[pid_s, pid_t, pid_p] = top[0]
            T.copy(acc, parts[pid_s, pid_t * BLOCK_T, pid_p * BLOCK_P])

    return kernel


def combine(dsl: Dsl, *, splits: int, dtype: str, need_low: bool, config: Any) -> Any:
    """high + low = Σ_s parts[s] / factor to twice the precision of their dtype, in the order of s."""
    T = dsl.T
    size, count = T.dynamic("size"), T.dynamic("count")
    scaled = dtype == "float16"
    WIDTH, BLOCK, TOPS = 4, config.block, 256

    @T.prim_func
    def kernel(
        parts: T.Tensor((splits, size, WIDTH), "float32"),
        tops: T.Tensor((count,), "float32"),
        high: T.Tensor((size, WIDTH), dtype),
        low: T.Tensor((size, WIDTH), dtype),
        factor: T.Tensor((1,), "float32"),
    ):
        with T.Kernel(T.ceildiv(size, BLOCK), threads=config.threads) as pid:
            value = dsl.fragment((BLOCK, WIDTH))
            top = dsl.shared((1,), "float32")
            if scaled:
                each = dsl.fragment((TOPS,))
                most = dsl.fragment((1,))
                T.clear(each)
                for step in T.serial(T.ceildiv(count, TOPS)):
                    for k in dsl.parallel(TOPS):
                        if step * TOPS + k < count:
                            each[k] = T.max(each[k], tops[step * TOPS + k])
                T.reduce_max(each, most, dim=0)
                # No sum of `splits` terms is above their number times the largest.
                top[0] = most[0] * float(splits)
            T.clear(value)
            for s in T.unroll(splits):
                for n, lane in dsl.parallel(BLOCK, WIDTH):
                    if pid * BLOCK + n < size:
                        value[n, lane] += parts[s, pid * BLOCK + n, lane]
            if scaled:
                for n, lane in dsl.parallel(BLOCK, WIDTH):
                    value[n, lane] *= inverse_of(T, top[0], 14)
            for n, lane in dsl.parallel(BLOCK, WIDTH):
                if pid * BLOCK + n < size:
                    high[pid * BLOCK + n, lane] = T.cast(value[n, lane], dtype)
            if need_low:
                for n, lane in dsl.parallel(BLOCK, WIDTH):
                    if pid * BLOCK + n < size:
                        low[pid * BLOCK + n, lane] = T.cast(
                            value[n, lane] - T.cast(T.cast(value[n, lane], dtype), "float32"), dtype
                        )
            if pid == 0:
                factor[0] = factor_of(T, top[0], 14) if scaled else 1.0

    return kernel


def apply(
    dsl: Dsl, *, N: Size, P: int, dtype: str, out_dtype: str, base_dtype: str | None, has_low: bool, config: Any
) -> Any:
    """out[T, N] = scale · factor · (high + low) @ pairs (+ base)."""
    T = dsl.T
    tokens, N = T.dynamic("tokens"), dsl.size("N", N)
    BLOCK_T, BLOCK_N, BLOCK_P = config.block_t, config.block_n, config.block_p

    @T.prim_func
    def kernel(
        high: T.Tensor((tokens, P), dtype),
        low: T.Tensor((tokens, P), dtype),
        factor: T.Tensor((1,), "float32"),
        pairs: T.Tensor((P, N), dtype),
        base: T.Tensor((tokens, N), base_dtype or out_dtype),
        out: T.Tensor((tokens, N), out_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(N, BLOCK_N), T.ceildiv(tokens, BLOCK_T), threads=config.threads) as (pid_n, pid_t):
            high_tile = dsl.shared((BLOCK_T, BLOCK_P), dtype)
            pairs_tile = dsl.shared((BLOCK_P, BLOCK_N), dtype)
            acc = dsl.fragment((BLOCK_T, BLOCK_N))
            T.clear(acc)
            if has_low:
                low_tile = dsl.shared((BLOCK_T, BLOCK_P), dtype)
                for step in dsl.pipelined(P // BLOCK_P, config.stages):
                    T.copy(pairs[step * BLOCK_P, pid_n * BLOCK_N], pairs_tile)
                    T.copy(high[pid_t * BLOCK_T, step * BLOCK_P], high_tile)
                    T.copy(low[pid_t * BLOCK_T, step * BLOCK_P], low_tile)
                    dsl.gemm(high_tile, pairs_tile, acc)
                    dsl.gemm(low_tile, pairs_tile, acc)
            else:
                for step in dsl.pipelined(P // BLOCK_P, config.stages):
                    T.copy(pairs[step * BLOCK_P, pid_n * BLOCK_N], pairs_tile)
                    T.copy(high[pid_t * BLOCK_T, step * BLOCK_P], high_tile)
                    dsl.gemm(high_tile, pairs_tile, acc)
            for t, n in dsl.parallel(BLOCK_T, BLOCK_N):
                acc[t, n] *= factor[0] * scale
            store_tile(
                dsl, acc, base if base_dtype is not None else None, out, pid_t * BLOCK_T, pid_n * BLOCK_N, config.staged
            )

    return kernel


def contract(
    dsl: Dsl, *, N: Size, R: Size, RANK: int, dtype: str, by_rank: bool, needs: tuple[bool, bool], config: Any
) -> Any:
    """Partial gradients, of f1[r, n] = Σ_s tile · f2[s, n] and of f2[s, n] = Σ_r tile · f1[r, n], as `needs` asks.

    tile[n, p] = (a[t]ᵀ @ z[t]) · z_factor / factors[p] over the t-th SPAN tokens. f1, f2 and a partial are [R, N]
    (`by_rank`) or [N, R]; parts holds f1's and f2's of the first span, then of the next.
    """
    T = dsl.T
    tokens, N, R, count = T.dynamic("tokens"), dsl.size("N", N), dsl.size("R", R), T.dynamic("count")
    BLOCK_T, BLOCK_N, SPAN = config.block_t, config.block_n, config.span
    P = RANK * RANK
    need1, need2 = needs
    shape = (R, N) if by_rank else (N, R)

    @T.macro
    def load(f, first, tile):  # type: ignore[no-untyped-def]
        if by_rank:
            T.copy(f[0, first], tile)
        else:
            T.copy(f[first, 0], tile)

    @T.macro
    def store(sums, parts, part, first):  # type: ignore[no-untyped-def]
        for n, r in dsl.parallel(BLOCK_N, RANK):
            if first + n < N and r < R:
                if by_rank:
                    parts[part, r, first + n] = sums[n, r]
                else:
                    parts[part, first + n, r] = sums[n, r]

    @T.prim_func
    def kernel(
        a: T.Tensor((tokens, N), dtype),
        z: T.Tensor((tokens, P), dtype),
        z_factor: T.Tensor((1,), "float32"),
        factors: T.Tensor((P,), "float32"),
        f1: T.Tensor(shape, dtype),
        f2: T.Tensor(shape, dtype),
        parts: T.Tensor((count, *shape), "float32"),
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(N, BLOCK_N), T.ceildiv(tokens, SPAN), threads=config.threads) as (pid_n, pid_s):
            a_tile = dsl.shared((BLOCK_T, BLOCK_N), dtype)
            z_tile = dsl.shared((BLOCK_T, P), dtype)
            acc = dsl.fragment((BLOCK_N, P))
            grad = dsl.shared((BLOCK_N, P), "float32")
            tile = dsl.shared((RANK, BLOCK_N) if by_rank else (BLOCK_N, RANK), dtype)
            sums = dsl.fragment((BLOCK_N, RANK))
            T.clear(acc)
            for step in dsl.pipelined(SPAN // BLOCK_T, config.stages):
                t = pid_s * SPAN + step * BLOCK_T
                T.copy(a[t, pid_n * BLOCK_N], a_tile)
                T.copy(z[t, 0], z_tile)
                dsl.gemm(a_tile, z_tile, acc, transpose_a=True)
            for n, p in dsl.parallel(BLOCK_N, P):
                acc[n, p] *= z_factor[0] / factors[p]
            T.copy(acc, grad)
            if need1:
                load(f2, pid_n * BLOCK_N, tile)
                T.clear(sums)
                for s in T.serial(RANK):
                    for n, r in dsl.parallel(BLOCK_N, RANK):
                        sums[n, r] += grad[n, r * RANK + s] * T.cast(tile[s, n] if by_rank else tile[n, s], "float32")
                store(sums, parts, pid_s * (need1 + need2), pid_n * BLOCK_N)
            if need2:
                load(f1, pid_n * BLOCK_N, tile)
                T.clear(sums)
                for r in T.serial(RANK):
                    for n, s in dsl.parallel(BLOCK_N, RANK):
                        sums[n, s] += grad[n, r * RANK + s] * T.cast(tile[r, n] if by_rank else tile[n, r], "float32")
                store(sums, parts, pid_s * (need1 + need2) + need1, pid_n * BLOCK_N)

    return kernel
