"""The Cayley transform and its backward as Triton device functions; formulas in kernels/common/cayley.py.

Three forms, by block size S: up to 4 in closed form in scalars of every thread, up to 16 by elimination with a row of
the system in a register of every lane, above by a kernel of its own. Blocks never mix: what is not finite stays in its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common.cayley import MAX_INLINE, MAX_Q, pad
from kernels.common.plans import planned
from kernels.common.triton_ops import precision

_MAX_Q = tl.constexpr(MAX_Q)


@triton.jit
def _skew(upper, lower, factor):
    """Entries of Q, kept within MAX_Q; NaN stays NaN."""
    q = factor * (upper.to(tl.float32) - lower.to(tl.float32))
    return tl.where(q > _MAX_Q, _MAX_Q, tl.where(q < -_MAX_Q, -_MAX_Q, q))


@triton.jit
def solve_scalars(blocks, factor, S: tl.constexpr):
    """D of the one block at `blocks`, S ≤ 4, as a tuple of S · S float32 scalars, row by row.

    The closed form of 4 x 4 (smaller blocks are padded with zeros): with p the Pfaffian of Q and Q* its dual, Q Q* = -p I,
    D = 2 (Q + Q² + p Q* - p² I) / (1 + Σ q² + p²). Nothing cancels on the diagonal, at any size of Q.
    """
    q = ()
    for i in tl.static_range(4):
        for j in tl.static_range(4):
            if i == j or i >= S or j >= S:
                q = q + (0.0,)
            else:
                q = q + (_skew(tl.load(blocks + i * S + j), tl.load(blocks + j * S + i), factor),)
    p = q[1] * q[11] - q[2] * q[7] + q[3] * q[6]  # type: ignore[misc]
    dual = (0.0, q[11], -q[7], q[6], -q[11], 0.0, q[3], -q[2], q[7], -q[3], 0.0, q[1], -q[6], q[2], -q[1], 0.0)  # type: ignore[misc]
    squares = q[1] * q[1] + q[2] * q[2] + q[3] * q[3] + q[6] * q[6] + q[7] * q[7] + q[11] * q[11]  # type: ignore[misc]
    double = 2.0 / (1.0 + squares + p * p)
    delta = ()
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            value = q[i * 4] * q[j] + q[i * 4 + 1] * q[4 + j] + q[i * 4 + 2] * q[8 + j] + q[i * 4 + 3] * q[12 + j]
            if i == j:
                value -= p * p
            else:
                value += q[i * 4 + j] + p * dual[i * 4 + j]
            delta = delta + (double * value,)
    return delta


@triton.jit
def finish_scalars(product, delta, S: tl.constexpr):
    """∂L/∂Q - ∂L/∂Qᵀ of one block, from P and D as tuples of scalars."""
    half = ()
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            value = product[i * S + j]
            for n in tl.static_range(S):
                value += 0.5 * delta[n * S + i] * product[n * S + j]
            half = half + (value,)
    both = ()
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            value = half[i * S + j]
            for n in tl.static_range(S):
                value += 0.5 * delta[j * S + n] * half[i * S + n]
            both = both + (value,)
    grad = ()
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            grad = grad + (2.0 * (both[i * S + j] - both[j * S + i]),)
    return grad


@triton.jit
def _eliminate_pivoting(q, S: tl.constexpr):
    """D from the rows of Q (a tuple of [N, 2 P] tiles), by Gauss-Jordan with pivots on [I - Q | I].

    A row of the system is a register of every lane and a column is a lane, so that the pivot row is at hand and a
    column's entry comes by one shuffle: no barrier. Rows move up at each step, so that the pivot row is always the first:
    a loop of one step's code, all of which has to be compiled, and fetched from cold memory at each launch.
    """
    N: tl.constexpr = q[0].shape[0]
    P: tl.constexpr = q[0].shape[1] // 2
    lanes = tl.arange(0, 2 * P)[None, :]
    system = ()
    for r in tl.static_range(S):
        one = tl.where(lanes % P == r, 1.0, 0.0)
        system = system + (tl.where(lanes < P, one - q[r], one),)
    for p in range(S):
        from_p = tl.zeros((N, 2 * P), tl.int32) + p
        pivot, head = system[0], tl.gather(system[0], from_p, axis=1)  # type: ignore[misc]
        rows, heads = (), ()
        for r in tl.static_range(1, S):
            row, row_head = system[r], tl.gather(system[r], from_p, axis=1)
            # Rows below p in turn give way to the row in hand where theirs has the larger head.
            larger = (tl.abs(row_head) > tl.abs(head)) & (p + r < S)
            row, pivot = tl.where(larger, pivot, row), tl.where(larger, row, pivot)
            row_head, head = tl.where(larger, head, row_head), tl.where(larger, row_head, head)
            rows, heads = rows + (row,), heads + (row_head,)
        pivot *= 1.0 / head
        swept = ()
        for r in tl.static_range(S - 1):
            swept = swept + (rows[r] - heads[r] * pivot,)
        system = swept + (pivot,)
    delta = ()
    for r in tl.static_range(S):
        delta = delta + (2.0 * (system[r] - tl.where(lanes % P == r, 1.0, 0.0)),)
    return delta


@triton.jit
def _inverse_pair(first, second, p):
    """The inverse of columns p, p + 1 of two rows, entry by entry, in every lane."""
    left, right = tl.zeros_like(first).to(tl.int32) + p, tl.zeros_like(first).to(tl.int32) + (p + 1)
    a, b = tl.gather(first, left, axis=1), tl.gather(first, right, axis=1)
    c, d = tl.gather(second, left, axis=1), tl.gather(second, right, axis=1)
    scale = 1.0 / (a * d - b * c)
    return scale * d, -scale * b, -scale * c, scale * a


@triton.jit
def _eliminate(q, S: tl.constexpr):
    """D from the rows of Q as in `_eliminate_pivoting`, S even, by Gauss-Jordan on [I - Q | 2 Q] without pivots.

    A step takes two rows, by the inverse of their 2 x 2 block, which is on its way while the last step's rows are swept: the
    time goes into waiting for one step after another.
    """
    N: tl.constexpr = q[0].shape[0]
    P: tl.constexpr = q[0].shape[1] // 2
    lanes = tl.arange(0, 2 * P)[None, :]
    system = ()
    for r in tl.static_range(S):
        system = system + (tl.where(lanes < P, tl.where(lanes == r, 1.0, 0.0) - q[r], 2.0 * q[r]),)
    a, b, c, d = _inverse_pair(system[0], system[1], 0)  # type: ignore[misc]
    for p in range(0, S, 2):
        left, right = tl.zeros((N, 2 * P), tl.int32) + p, tl.zeros((N, 2 * P), tl.int32) + (p + 1)
        first, second = a * system[0] + b * system[1], c * system[0] + d * system[1]  # type: ignore[misc]
        swept = ()
        for r in tl.static_range(2, S):
            row = system[r]
            row -= tl.gather(row, left, axis=1) * first + tl.gather(row, right, axis=1) * second
            swept = swept + (row,)
            if r == 3:
                # Of the last step it is of no use, but finds its columns.
                a, b, c, d = _inverse_pair(swept[0], swept[1], p + 2)  # type: ignore[misc]
        system = swept + (first, second)
    return system


@triton.jit
def solve_lanes(blocks, delta, factor, first, n_k, S: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr = 1):
    """delta[k] = D of the N blocks from `first` on (N a power of two, S ≤ 16).

    Up to |q| = 1 pivots are not worth their time. A warp has a block; LANES of them repeat the work of each, and write the
    same bits, where there are so many warps to a block.
    """
    EVEN: tl.constexpr = S + S % 2
    P: tl.constexpr = triton.next_power_of_2(EVEN)
    # Lanes in a row: of a tile, Triton would hand them out to the loads along the blocks first.
    lanes = tl.arange(0, LANES * N * 2 * P)
    block, cols = first + lanes // (2 * P) % N, lanes % P
    mask = (block < n_k) & (cols < S)
    at = block.to(tl.int64) * (S * S)
    q, top = (), tl.zeros((LANES * N * 2 * P,), tl.float32)
    for r in tl.static_range(S):
        upper = tl.load(blocks + at + r * S + cols, mask=mask, other=0.0)
        entry = _skew(upper, tl.load(blocks + at + cols * S + r, mask=mask, other=0.0), factor)
        q, top = q + (tl.reshape(entry, (LANES * N, 2 * P)),), tl.maximum(top, tl.abs(entry))
    if S % 2 == 1:
        q = q + (tl.zeros((LANES * N, 2 * P), tl.float32),)
    if tl.max(top, axis=0) > 1.0:
        d = _eliminate_pivoting(q, EVEN)
    else:
        d = _eliminate(q, EVEN)
    for r in tl.static_range(S):
        tl.store(delta + at + r * S + cols, tl.reshape(d[r], (LANES * N * 2 * P,)), mask=mask & (lanes % (2 * P) >= P))


@planned
@triton.jit
def _solve_kernel(blocks, delta, shrink, S: tl.constexpr, P: tl.constexpr, HAS_SHRINK: tl.constexpr):
    """delta[k] = D of one block of any size: Gauss-Jordan with pivots on a [P, 2 P] tile, rows and columns by reductions."""
    at = tl.program_id(0).to(tl.int64) * (S * S)
    rows = tl.arange(0, P)[:, None]
    lanes = tl.arange(0, 2 * P)[None, :]
    cols = lanes % P
    mask = (rows < S) & (cols < S)
    factor = 1.0
    if HAS_SHRINK:
        factor = tl.load(shrink)
    upper = tl.load(blocks + at + rows * S + cols, mask=mask, other=0.0)
    q = _skew(upper, tl.load(blocks + at + cols * S + rows, mask=mask, other=0.0), factor)
    one = tl.where(rows == cols, 1.0, 0.0)
    system = tl.where(lanes < P, one - q, one)
    for p in range(S):
        column = tl.sum(tl.where(lanes == p, system, 0.0), axis=1)
        best = tl.argmax(tl.where(tl.arange(0, P) >= p, tl.abs(column), -1.0), axis=0)
        pivot = tl.sum(tl.where(rows == best, system, 0.0), axis=0)[None, :]
        moved = tl.sum(tl.where(rows == p, system, 0.0), axis=0)[None, :]
        system = tl.where(rows == best, moved, system)
        column = tl.where(tl.arange(0, P) == best, tl.sum(tl.where(lanes == p, moved, 0.0), axis=1), column)[:, None]
        pivot /= tl.sum(tl.where(lanes == p, pivot, 0.0), axis=1)[:, None]
        system = tl.where(rows == p, pivot, system - column * pivot)
    # D = 2 (X - I), but on the diagonal of a small Q that cancels, and 2 Q X does not.
    inverse = tl.where(lanes < P, 0.0, system)
    qx = 2.0 * tl.sum(tl.where(lanes < P, 0.0, -q) * inverse, axis=0)[None, :]
    d = 2.0 * (system - one)
    d = tl.where((rows == cols) & (d > -0.5), qx, d)
    tl.store(delta + at + rows * S + cols, d, mask=mask & (lanes >= P))


@planned
@triton.jit
def _solve_lanes_kernel(blocks, delta, shrink, n_k, S: tl.constexpr, N: tl.constexpr, HAS_SHRINK: tl.constexpr):
    """delta[k] of N blocks by `solve_lanes`."""
    factor = 1.0
    if HAS_SHRINK:
        factor = tl.load(shrink)
    solve_lanes(blocks, delta, factor, tl.program_id(0) * N, n_k, S, N)


def solve(blocks: Tensor, delta: Tensor, shrink: Tensor | None, inline: bool) -> bool:
    """Writes delta[k, s, s] in a launch of its own, unless the next kernel's programs are to solve their blocks `inline`.

    Returns whether they have to; blocks above MAX_INLINE always get the launch.
    """
    count, size, _ = blocks.shape
    if size <= MAX_INLINE:
        if inline:
            return True
        _solve_lanes_kernel[(count,)](blocks, delta, shrink, count, size, 1, shrink is not None, num_warps=1)
        return False
    width = triton.next_power_of_2(size)
    _solve_kernel[(count,)](blocks, delta, shrink, size, width, shrink is not None, num_warps=4 if width <= 32 else 8)
    return False


def shares(warps: int, dtype: torch.dtype) -> int:
    """How many warps a block's products are shared out to; full float32 ones, without tensor cores, need all of them at each."""
    return 1 if precision(dtype) == "ieee" and dtype is torch.float32 else warps


