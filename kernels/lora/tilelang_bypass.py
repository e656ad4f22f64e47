"""LoRA's bypass in TileLang.

    z[T, R] = x @ downᵀ, y[T, O] = scale · z @ upᵀ             two launches, or one by blocks of tokens

z stays float32; where it feeds a 16-bit product it is scaled by a power of two if need be.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.tilelang_ops import store_tile, sum_parts, to_operand
from kernels.common.tilelang_target import (
    Dsl,
    Size,
    Target,
    build,
    dtype_name,
    ready,
    ready_base,
    sizes,
    target_of,
)
from kernels.common.views import cdiv, rows, sm_count
from kernels.lora.tilelang_dual import PLAIN, rank_block


@dataclass(frozen=True)
class Down:
    """Launch of z = x @ downᵀ: a block makes `block_t` rows of z from `span` columns of x, `block_i` at a time."""

    block_t: int
    block_i: int
    span: int
    threads: int = 128
    stages: int = 3
    passes: tuple[str, ...] = PLAIN


@dataclass(frozen=True)
class Up:
    """Launch of y = scale · z @ upᵀ: the tile of y that a block writes, `staged` through shared memory or not."""

    block_t: int
    block_o: int
    threads: int = 128
    staged: bool = True
    passes: tuple[str, ...] = PLAIN


@dataclass(frozen=True)
class Fused:
    """Launch of the whole bypass: a block makes `block_t` rows of z over all of I, then of y over all of O."""

    block_t: int
    block_i: int
    block_o: int
    threads: int = 128
    stages: int = 3
    staged: bool = True
    passes: tuple[str, ...] = PLAIN


def down_kernel(dsl: Dsl, *, I: Size, R: Size, BLOCK_R: int, dtype: str, config: Down) -> Any:
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
                dsl.gemm(x_tile, down_tile, acc, transpose_b=True, tall=True)
            T.copy(acc, parts[pid_s, pid_t * BLOCK_T, 0])

    return kernel


def up_kernel(
    dsl: Dsl,
    *,
    O: Size,
    R: Size,
    SPLITS: Size,
    BLOCK_R: int,
    dtype: str,
    out_dtype: str,
    base_dtype: str | None,
    save_z: bool,
    config: Up,
) -> Any:
    """out = scale · z @ upᵀ (+ base), z = Σ_s parts[s], which the first column of blocks also writes."""
    T = dsl.T
    tokens, O, R = T.dynamic("tokens"), dsl.size("O", O), dsl.size("R", R)
    splits = dsl.size("splits", SPLITS)
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
            up_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            operand = dsl.shared((BLOCK_T, BLOCK_R), dtype)
            factor = dsl.shared((1,), "float32")
            value = dsl.fragment((BLOCK_T, BLOCK_R))
            part = dsl.fragment((BLOCK_T, BLOCK_R))
            acc = dsl.fragment((BLOCK_T, BLOCK_O))
            T.copy(up[pid_o * BLOCK_O, 0], up_tile)
            sum_parts(dsl, parts, pid_t * BLOCK_T, value, part, SPLITS)
            if save_z:
                if pid_o == 0:
                    T.copy(value, z[pid_t * BLOCK_T, 0])
            to_operand(dsl, value, operand, factor)
            T.clear(acc)
            dsl.gemm(operand, up_tile, acc, transpose_b=True)
            for i, j in dsl.parallel(BLOCK_T, BLOCK_O):
                acc[i, j] *= factor[0] * scale
            bias = None if base_dtype is None else base
            store_tile(dsl, acc, bias, out, pid_t * BLOCK_T, pid_o * BLOCK_O, config.staged)

    return kernel


def fused_kernel(
    dsl: Dsl, *, I: Size, O: Size, R: Size, BLOCK_R: int, dtype: str, out_dtype: str, base_dtype: str | None,
    save_z: bool, config: Fused,
) -> Any:  # fmt: skip
    """The whole bypass for a block of tokens: z in registers, then every column of out = scale · z @ upᵀ (+ base)."""
    T = dsl.T
    tokens = T.dynamic("tokens")
    I, O, R = dsl.size("I", I), dsl.size("O", O), dsl.size("R", R)
    BLOCK_T, BLOCK_I, BLOCK_O = config.block_t, config.block_i, config.block_o

    @T.prim_func
    def kernel(
        x: T.Tensor((tokens, I), dtype),
        down: T.Tensor((R, I), dtype),
        up: T.Tensor((O, R), dtype),
        base: T.Tensor((tokens, O), base_dtype or out_dtype),
        out: T.Tensor((tokens, O), out_dtype),
        z: T.Tensor((tokens, R), "float32"),
        scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        with T.Kernel(T.ceildiv(tokens, BLOCK_T), threads=config.threads) as pid_t:
            x_tile = dsl.shared((BLOCK_T, BLOCK_I), dtype)
            down_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
            up_tile = dsl.shared((BLOCK_O, BLOCK_R), dtype)
            operand = dsl.shared((BLOCK_T, BLOCK_R), dtype)
            factor = dsl.shared((1,), "float32")
            value = dsl.fragment((BLOCK_T, BLOCK_R))
            acc = dsl.fragment((BLOCK_T, BLOCK_O))
            T.clear(value)
            for step in dsl.pipelined(T.ceildiv(I, BLOCK_I), config.stages):
                T.copy(x[pid_t * BLOCK_T, step * BLOCK_I], x_tile)
                T.copy(down[0, step * BLOCK_I], down_tile)
                dsl.gemm(x_tile, down_tile, value, transpose_b=True, tall=True)
            if save_z:
                T.copy(value, z[pid_t * BLOCK_T, 0])
            to_operand(dsl, value, operand, factor)
            for step in dsl.pipelined(T.ceildiv(O, BLOCK_O), 2):
                T.copy(up[step * BLOCK_O, 0], up_tile)
                T.clear(acc)
                dsl.gemm(operand, up_tile, acc, transpose_b=True)
                for i, j in dsl.parallel(BLOCK_T, BLOCK_O):
                    acc[i, j] *= factor[0] * scale
                bias = None if base_dtype is None else base
                store_tile(dsl, acc, bias, out, pid_t * BLOCK_T, step * BLOCK_O, config.staged)

    return kernel


def bypass_config(
    n_t: int, n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int
) -> tuple[Down, Up] | Fused:
    """Two launches that split I while tokens alone don't fill the SMs, one fused launch once they do many times over."""
    if target.cpu:
        return Down(16, 32, 64), Up(16, 32)
    if dtype is torch.float32 or n_r > 64:
        span = cdiv(cdiv(n_i, max(1, min(16, cdiv(n_i, 32), sms // cdiv(n_t, 32)))), 32) * 32
        return Down(32, 32, span, 64, 3), Up(32, 64)
    if n_t >= 64 * sms:
        return Fused(64, 128, 128, 128, 3)
    if n_t <= 256:
        return Down(32, 128, cdiv(n_i, 24 * 128) * 128, 64, 1), Up(16, 128)
    splits = max(1, min(16, cdiv(n_i, 128), sms // cdiv(n_t, 64)))
    return Down(64, 128, cdiv(cdiv(n_i, splits), 128) * 128, 128, 3), Up(64, 128)


def bypass_forward(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    base: Tensor | None,
    out_dtype: torch.dtype,
    needs: tuple[bool, ...],
    config: tuple[Down, Up] | Fused | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y[..., O]; saves z[T, R] in float32 where up's gradient will be asked for."""
    target = target_of(x)
    flat, up, down = ready(rows(x)), ready(up), ready(down)
    bias = None if base is None else ready_base(rows(base), target)
    (n_t, n_i), (n_o, n_r) = flat.shape, up.shape
    config = config or bypass_config(n_t, n_o, n_i, n_r, x.dtype, target, sm_count(x.device))
    shared: dict[str, Any] = {"BLOCK_R": rank_block("lora_bypass", n_r, target), "dtype": dtype_name(x.dtype)}
    last: dict[str, Any] = {
        "out_dtype": dtype_name(out_dtype),
        "base_dtype": None if bias is None else dtype_name(bias.dtype),
        "save_z": needs[1],
    }
    out = torch.empty((*x.shape[:-1], n_o), dtype=out_dtype, device=x.device)
    z = x.new_empty((n_t, n_r), dtype=torch.float32) if needs[1] else None
    if isinstance(config, Fused):
        run = build(fused_kernel, target, **sizes(target, I=n_i, O=n_o, R=n_r), **shared, **last, config=config)
        run(flat, down, up, bias, out.view(n_t, n_o), z, scale)
    else:
        first, second = config
        splits = cdiv(n_i, first.span)
        parts = x.new_empty((splits, n_t, n_r), dtype=torch.float32)
        make_z = build(down_kernel, target, **sizes(target, I=n_i, R=n_r), **shared, config=first)
        known = sizes(target, O=n_o, R=n_r, SPLITS=splits)
        make_y = build(up_kernel, target, **known, **shared, **last, config=second)
        make_z(flat, down, parts)
        make_y(parts, up, bias, out.view(n_t, n_o), z, scale)
    return out, () if z is None else (z,)
