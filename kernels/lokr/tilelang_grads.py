"""LoKr's factor gradients in TileLang: from the partials that the backward kernels write to the gradients asked for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.common.tilelang_ops import to_operand
from kernels.common.tilelang_target import Dsl, Size, build, dtype_name, sizes, target_of
from kernels.common.views import power_of_two
from kernels.lokr.tilelang_factors import Side


@dataclass(frozen=True)
class Sums:
    """Launch of the sums of partials: `tile` partials in flight a block, so that many partials of few elements are quick too."""

    tile: int = 4096
    threads: int = 256


@dataclass(frozen=True)
class PairGrad:
    """Launch of a pair's gradients: tiles of `block` × `block` of the factor's gradient."""

    block: int = 64
    threads: int = 128


def sum_parts(
    dsl: Dsl, *, jobs: int, out_a: str, out_b: str, blocks_a: tuple[int, int], blocks_b: tuple[int, int], threads: int
) -> Any:
    """out[n] = scale · Σ_s parts[s, n] for one or two such pairs, in a fixed order, by blocks of (partials, elements)."""
    T = dsl.T
    splits_a, size_a, splits_b, size_b = (T.dynamic(name) for name in ("splits_a", "size_a", "splits_b", "size_b"))

    @T.macro
    def total(parts, out, pid, scale, blocks):  # type: ignore[no-untyped-def]
        acc = dsl.fragment(blocks)
        column = dsl.fragment((blocks[1],))
        T.clear(acc)
        for step in T.serial(T.ceildiv(parts.shape[0], blocks[0])):
            for s, n in dsl.parallel(blocks[0], blocks[1]):
                if step * blocks[0] + s < parts.shape[0] and pid * blocks[1] + n < parts.shape[1]:
                    acc[s, n] += parts[step * blocks[0] + s, pid * blocks[1] + n]
        dsl.reduce_sum(acc, column, dim=0)
        for n in dsl.parallel(blocks[1]):
            if pid * blocks[1] + n < parts.shape[1]:
                out[pid * blocks[1] + n] = column[n] * scale

    @T.prim_func
    def kernel(
        parts_a: T.Tensor((splits_a, size_a), "float32"),
        out_a_: T.Tensor((size_a,), out_a),
        parts_b: T.Tensor((splits_b, size_b), "float32"),
        out_b_: T.Tensor((size_b,), out_b),
        scale: T.float32,
    ):
        if jobs == 1:
            with T.Kernel(T.ceildiv(size_a, blocks_a[1]), threads=threads) as pid:
                total(parts_a, out_a_, pid, scale, blocks_a)
        else:
            with T.Kernel(T.ceildiv(size_a, blocks_a[1]) + T.ceildiv(size_b, blocks_b[1]), threads=threads) as pid:
                if pid < T.ceildiv(size_a, blocks_a[1]):
                    total(parts_a, out_a_, pid, scale, blocks_a)
                else:
                    total(parts_b, out_b_, pid - T.ceildiv(size_a, blocks_a[1]), scale, blocks_b)

    return kernel


def pair_grad(dsl: Dsl, *, M: Size, N: Size, R: Size, BLOCK_R: int, dtype: str, of_a: bool, config: Any) -> Any:
    """From a factor's gradient G[M, N]: out[M, R] = scale · G @ otherᵀ (`of_a`, other = wb), or out[R, N] = scale · otherᵀ @ G."""
    T = dsl.T
    M, N, R = dsl.size("M", M), dsl.size("N", N), dsl.size("R", R)
    BLOCK = config.block

    @T.prim_func
    def kernel(
        grad: T.Tensor((M, N), "float32"),
        other: T.Tensor((R, N) if of_a else (M, R), dtype),
        out: T.Tensor((M, R) if of_a else (R, N), dtype),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(M if of_a else N, BLOCK), threads=config.threads) as pid:
            value = dsl.fragment((BLOCK, BLOCK))
            operand = dsl.shared((BLOCK, BLOCK), dtype)
            factor = dsl.shared((1,), "float32")
            right = dsl.shared((BLOCK_R, BLOCK) if of_a else (BLOCK, BLOCK_R), dtype)
            product = dsl.fragment((BLOCK, BLOCK_R) if of_a else (BLOCK_R, BLOCK))
            acc = dsl.fragment((BLOCK, BLOCK_R) if of_a else (BLOCK_R, BLOCK))
            T.clear(acc)
            for step in T.serial(T.ceildiv(N if of_a else M, BLOCK)):
                if of_a:
                    T.copy(grad[pid * BLOCK, step * BLOCK], value)
                    T.copy(other[0, step * BLOCK], right)
                else:
                    T.copy(grad[step * BLOCK, pid * BLOCK], value)
                    T.copy(other[step * BLOCK, 0], right)
                to_operand(dsl, value, operand, factor)
                T.clear(product)
                if of_a:
                    dsl.gemm(operand, right, product, transpose_b=True)
                else:
                    dsl.gemm(right, operand, product, transpose_a=True)
                for i, j in dsl.parallel(product.shape[0], product.shape[1]):
                    acc[i, j] += product[i, j] * (factor[0] * scale)
            if of_a:
                T.copy(acc, out[pid * BLOCK, 0])
            else:
                T.copy(acc, out[0, pid * BLOCK])

    return kernel