@triton.jit
def slot_channel(slot):
    """The channel behind a slot of a tensor-core operand's axis: the slots 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t of 16, which a
    thread of a quad has, are four neighbours."""
    return slot // 16 * 16 + slot % 8 // 2 * 4 + slot % 16 // 8 * 2 + slot % 2


@triton.jit
def tile_entries(
    first, n_k, S: tl.constexpr, N: tl.constexpr, P: tl.constexpr, TRANSPOSED: tl.constexpr, LANES: tl.constexpr = 1,
    SLOTS: tl.constexpr = False,
):  # fmt: skip
    """(n, m, offset in [k, S, S], exists) over a [LANES * N, P, P] tile of N blocks, LANES times over.

    Its axes are (block, n, m) or (block, m, n); with SLOTS, n and m are those of `slot_channel`.
    """
    block = first + tl.arange(0, LANES * N)[:, None, None] % N
    axis = tl.arange(0, P)
    if SLOTS:
        axis = slot_channel(axis)
    rows, cols = axis[None, :, None], axis[None, None, :]
    n, m = (cols, rows) if TRANSPOSED else (rows, cols)
    exists = (block < n_k) & (n < S) & (m < S)
    return n, m, block.to(tl.int64) * (S * S) + n * S + m, exists


@triton.jit
def split(value, dtype: tl.constexpr, BOUNDED: tl.constexpr):
    """A float32 tile of three axes as (high, low, factor): value = (high + low) · factor to twice the precision of `dtype`.

    float16 tiles are scaled by a power of two that keeps both parts clear of its range's ends; BOUNDED says that no
    entry passes 2 (as in R - I), which makes that power a constant. A float32 tile is its own high part.
    """
    if dtype == tl.float32:
        return value, value, 1.0
    elif dtype == tl.float16:
        if BOUNDED:
            factor = 1.0 / 16384.0
            scaled = value * 16384.0
        else:
            top = tl.max(tl.max(tl.max(tl.abs(value), axis=2), axis=1), axis=0)
            exponent = tl.minimum(tl.maximum(top, 1e-30), 1e30).to(tl.int32, bitcast=True) & 0x7F800000
            factor = exponent.to(tl.float32, bitcast=True) * (1.0 / 16384.0)
            scaled = value * ((0x7F000000 - exponent).to(tl.float32, bitcast=True) * 16384.0)
        high = scaled.to(tl.float16)
        return high, (scaled - high.to(tl.float32)).to(tl.float16), factor
    else:
        high = value.to(dtype)
        return high, (value - high.to(tl.float32)).to(dtype), 1.0


