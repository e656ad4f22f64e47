"""LoRA's merge in TileLang.

    ΔW[O, I] = scale · up[O, R] @ down[R, I]                      one launch, a strip of tiles a block
    grad_up = scale · G @ downᵀ, grad_down = scale · upᵀ @ G       G read once (`dual`, then one reduction), or twice
                                                                  in one launch, the second time from L2 (`Pair`)

Sums over more than one block go through float32 partials that a reduction adds in a fixed order: deterministic.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.common.tilelang_ops import reduce_partials, store_tile
from kernels.common.tilelang_target import Dsl, Size, Target, build, dtype_name, ready, ready_base, sizes, target_of
from kernels.common.views import sm_count
from kernels.lora.tilelang_dual import EITHER, PLAIN, Dual, dual, dual_config, rank_block


@dataclass(frozen=True)
class Merge:
    """Launch of the merge: a block writes `steps` tiles of ΔW, one below the other, `staged` through shared memory."""

    block_o: int
    block_i: int
    steps: int = 1
    threads: int = 128
    staged: bool = True
    passes: tuple[str, ...] = PLAIN


@dataclass(frozen=True)
class Pair:
    """Launch of the merge's backward on small G: row blocks of `block_m`, column blocks of `block_n`."""

    block_m: int
    block_n: int
    block_k: int
    threads: int = 128
    stages: int = 4
    passes: tuple[str, ...] = EITHER


