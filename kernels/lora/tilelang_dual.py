"""The pass over a matrix that LoRA's backward passes share, in TileLang.

    right = G[M, N] @ right_factor[N, R], left = left_factor[M, R]ᵀ @ G        G read once

Both come as float32 partials, for a reduction that adds them in a fixed order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.errors import UnsupportedCase
from kernels.common.tilelang_ops import to_operand
from kernels.common.tilelang_target import Dsl, Size, Target, build, dtype_name, sizes, target_of
from kernels.common.views import cdiv, power_of_two, rounded_up, sm_count

MAX_RANK = 256
# TileLang's own split into loading and computing warps costs these short loops more than it hides.
PLAIN = ("disable_warp_specialized",)
# Where blocks of one launch do one thing or the other, what the two keep in shared memory has to overlap.
EITHER = (*PLAIN, "enable_aggressive_shared_memory_merge")


@dataclass(frozen=True)
class Dual:
    """Launch of `dual`: a block walks `span` rows of G, `block_m` at a time, over `block_n` columns."""

    block_m: int
    block_n: int
    span: int
    threads: int = 128
    stages: int = 3
    passes: tuple[str, ...] = PLAIN


def dual_kernel(
    dsl: Dsl, *, M: Size, N: Size, R: Size, BLOCK_R: int, dtype: str, left_dtype: str, parts_dtype: str,
    need_right: bool, need_left: bool, by_rank: bool, config: Dual,
) -> Any:  # fmt: skip
    """right_parts[n, M, R] = G[:, n] @ right[n] and left_parts[m] = scale · left[m]ᵀ @ G[m], with G[M, N] read once.

    `by_rank`: right is [R, N] and a left partial [R, N], else both are [N, R]. A left wider than G (float32 beside 16
    bits) is brought to G's dtype for the whole span at once, under one factor.
    """
    T = dsl.T
    M, N, R = dsl.size("M", M), dsl.size("N", N), dsl.size("R", R)
    strips, spans = T.dynamic("strips"), T.dynamic("spans")
    BLOCK_M, BLOCK_N, SPAN = config.block_m, config.block_n, config.span
    cast = left_dtype != dtype
    # A warp takes at least 16 rows of a product, so that many warps share out the columns of a few rows.
    tall = BLOCK_M * 2 >= config.threads

    @T.prim_func
    def kernel(
        g: T.Tensor((M, N), dtype),
        right: T.Tensor((R, N) if by_rank else (N, R), dtype),
        left: T.Tensor((M, R), left_dtype),
        right_parts: T.Tensor((strips, M, R), "float32"),
        left_parts: T.Tensor((spans, R, N) if by_rank else (spans, N, R), parts_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(N, BLOCK_N), T.ceildiv(M, SPAN), threads=config.threads) as (pid_n, pid_m):
            tile = dsl.shared((BLOCK_M, BLOCK_N), dtype)
            if need_right:
                right_tile = dsl.shared((BLOCK_R, BLOCK_N) if by_rank else (BLOCK_N, BLOCK_R), dtype)
                right_acc = dsl.fragment((BLOCK_M, BLOCK_R))
                if by_rank:
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
                    dsl.gemm(tile, right_tile, right_acc, transpose_b=by_rank, tall=tall)
                    T.copy(right_acc, right_parts[pid_n, m, 0])
                if need_left:
                    first = step * BLOCK_M if cast else 0
                    dsl.gemm(tile, left_tile[first : first + BLOCK_M, :], left_acc, transpose_a=True, tall=True)
            if need_left:
                for n, r in dsl.parallel(BLOCK_N, BLOCK_R):
                    left_acc[n, r] *= factor[0] * scale if cast else scale
                    if by_rank and r < R and pid_n * BLOCK_N + n < N:
                        left_parts[pid_m, r, pid_n * BLOCK_N + n] = left_acc[n, r]
                if not by_rank:
                    T.copy(left_acc, left_parts[pid_m, pid_n * BLOCK_N, 0])

    return kernel


def dual_config(
    n_m: int, n_n: int, n_r: int, dtype: torch.dtype, target: Target, sms: int, whole_span: bool = False
) -> Dual:
    """`dual`'s strip: wide and long enough to keep the partials small against G, while every SM has a block.

    `whole_span`: registers hold a rank-wide operand for the whole span at once, which bounds it.
    """
    if target.cpu:
        return Dual(16, 32, 64)
    rank = rank_block("lora", n_r, target)
    threads = 128
    if dtype is torch.float32 or rank > 64:
        block_m, block_n, waves = 32, 64 if rank <= 32 else 32, 2
    elif n_m * n_n <= 1 << 19:
        block_m, block_n, waves = 64, 64, 1
    elif n_m * n_n <= 1 << 23 and n_n < 4096:
        block_m, block_n, waves = 64, 128, 2 if rank <= 16 else 1
    elif rank <= 16:
        block_m, block_n, waves = 64, 256, 2
    else:
        # Wide strips, since each writes its own G @ right in float32 (12288×3072, rank 64: 39.8 µs, with half as wide 43.0).
        block_m, block_n, waves, threads = (64, 512, 1, 256) if target.shared_bytes > 1 << 17 else (32, 128, 1, 128)
    if target.arch != "sm_90a" and block_n == 256:
        block_m = 32
    steps = rounded_up(cdiv(cdiv(n_m, max(1, waves * sms // cdiv(n_n, block_n))), block_m))
    if whole_span:
        steps = max(1, min(steps, 64 * threads // (rank * block_m)))
    item = dtype.itemsize
    held = rank * (block_n + (steps * block_m if whole_span else 0)) * item
    stages = (target.shared_bytes - held) // (block_m * (block_n + rank) * item)
    return Dual(block_m, block_n, steps * block_m, threads, max(1, min(3, steps, stages)))


def dual(
    op: str,
    g: Tensor,
    right: Tensor,
    left: Tensor,
    needs: tuple[bool, ...],
    *,
    merging: bool,
    config: Dual | None,
    whole: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Float32 partials over G[M, N] of G @ right as [S, M, R] and of leftᵀ @ G, for `needs` = (right's, left's).

    left is [M, R]. `merging`: right is [R, N], the second partials are [S', R, N], and M is a constant of the kernel
    as it is of a layer; else right is [N, R], they are [S', N, R], and M may change from call to call. Where one span takes all
    of M, scale times the second is written to `whole` instead, and is no partial.
    """
    (n_m, n_n), n_r = g.shape, left.shape[1]
    target = target_of(g)
    whole_span = left.dtype is not g.dtype
    config = config or dual_config(n_m, n_n, n_r, g.dtype, target, sm_count(g.device), whole_span)
    strips, spans = cdiv(n_n, config.block_n), cdiv(n_m, config.span)
    left_shape = (spans, n_r, n_n) if merging else (spans, n_n, n_r)
    right_parts = g.new_empty((strips, n_m, n_r), dtype=torch.float32) if needs[0] else None
    whole = whole if spans == 1 and needs[1] else None
    left_parts = g.new_empty(left_shape, dtype=torch.float32) if needs[1] and whole is None else None
    written = left_parts if whole is None else whole.view(left_shape)
    run = build(
        dual_kernel,
        target,
        **sizes(target, N=n_n, R=n_r),
        M=n_m if merging and not target.cpu else None,
        BLOCK_R=rank_block(op, n_r, target),
        dtype=dtype_name(g.dtype),
        left_dtype=dtype_name(left.dtype),
        parts_dtype="float32" if written is None else dtype_name(written.dtype),
        need_right=needs[0],
        need_left=needs[1],
        by_rank=merging,
        config=config,
    )
    factor = 1.0 if whole is None else scale
    run(g, right if needs[0] else None, left if needs[1] else None, right_parts, written, factor)
    return right_parts, left_parts


def rank_block(op: str, n_r: int, target: Target) -> int:
    """The rank as the tiles hold it: a power of two, since TileLang finds no layout for the reductions of 48 columns.

    On the CPU one of four sizes, so that few builds serve every rank.
    """
    if n_r > MAX_RANK:
        raise UnsupportedCase(
            f"{op}: rank {n_r} is above {MAX_RANK}, the most that the TileLang kernels hold in a tile"
        )
    if target.cpu:
        return next(size for size in (16, 64, 128, 256) if n_r <= size)
    return power_of_two(n_r, 16)