@triton.jit
def rotation(
    delta, rescale, first, n_k, dtype: tl.constexpr, S: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    TRANSPOSED: tl.constexpr, HAS_RESCALE: tl.constexpr, LANES: tl.constexpr = 1, SLOTS: tl.constexpr = False,
):  # fmt: skip
    """M = D diag(r) + diag(r - 1) of N blocks (M = D without rescale) as a tile of `tile_entries`, through `split`."""
    n, m, offs, exists = tile_entries(first, n_k, S, N, P, TRANSPOSED, LANES, SLOTS)
    value = tl.load(delta + offs, mask=exists, other=0.0)
    if HAS_RESCALE:
        block = first + tl.arange(0, LANES * N)[:, None, None] % N
        r = tl.load(rescale + block * S + m, mask=(block < n_k) & (m < S), other=1.0).to(tl.float32)
        value = value * r + tl.where(n == m, r - 1.0, 0.0)
    return split(value, dtype, not HAS_RESCALE)


@triton.jit
def dot_left(high, low, tile, PRECISION: tl.constexpr):
    """(high + low) @ tile."""
    out = tl.dot(high, tile, input_precision=PRECISION)
    if high.dtype != tl.float32:
        out = tl.dot(low, tile, out)
    return out


@triton.jit
def dot_right(tile, high, low, PRECISION: tl.constexpr):
    """tile @ (high + low)."""
    out = tl.dot(tile, high, input_precision=PRECISION)
    if high.dtype != tl.float32:
        out = tl.dot(tile, low, out)
    return out


