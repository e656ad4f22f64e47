"""LoRA's bypass backward in TileLang.

    h = G @ up, grad_up = scale · Gᵀ @ z                       G read once (`dual`)
    grad_x = scale · h @ down, grad_down = scale · hᵀ @ x      one launch for few tokens, two for many; one reduction

h stays float32; where it feeds a 16-bit product it is scaled by a power of two if need be.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.tilelang_ops import reduce_partials, store_tile, sum_parts, to_operand
from kernels.common.tilelang_target import Dsl, Size, Target, build, dtype_name, ready, sizes, target_of
from kernels.common.views import cdiv, rows, sm_count
from kernels.lora.tilelang_dual import EITHER, Dual, dual, dual_config, rank_block

# From this many tokens on h's partials are summed once, and grad_x and grad_down are made in launches of their own, since
# nothing but h is common to them and one launch holds the shared memory of both. Fewer tokens save the launches.
APART_FROM = 512


@dataclass(frozen=True)
class DownBackward:
    """Launch of grad_x and grad_down: tiles of `block_x` × `block_i` of grad_x, and strips of `span` rows of x.

    A strip's block holds h for its whole span, which bounds span × rank; `span` is a multiple of `block_x`.
    """

    block_x: int
    block_t: int
    block_i: int
    span: int
    threads: int = 128
    stages: int = 3
    staged: bool = True
    passes: tuple[str, ...] = EITHER


def down_backward_kernel(
    dsl: Dsl, *, I: Size, R: Size, SPLITS: Size, BLOCK_R: int, dtype: str, parts_dtype: str, need_x: bool, need_down: bool,
    config: DownBackward,
) -> Any:  # fmt: skip
    """grad_x = scale · h @ down, down_parts[t, R, I] = down_scale · h[t]ᵀ @ x[t], with h = Σ_s h_parts[s], x read once.

    After the blocks that write a span's tiles of grad_x comes one that reads its strip of x: the memory does both at once.
    """
    T = dsl.T
    tokens, I, R = T.dynamic("tokens"), dsl.size("I", I), dsl.size("R", R)
    splits, spans = dsl.size("splits", SPLITS), T.dynamic("spans")
    BLOCK_X, BLOCK_T, BLOCK_I, SPAN = config.block_x, config.block_t, config.block_i, config.span

    @T.macro
    def tile_of_x(h_parts, down, grad_x, row, col, scale):
        value = dsl.fragment((BLOCK_X, BLOCK_R))
        part = dsl.fragment((BLOCK_X, BLOCK_R))
        operand = dsl.shared((BLOCK_X, BLOCK_R), dtype)
        factor = dsl.shared((1,), "float32")
        down_tile = dsl.shared((BLOCK_R, BLOCK_I), dtype)
        acc = dsl.fragment((BLOCK_X, BLOCK_I))
        T.copy(down[0, col], down_tile)
        sum_parts(dsl, h_parts, row, value, part, SPLITS)
        to_operand(dsl, value, operand, factor)
        T.clear(acc)
        dsl.gemm(operand, down_tile, acc)
        for i, j in dsl.parallel(BLOCK_X, BLOCK_I):
            acc[i, j] *= factor[0] * scale
        store_tile(dsl, acc, None, grad_x, row, col, config.staged)

    @T.macro
    def strip_of_down(h_parts, x, down_parts, pid_t, col, down_scale):
        span_value = dsl.fragment((SPAN, BLOCK_R))
        span_part = dsl.fragment((SPAN, BLOCK_R))
        span_operand = dsl.shared((SPAN, BLOCK_R), dtype)
        span_factor = dsl.shared((1,), "float32")
        x_tile = dsl.shared((BLOCK_T, BLOCK_I), dtype)
        down_acc = dsl.fragment((BLOCK_I, BLOCK_R))
        T.clear(down_acc)
        sum_parts(dsl, h_parts, pid_t * SPAN, span_value, span_part, SPLITS)
        to_operand(dsl, span_value, span_operand, span_factor)
        for step in dsl.pipelined(SPAN // BLOCK_T, config.stages):
            first = step * BLOCK_T
            T.copy(x[pid_t * SPAN + first, col], x_tile)
            dsl.gemm(x_tile, span_operand[first : first + BLOCK_T, :], down_acc, transpose_a=True, tall=True)
        for i, r in dsl.parallel(BLOCK_I, BLOCK_R):
            if r < R and col + i < I:
                down_parts[pid_t, r, col + i] = down_acc[i, r] * (span_factor[0] * down_scale)

    @T.prim_func
    def kernel(
        h_parts: T.Tensor((splits, tokens, R), "float32"),
        x: T.Tensor((tokens, I), dtype),
        down: T.Tensor((R, I), dtype),
        grad_x: T.Tensor((tokens, I), dtype),
        down_parts: T.Tensor((spans, R, I), parts_dtype),
        scale: T.float32,
        down_scale: T.float32,
    ):
        T.annotate_pass_configs(dsl.passes(config.passes))
        strips = T.ceildiv(I, BLOCK_I)
        if need_x and need_down:
            grid = (SPAN // BLOCK_X + 1, strips, T.ceildiv(tokens, SPAN))
            with T.Kernel(*grid, threads=config.threads) as (place, pid_i, pid_t):
                if place < SPAN // BLOCK_X:
                    if pid_t * SPAN + place * BLOCK_X < tokens:
                        tile_of_x(h_parts, down, grad_x, pid_t * SPAN + place * BLOCK_X, pid_i * BLOCK_I, scale)
                else:
                    strip_of_down(h_parts, x, down_parts, pid_t, pid_i * BLOCK_I, down_scale)
        elif need_x:
            with T.Kernel(T.ceildiv(tokens, BLOCK_X) * strips, threads=config.threads) as pid:
                tile_of_x(h_parts, down, grad_x, pid // strips * BLOCK_X, pid % strips * BLOCK_I, scale)
        else:
            with T.Kernel(T.ceildiv(tokens, SPAN) * strips, threads=config.threads) as pid:
                strip_of_down(h_parts, x, down_parts, pid // strips, pid % strips * BLOCK_I, down_scale)

    return kernel


def bypass_backward_config(
    n_t: int, n_o: int, n_i: int, n_r: int, dtype: torch.dtype, target: Target, sms: int
) -> tuple[Dual, DownBackward]:
    """The passes over G and over x: narrow strips for few tokens, `dual`'s own shapes for many."""
    if target.cpu:
        return Dual(16, 32, 64), DownBackward(16, 16, 32, 64)
    up = dual_config(n_t, n_o, n_r, dtype, target, sms, whole_span=dtype is not torch.float32)
    if dtype is torch.float32 or n_r > 16:
        span = max(1, 64 * 128 // (32 * rank_block("lora_bypass", n_r, target))) * 32
        return up, DownBackward(32, 32, 64, min(span, up.span), 128, 2, dtype is not torch.float32)
    if n_t <= 128:
        span = cdiv(n_t, 32) * 32
        rows = 128 if n_t > 64 else 64
        return Dual(rows, 128, rows, stages=1), DownBackward(32, 32, 128, span, stages=min(3, span // 32))
    if n_t <= 256:
        return Dual(32, 128, 32, stages=1), DownBackward(32, 32, 128, 32, stages=1)
    if n_t <= 2048:
        return Dual(64, 128, 64, stages=1), DownBackward(32, 64, 128, 128, stages=2)
    return up, DownBackward(32, 64, 128, min(512, cdiv(up.span, 64) * 64))


def bypass_backward(
    grad: Tensor,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float,
    *,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    config: tuple[Dual, DownBackward] | None = None,
) -> tuple[Tensor | None, ...]:
    """(grad_x[..., I], grad_up[O, R], grad_down[R, I])."""
    need_x, need_up, need_down = needs
    target = target_of(x)
    g, flat, up, down = ready(rows(grad)), ready(rows(x)), ready(up), ready(down)
    (n_t, n_i), (n_o, n_r) = flat.shape, up.shape
    up_launch, down_launch = config or bypass_backward_config(n_t, n_o, n_i, n_r, x.dtype, target, sm_count(x.device))
    # Without up's gradient nothing reads `left`; `up` stands in for the z that was not saved.
    left = ready(saved[0]) if need_up else up
    grad_x = None
    grad_up = torch.empty(up.shape, dtype=up.dtype, device=up.device) if need_up else None
    grad_down = torch.empty(down.shape, dtype=down.dtype, device=down.device) if need_down else None
    h_parts, up_parts = dual(
        "lora_bypass", g, up, left, (need_x or need_down, need_up),
        merging=False, config=up_launch, whole=grad_up, scale=scale,
    )  # fmt: skip
    if h_parts is None:
        reduce_partials((up_parts,), (grad_up,), scale)
        return None, grad_up, None
    apart = n_t >= APART_FROM
    if len(h_parts) > 1 and apart:
        h = h_parts.new_empty((1, n_t, n_r))
        reduce_partials((h_parts, up_parts), (h, grad_up), (1.0, scale))
        h_parts, up_parts = h, None
    spans = cdiv(n_t, down_launch.span)
    down_parts = x.new_empty((spans, n_r, n_i), dtype=torch.float32) if need_down and spans > 1 else None
    written = down_parts if spans > 1 or grad_down is None else grad_down.view(1, n_r, n_i)
    # grad_x last where it is apart, so that no partials are held beside it.
    for with_x, with_down in ((False, need_down), (need_x, False)) if apart else ((need_x, need_down),):
        if with_x:
            grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if with_x or with_down:
            run = build(
                down_backward_kernel,
                target,
                **sizes(target, I=n_i, R=n_r, SPLITS=len(h_parts)),
                BLOCK_R=rank_block("lora_bypass", n_r, target),
                dtype=dtype_name(x.dtype),
                parts_dtype="float32" if written is None or not with_down else dtype_name(written.dtype),
                need_x=with_x,
                need_down=with_down,
                config=down_launch,
            )
            run(
                h_parts, flat if with_down else None, down if with_x else None,
                None if grad_x is None else grad_x.view(n_t, n_i), written if with_down else None,
                scale, scale if spans == 1 else 1.0,
            )  # fmt: skip
        if with_down or not apart:
            reduce_partials((up_parts, down_parts), (grad_up, grad_down), scale)
            up_parts = down_parts = written = None
    reduce_partials((up_parts,), (grad_up,), scale)
    return grad_x, grad_up, grad_down