def merge_kernel(
    dsl: Dsl,
    *,
    O: Size,
    I: Size,
    R: Size,
    BLOCK_R: int,
    dtype: str,
    out_dtype: str,
    base_dtype: str | None,
    config: Merge,
) -> Any:
    """A block keeps its tile of `down` and walks `steps` tiles down a strip of ΔW."""
    T = dsl.T
    O, I, R = dsl.size("O", O), dsl.size("I", I), dsl.size("R", R)
    BLOCK_O, BLOCK_I, STEPS = config.block_o, config.block_i, config.steps

    @T.prim_func
    def kernel(
        up: T.Tensor((O, R), dtype),
        down: T.Tensor((R, I), dtype),
        base: T.Tensor((O, I), base_dtype or out_dtype),
        out: T.Tensor((O, I), out_dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(I, BLOCK_I), T.ceildiv(O, BLOCK_O * STEPS), threads=config.threads) as (pid_i, pid_o):
            up_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            down_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            acc = dsl.fragment((BLOCK_O, BLOCK_I))
            T.copy(down[0, pid_i * BLOCK_I], down_tile)
            for step in dsl.pipelined(STEPS, min(STEPS, 2) if STEPS > 1 else 0):
                row = (pid_o * STEPS + step) * BLOCK_O
                T.copy(up[row, 0], up_tile)
                T.clear(acc)
                dsl.gemm(up_tile, down_tile, acc)
                for i, j in dsl.parallel(BLOCK_O, BLOCK_I):
                    acc[i, j] *= scale
                store_tile(dsl, acc, None if base_dtype is None else base, out, row, pid_i * BLOCK_I, config.staged)

    return kernel


def pair_kernel(
    dsl: Dsl, *, O: Size, I: Size, R: Size, BLOCK_R: int, dtype: str, need_up: bool, need_down: bool, config: Pair
) -> Any:
    """grad_up = scale · G @ downᵀ and grad_down = scale · upᵀ @ G, whole sums in one launch.

    The first blocks walk rows of G and the others columns, so G is read twice, the second time from L2.
    """
    T = dsl.T
    O, I, R = dsl.size("O", O), dsl.size("I", I), dsl.size("R", R)
    BLOCK_M, BLOCK_N, BLOCK_K = config.block_m, config.block_n, config.block_k

    @T.macro
    def rows(g, down, grad_up, row, scale):
        g_rows = dsl.shared((BLOCK_M, BLOCK_K), dtype)
        down_tile = dsl.shared((BLOCK_R, BLOCK_K), dtype)
        acc_up = dsl.fragment((BLOCK_M, BLOCK_R))
        T.clear(acc_up)
        for k in dsl.pipelined(T.ceildiv(I, BLOCK_K), config.stages):
            T.copy(g[row, k * BLOCK_K], g_rows)
            T.copy(down[0, k * BLOCK_K], down_tile)
            dsl.gemm(g_rows, down_tile, acc_up, transpose_b=True, tall=True)
        for m, r in dsl.parallel(BLOCK_M, BLOCK_R):
            acc_up[m, r] *= scale
        T.copy(acc_up, grad_up[row, 0])

    @T.macro
    def columns(g, up, grad_down, col, scale):
        g_columns = dsl.shared((BLOCK_K, BLOCK_N), dtype)
        up_tile = dsl.shared((BLOCK_K, BLOCK_R), dtype)
        acc_down = dsl.fragment((BLOCK_R, BLOCK_N))
        T.clear(acc_down)
        for k in dsl.pipelined(T.ceildiv(O, BLOCK_K), config.stages):
            T.copy(g[k * BLOCK_K, col], g_columns)
            T.copy(up[k * BLOCK_K, 0], up_tile)
            dsl.gemm(up_tile, g_columns, acc_down, transpose_a=True)
        for r, n in dsl.parallel(BLOCK_R, BLOCK_N):
            acc_down[r, n] *= scale
        T.copy(acc_down, grad_down[0, col])

    @T.prim_func
    def kernel(
        g: T.Tensor((O, I), dtype),
        up: T.Tensor((O, R), dtype),
        down: T.Tensor((R, I), dtype),
        grad_up: T.Tensor((O, R), dtype),
        grad_down: T.Tensor((R, I), dtype),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        if need_up and need_down:
            with T.Kernel(T.ceildiv(O, BLOCK_M) + T.ceildiv(I, BLOCK_N), threads=config.threads) as pid:
                if pid < T.ceildiv(O, BLOCK_M):
                    rows(g, down, grad_up, pid * BLOCK_M, scale)
                else:
                    columns(g, up, grad_down, (pid - T.ceildiv(O, BLOCK_M)) * BLOCK_N, scale)
        elif need_up:
            with T.Kernel(T.ceildiv(O, BLOCK_M), threads=config.threads) as pid:
                rows(g, down, grad_up, pid * BLOCK_M, scale)
        else:
            with T.Kernel(T.ceildiv(I, BLOCK_N), threads=config.threads) as pid:
                columns(g, up, grad_down, pid * BLOCK_N, scale)

    return kernel


def merge_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target) -> Merge:
    """The merge's tiles: up to rank 16 the write is all that counts; above, blocks keep their `down` and walk."""
    size = n_o * n_i
    if target.cpu:
        return Merge(32, 32)
    if dtype is torch.float32 or n_r > 64:
        return Merge(64, 64)
    if size <= 1 << 21:
        return Merge(64, 64)
    if n_r <= 16:
        return Merge(64, 128)
    return Merge(64, 128, 2 if size < 1 << 24 else 4)


def merge_backward_config(n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int) -> Dual | Pair:
    """One launch that reads G twice where the second read comes from L2, one pass and a reduction elsewhere."""
    size = n_o * n_i
    if target.cpu or dtype is torch.float32 or n_r > 64 or n_r < 8 or size > 1 << 24 or n_o > 2 * n_i:
        return dual_config(n_o, n_i, n_r, dtype, target, sms)
    if n_r <= 16:
        pair = Pair(32, 16, 128, 64) if size <= 1 << 19 else Pair(32, 32, 256) if size <= 1 << 21 else Pair(64, 64, 256)
    else:
        pair = Pair(32, 32, 128) if size <= 1 << 19 else Pair(64, 32, 128) if size <= 1 << 23 else Pair(64, 64, 128)
    widest = max(pair.block_m, pair.block_n) + rank_block("lora", n_r, target)
    return replace(pair, stages=min(pair.stages, target.shared_bytes // (pair.block_k * widest * dtype.itemsize)))


def merge_forward(
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: Merge | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """ΔW[O, I]; saves nothing."""
    target = target_of(up)
    up, down, base = ready(up), ready(down), ready_base(base, target)
    (n_o, n_r), n_i = up.shape, down.shape[1]
    run = build(
        merge_kernel,
        target,
        **sizes(target, O=n_o, I=n_i, R=n_r),
        BLOCK_R=rank_block("lora", n_r, target),
        dtype=dtype_name(up.dtype),
        out_dtype=dtype_name(out_dtype),
        base_dtype=None if base is None else dtype_name(base.dtype),
        config=config or merge_config(n_o, n_i, n_r, up.dtype, target),
    )
    out = torch.empty((n_o, n_i), dtype=out_dtype, device=up.device)
    run(up, down, base, out, scale)
    return out, ()


def merge_backward(
    grad: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: Dual | Pair | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_up[O, R], grad_down[R, I])."""
    target = target_of(grad)
    g, up, down = ready(grad), ready(up), ready(down)
    (n_o, n_i), n_r = g.shape, up.shape[1]
    config = config or merge_backward_config(n_o, n_i, n_r, up.dtype, target, sm_count(up.device))
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device) if needs[0] else None
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device) if needs[1] else None
    if isinstance(config, Pair):
        run = build(
            pair_kernel,
            target,
            **sizes(target, O=n_o, I=n_i, R=n_r),
            BLOCK_R=rank_block("lora", n_r, target),
            dtype=dtype_name(up.dtype),
            need_up=needs[0],
            need_down=needs[1],
            config=config,
        )
        run(g, up if needs[1] else None, down if needs[0] else None, grad_up, grad_down, scale)
        return grad_up, grad_down
    right_parts, left_parts = dual("lora", g, down, up, needs, merging=True, config=config)
    reduce_partials((right_parts, left_parts), (grad_up, grad_down), scale)
    return grad_up, grad_down