@triton.jit
def finish_tile(
    product, blocks_grad, rescale_grad, delta, rescale, first, n_k, S: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    NEED_BLOCKS: tl.constexpr, NEED_RESCALE: tl.constexpr, HAS_RESCALE: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of N blocks and of their rescale, from product[N, n, m] = Σ (input n) · (gradient of output m)."""
    n, m, offs, exists = tile_entries(first, n_k, S, N, P, False)
    d = tl.load(delta + offs, mask=exists, other=0.0)
    block = first + tl.arange(0, N)[:, None]
    offs_o = block * S + tl.arange(0, P)[None, :]
    mask_o = (block < n_k) & (tl.arange(0, P)[None, :] < S)
    if NEED_RESCALE:
        value = tl.sum(d * product + tl.where(n == m, product, 0.0), axis=1)
        tl.store(rescale_grad + offs_o, value.to(rescale_grad.dtype.element_ty), mask=mask_o)
    if NEED_BLOCKS:
        if HAS_RESCALE:
            product *= tl.load(rescale + offs_o, mask=mask_o, other=0.0).to(tl.float32)[:, None, :]
        xt = tl.where(n == m, 1.0, 0.0) + 0.5 * tl.permute(d, (0, 2, 1))
        half = tl.dot(tl.dot(xt, product, input_precision="ieee"), xt, input_precision="ieee")
        value = 2.0 * (half - tl.permute(half, (0, 2, 1)))
        tl.store(blocks_grad + offs, value.to(blocks_grad.dtype.element_ty), mask=exists)


@planned
@triton.jit
def _finish_kernel(
    parts, blocks_grad, rescale_grad, delta, rescale, splits, n_k, S: tl.constexpr, P: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    NEED_BLOCKS: tl.constexpr, NEED_RESCALE: tl.constexpr, HAS_RESCALE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    # A block's entries in one row, so that a thread adds up all splits of its own.
    entry = tl.arange(0, P * P)[None, :]
    n, m = entry // P, entry % P
    exists = (n < S) & (m < S)
    offs = first.to(tl.int64) * (S * S) + (entry if S == P else n * S + m)
    product = tl.zeros((P * P,), tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)[:, None]
        at = parts + split.to(tl.int64) * n_k * (S * S) + offs
        product += tl.sum(tl.load(at, mask=exists & (split < splits), other=0.0), axis=0)
    finish_tile(
        tl.reshape(product, (1, P, P)), blocks_grad, rescale_grad, delta, rescale, first, n_k, S, 1, P,
        NEED_BLOCKS, NEED_RESCALE, HAS_RESCALE,
    )  # fmt: skip


def finish(
    parts: Tensor, blocks_grad: Tensor | None, rescale_grad: Tensor | None, delta: Tensor, rescale: Tensor | None
) -> None:
    """Writes the gradients of blocks and rescale from float32 parts[splits, k, s, s], summed in the order of the splits."""
    splits, count, size, _ = parts.shape
    # All partials of a block in flight at once, as far as registers go.
    at_once, warps = 2, 4 if size <= 32 else 8
    if size <= 16:
        at_once, warps = (8, 2) if splits <= 8 else (16, 2) if splits <= 16 else (32, 4)
    _finish_kernel[(count,)](
        parts, blocks_grad, rescale_grad, delta, rescale, splits, count, size, pad(size), at_once,
        blocks_grad is not None, rescale_grad is not None, rescale is not None, num_warps=warps,
    )  # fmt: skip
