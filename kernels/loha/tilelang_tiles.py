"""LoHa's bypass in TileLang through tiles of ΔW, for ranks whose pairs would cost more (see kernels/loha/pairs.py).

    forward   y[T, O] = x @ ΔWᵀ, grad_x[T, I] = G @ ΔW       ΔW's tile from the factors, cast, multiplied, dropped
    backward  ΔW's gradient Gᵀ @ x tile by tile into the factors' gradients   `factor_backward` in tilelang_impl.py

float16: a tile of ΔW that leaves float16's range is scaled by a power of two.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.tilelang_ops import store_tile, to_operand
from kernels.common.tilelang_target import Dsl, Size, Target, build, dtype_name, sizes, target_of


@dataclass(frozen=True)
class Tiles:
    """Launch of the product: the tile of y that a block makes, `block_k` columns of x at a time."""

    block_t: int
    block_n: int
    block_k: int
    threads: int = 128
    stages: int = 2
    passes: tuple[str, ...] = ("disable_warp_specialized",)


def tiles(
    dsl: Dsl, *, N: Size, K: Size, R: Size, BLOCK_R: int, dtype: str, out_dtype: str, base_dtype: str | None,
    by_rank: bool, config: Any,
) -> Any:  # fmt: skip
    """out[T, N] = scale · a[T, K] @ W[N, K]ᵀ (+ base), with W[n, k] = Σ_r f1[r, n] · h1[r, k] times that of 2.

    f1 and f2 are [R, N] and h1 and h2 [K, R] where `by_rank`, else [N, R] and [R, K].
    """
    T = dsl.T
    tokens, N, K, R = T.dynamic("tokens"), dsl.size("N", N), dsl.size("K", K), dsl.size("R", R)
    BLOCK_T, BLOCK_N, BLOCK_K = config.block_t, config.block_n, config.block_k
    scaled = dtype == "float16"
    f_shape, h_shape = ((R, N), (K, R)) if by_rank else ((N, R), (R, K))
    f_tile = (BLOCK_R, BLOCK_N) if by_rank else (BLOCK_N, BLOCK_R)
    h_tile = (BLOCK_K, BLOCK_R) if by_rank else (BLOCK_R, BLOCK_K)

    @T.macro
    def load(source, first, along_rank, tile):  # type: ignore[no-untyped-def]
        if along_rank:
            T.copy(source[0, first], tile)
        else:
            T.copy(source[first, 0], tile)

    @T.prim_func
    def kernel(
        a: T.Tensor((tokens, K), dtype),
        f1: T.Tensor(f_shape, dtype),
        h1: T.Tensor(h_shape, dtype),
        f2: T.Tensor(f_shape, dtype),
        h2: T.Tensor(h_shape, dtype),
        base: T.Tensor((tokens, N), base_dtype or out_dtype),
        out: T.Tensor((tokens, N), out_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(N, BLOCK_N), T.ceildiv(tokens, BLOCK_T), threads=config.threads) as (pid_n, pid_t):
            f1_tile = dsl.shared(f_tile, dtype)
            f2_tile = dsl.shared(f_tile, dtype)
            h1_tile = dsl.shared(h_tile, dtype)
            h2_tile = dsl.shared(h_tile, dtype)
            a_tile = dsl.shared((BLOCK_T, BLOCK_K), dtype)
            weight = dsl.shared((BLOCK_N, BLOCK_K), dtype)
            factor = dsl.shared((1,), "float32")
            product1 = dsl.fragment((BLOCK_N, BLOCK_K))
            product2 = dsl.fragment((BLOCK_N, BLOCK_K))
            acc = dsl.fragment((BLOCK_T, BLOCK_N))
            load(f1, pid_n * BLOCK_N, by_rank, f1_tile)
            load(f2, pid_n * BLOCK_N, by_rank, f2_tile)
            T.clear(acc)
            for step in dsl.pipelined(T.ceildiv(K, BLOCK_K), config.stages):
                T.copy(a[pid_t * BLOCK_T, step * BLOCK_K], a_tile)
                load(h1, step * BLOCK_K, not by_rank, h1_tile)
                load(h2, step * BLOCK_K, not by_rank, h2_tile)
                T.clear(product1)
                T.clear(product2)
                dsl.gemm(f1_tile, h1_tile, product1, transpose_a=by_rank, transpose_b=by_rank)
                dsl.gemm(f2_tile, h2_tile, product2, transpose_a=by_rank, transpose_b=by_rank)
                for n, k in dsl.parallel(BLOCK_N, BLOCK_K):
                    product1[n, k] *= product2[n, k]
                to_operand(dsl, product1, weight, factor)
                if scaled:
                    added = dsl.fragment((BLOCK_T, BLOCK_N))
                    T.clear(added)
                    dsl.gemm(a_tile, weight, added, transpose_b=True)
                    for t, n in dsl.parallel(BLOCK_T, BLOCK_N):
                        acc[t, n] += added[t, n] * factor[0]
                else:
                    dsl.gemm(a_tile, weight, acc, transpose_b=True)
            for t, n in dsl.parallel(BLOCK_T, BLOCK_N):
                acc[t, n] *= scale
            store_tile(dsl, acc, base if base_dtype is not None else None, out, pid_t * BLOCK_T, pid_n * BLOCK_N, True)

    return kernel


def tiles_config(n_t: int, dtype: torch.dtype, target: Target) -> Tiles:
    """The product's launch: wide in tokens, which share the tile of ΔW."""
    if target.cpu:
        return Tiles(16, 32, 32)
    if dtype is torch.float32:
        return Tiles(64, 32, 32, 256)
    return Tiles(64, 64, 64) if n_t <= 256 else Tiles(128, 64, 64, 256)


def product(
    a: Tensor,
    left: tuple[Tensor, Tensor],
    right: tuple[Tensor, Tensor],
    by_rank: bool,
    block_r: int,
    scale: float,
    base: Tensor | None,
    out: Tensor,
    config: Tiles | None = None,
) -> None:
    """out[T, N] = scale · a[T, K] @ W[N, K]ᵀ + base, with W from `left` and `right` as `tiles` takes them."""
    target = target_of(a)
    n_r, n_n = left[0].shape if by_rank else left[0].shape[::-1]
    run = build(
        tiles,
        target,
        **sizes(target, N=n_n, K=a.shape[1], R=n_r),
        BLOCK_R=block_r,
        dtype=dtype_name(a.dtype),
        out_dtype=dtype_name(out.dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        by_rank=by_rank,
        config=config or tiles_config(a.shape[0], a.dtype, target),
    )
    run(a, left[0], right[0], left[1], right[1], base, out, scale)