class GradPlan:
    """The gradients of both sides of a call: where kernels write their partials, and the launches that end it."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.grads: list[Tensor | None] = []
        self.full: list[tuple[Tensor, Tensor]] = []
        self.pairs: list[tuple[Side, Tensor, Tensor | None, Tensor | None]] = []

    def add(self, side: Side, splits: int, need_a: bool, need_b: bool) -> tuple[Tensor | None, float]:
        """Where a kernel writes `splits` partials of this side's gradient, and what it multiplies them by; None: not needed.

        A single partial of a full factor is the gradient itself, others are float32.
        """
        grad_a = torch.empty_like(side.wa) if need_a else None
        grad_b = None if side.wb is None or not need_b else torch.empty_like(side.wb)
        self.grads += [grad_a, grad_b]
        if grad_a is None and grad_b is None:
            return None, 1.0
        if splits == 1 and side.wb is None:
            assert grad_a is not None
            return grad_a.unsqueeze(0), self.scale
        parts = side.wa.new_empty((splits, side.rows, side.cols), dtype=torch.float32)
        if side.wb is not None:
            self.pairs.append((side, parts, grad_a, grad_b))
        elif grad_a is not None:
            self.full.append((parts, grad_a))
        return parts, 1.0

    def finish(self) -> tuple[Tensor | None, ...]:
        """Reduces what is left to reduce; the gradients in the order of `add`, two a side."""
        _sum(self.full, self.scale)
        totals = [p[0] if len(p) == 1 else p.new_empty(p.shape[1:]) for _, p, _, _ in self.pairs]
        _sum([(p, t) for (_, p, _, _), t in zip(self.pairs, totals, strict=True) if len(p) > 1], 1.0)
        for (side, _, grad_a, grad_b), total in zip(self.pairs, totals, strict=True):
            _pair_grads(side, total, grad_a, grad_b, self.scale)
        return tuple(self.grads)


def _sum(jobs: list[tuple[Tensor, Tensor]], scale: float, config: Sums | None = None) -> None:
    """out = scale · Σ_s parts[s] for each (parts, out), in one launch."""
    if not jobs:
        return
    config = config or Sums()
    views = [(p.view(p.shape[0], -1), o.view(-1)) for p, o in jobs]
    (a, out_a), (b, out_b) = views if len(views) == 2 else (views[0], (None, None))
    blocks = [_sum_blocks(p, config) for p, _ in views]
    run = build(
        sum_parts,
        target_of(out_a),
        jobs=len(jobs),
        out_a=dtype_name(out_a.dtype),
        out_b=dtype_name(out_a.dtype),
        blocks_a=blocks[0],
        blocks_b=blocks[-1],
        threads=config.threads,
    )
    run(a, out_a, b, out_b, scale)


def _sum_blocks(parts: Tensor, config: Sums) -> tuple[int, int]:
    """(partials, elements) at a time: powers of two; many partials, few elements."""
    splits = min(power_of_two(len(parts)), config.tile // 8)
    elements = min(64, config.tile // splits)
    return max(splits, config.threads // elements), elements


def _pair_grads(side: Side, total: Tensor, grad_a: Tensor | None, grad_b: Tensor | None, scale: float) -> None:
    target = target_of(side.wa)
    for of_a, other, out in ((True, side.wb, grad_a), (False, side.wa, grad_b)):
        if out is not None:
            run = build(
                pair_grad,
                target,
                **sizes(target, M=side.rows, N=side.cols, R=side.rank),
                BLOCK_R=side.block_r(target),
                dtype=dtype_name(out.dtype),
                of_a=of_a,
                config=PairGrad(32 if target.cpu else 64),
            )
            run(total, other, out, scale)
