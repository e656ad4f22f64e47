"""Solving D = R - I of skew blocks in TileLang, as macros and kernels; formulas in kernels/common/cayley.py.

Macros take the Dsl of `kernels.common.tilelang_target`. A tile holds N blocks one below another, each padded from S to P
rows and columns: [N * P, P].
"""

from typing import Any

from torch import Tensor

from kernels.common.cayley import MAX_INLINE, MAX_Q, pad
from kernels.common.tilelang_target import Dsl, Size, build, dtype_name, sizes, target_of


def _skew(dsl: Dsl, upper: Any, lower: Any, factor: Any) -> Any:
    """An entry of Q, kept within MAX_Q."""
    T = dsl.T
    return _bounded(dsl, factor * (T.cast(upper, "float32") - T.cast(lower, "float32")))


def _bounded(dsl: Dsl, q: Any) -> Any:
    """q within ±MAX_Q; NaN stays NaN."""
    T = dsl.T
    if dsl.cpu:
        return T.if_then_else(q > MAX_Q, MAX_Q, T.if_then_else(q < -MAX_Q, -MAX_Q, q))
    # Comparisons would become branches around every entry.
    return T.Select(T.isnan(q), q, T.max(T.min(q, T.float32(MAX_Q)), T.float32(-MAX_Q)))


def _magnitude(dsl: Dsl, value: Any) -> Any:
    """|value|, which the C target has no call for."""
    return dsl.T.max(value, -value)


def solve_scalars(dsl: Dsl, blocks: Any, k: Any, factor: Any, delta: Any, size: int) -> Any:
    """delta[S * S] = D of block k, S ≤ 4, in every thread's own registers.

    The closed form of 4 x 4 (smaller blocks are padded with zeros): with p the Pfaffian of Q and Q* its dual, Q Q* = -p I,
    D = 2 (Q + Q² + p Q* - p² I) / (1 + Σ q² + p²). Nothing cancels on the diagonal, at any size of Q.
    """
    T = dsl.T
    each = tuple(range(size))
    pairs = tuple((i, j) for i in range(4) for j in range(4))
    # (i, j) -> the entry of Q that Q* has there, and its sign.
    dual = {
        (0, 1): (2, 3, 1),
        (0, 2): (1, 3, -1),
        (0, 3): (1, 2, 1),
        (1, 2): (0, 3, 1),
        (1, 3): (0, 2, -1),
        (2, 3): (0, 1, 1),
    }

    def squared(q: Any, i: int, j: int) -> Any:
        return q[i, 0] * q[0, j] + q[i, 1] * q[1, j] + q[i, 2] * q[2, j] + q[i, 3] * q[3, j]

    def dual_entry(q: Any, i: int, j: int) -> Any:
        row, col, sign = dual[min(i, j), max(i, j)]
        return q[row, col] * (float(sign) if i < j else -float(sign))

    @T.macro
    def solved(blocks, k, factor, delta):  # type: ignore[no-untyped-def]
        q = T.alloc_local((4, 4), "float32")
        scalars = T.alloc_local((2,), "float32")
        for i, j in pairs:
            if i == j or i >= size or j >= size:
                q[i, j] = 0.0
            else:
                q[i, j] = _skew(dsl, blocks[k, i, j], blocks[k, j, i], factor)
        scalars[0] = q[0, 1] * q[2, 3] - q[0, 2] * q[1, 3] + q[0, 3] * q[1, 2]
        squares = q[0, 1] * q[0, 1] + q[0, 2] * q[0, 2] + q[0, 3] * q[0, 3]
        others = q[1, 2] * q[1, 2] + q[1, 3] * q[1, 3] + q[2, 3] * q[2, 3]
        scalars[1] = 2.0 / (1.0 + squares + others + scalars[0] * scalars[0])
        for i in each:
            for j in each:
                if i == j:
                    delta[i * size + j] = scalars[1] * (squared(q, i, j) - scalars[0] * scalars[0])
                else:
                    delta[i * size + j] = scalars[1] * (squared(q, i, j) + q[i, j] + scalars[0] * dual_entry(q, i, j))

    return solved(blocks, k, factor, delta)


def solve_shared(dsl: Dsl, blocks: Any, first: Any, factor: Any, system: Any, tile: Any, size: int) -> Any:
    """tile[N * P, P] = D of N blocks from `first` on, one after another; `system` is a shared [P, 2 P] tile to work in.

    Gauss-Jordan through registers, all padded to P: on [I - Q | 2 Q] up to |q| = 1, where pivots are not worth their time;
    past that with pivots, on [I - Q | I].
    """
    T = dsl.T
    width = int(tile.shape[1])
    count = int(tile.shape[0]) // width

    @T.macro
    def swept(system, swap, p, found):  # type: ignore[no-untyped-def]
        step = dsl.fragment((width, 2 * width))
        for r, c in dsl.parallel(width, 2 * width):
            pivot = system[found, c] * (1.0 / system[found, p])
            row = T.if_then_else(r == found, p, r) if swap else r
            step[r, c] = T.if_then_else(r == p, pivot, system[row, c] - system[row, p] * pivot)
        T.copy(step, system)

    @T.macro
    def solved(blocks, first, factor, system, tile):  # type: ignore[no-untyped-def]
        entries = dsl.fragment((1, width * width))
        largest = dsl.fragment((1,))
        top = dsl.shared((1,), "float32")
        found = T.alloc_var("int32")
        for b in T.serial(count):
            for r, c in dsl.parallel(width, width):
                k, n, m = T.min(first + b, blocks.shape[0] - 1), T.min(r, size - 1), T.min(c, size - 1)
                q = T.if_then_else((r < size) & (c < size), _skew(dsl, blocks[k, n, m], blocks[k, m, n], factor), 0.0)
                system[r, c] = T.if_then_else(r == c, 1.0, 0.0) - q
                system[r, width + c] = 2.0 * q
            for one, i in dsl.parallel(1, width * width):
                entries[one, i] = _magnitude(dsl, system[i // width, width + i % width])
            dsl.reduce_max(entries, largest, dim=1)
            top[0] = largest[0]
            if top[0] > 2.0:
                for r, c in dsl.parallel(width, width):
                    system[r, width + c] = T.if_then_else(r == c, 1.0, 0.0)
                for p in T.serial(size):
                    # Every thread finds the pivot for itself: from one of them it would take one more barrier.
                    found = p
                    for r in T.serial(size):
                        head = _magnitude(dsl, system[found, p])
                        if r > p and _magnitude(dsl, system[r, p]) > head:
                            found = r
                    swept(system, True, p, found)
                for r, c in dsl.parallel(width, width):
                    tile[b * width + r, c] = 2.0 * (system[r, width + c] - T.if_then_else(r == c, 1.0, 0.0))
            else:
                for p in T.serial(size):
                    swept(system, False, p, p)
                for r, c in dsl.parallel(width, width):
                    tile[b * width + r, c] = system[r, width + c]

    return solved(blocks, first, factor, system, tile)


def solve_lanes(dsl: Dsl, blocks: Any, first: Any, factor: Any, tile: Any, size: int, threads: int) -> Any:
    """tile[N * P, P] = D of N blocks from `first` on, zero outside them, for S ≤ 16 = P on CUDA.

    Gauss-Jordan on I - Q in its own place, a column a lane: the pivot row is at hand, and a column's entries come by one
    shuffle each, with no barrier. Up to |q| = 1 pivots are not worth their time.
    """
    T = dsl.T
    count = int(tile.shape[0]) // 16
    # Whole warps: lanes past the last block repeat the first's work.
    lanes = max(32, count * 16)
    rounds = tuple(range(0, lanes, threads))
    # A lane's own row comes in 16-byte accesses where rows are multiples of that.
    vector = 16 * 8 // T.dtype(blocks.dtype).bits
    vector = vector if size % vector == 0 else 1

    @T.macro
    def exchanged(x, heads, order, p):  # type: ignore[no-untyped-def]
        # Rows below p in turn give way to row p where theirs has the larger head.
        held = T.alloc_local((3,), "float32")
        for r in T.unroll(size):
            if r > p:
                if _magnitude(dsl, heads[r]) > _magnitude(dsl, heads[p]):
                    held[0], held[1], held[2] = x[p], heads[p], order[p]
                    x[p], heads[p], order[p] = x[r], heads[r], order[r]
                    x[r], heads[r], order[r] = held[0], held[1], held[2]

    @T.macro
    def eliminated_pivoting(x, heads, order, col):  # type: ignore[no-untyped-def]
        for p in T.unroll(size):
            for r in T.unroll(size):
                heads[r] = T.shfl_sync(x[r], p, 16)
            exchanged(x, heads, order, p)
            heads[p] = 1.0 / heads[p]
            x[p] = T.Select(col == p, heads[p], x[p] * heads[p])
            for r in T.unroll(size):
                if r != p:
                    x[r] = T.Select(col == p, T.float32(0.0), x[r]) - heads[r] * x[p]

    @T.macro
    def eliminated(x, heads, scalars, col):  # type: ignore[no-untyped-def]
        # Rows move up by one at each step, so that the pivot row is always the first: a loop of one step's code, all of
        # which a launch has to fetch from cold memory. The next pivot row comes first, so that its head is on its way
        # while the other rows follow. Pivots are from 1 to about 2^9 here, which the quick division takes to a bit or two.
        scalars[1] = T.call_extern("float32", "__fdividef", 1.0, T.shfl_sync(x[0], 0, 16))
        for p in T.unroll(size, unroll_factor=1):
            for r in T.unroll(size - 1):
                heads[r + 1] = T.shfl_sync(x[r + 1], p, 16)
            scalars[0] = T.Select(col == p, scalars[1], x[0] * scalars[1])
            x[0] = T.Select(col == p, T.float32(0.0), x[1]) - heads[1] * scalars[0]
            heads[0] = T.shfl_sync(x[0], p + 1, 16)
            for r in tuple(range(size - 2)):
                x[r + 1] = T.Select(col == p, T.float32(0.0), x[r + 2]) - heads[r + 2] * scalars[0]
            x[size - 1] = scalars[0]
            scalars[1] = T.call_extern("float32", "__fdividef", 1.0, heads[0])

    @T.macro
    def solved(blocks, first, factor, tile, lane):  # type: ignore[no-untyped-def]
        q, x, heads = (T.alloc_local((size,), "float32") for _ in range(3))
        order = T.alloc_local((size,), "float32")
        top, scalars = T.alloc_local((1,), "float32"), T.alloc_local((2,), "float32")
        block, col = lane // 16 % count, lane % 16
        k, c = T.min(first + block, blocks.shape[0] - 1), T.min(col, size - 1)
        inside = (first + block < blocks.shape[0]) & (col < size)
        top[0] = 0.0
        # All loads first, with no branch among them.
        own = T.alloc_local((size,), blocks.dtype)
        for start in tuple(range(0, size, vector)):
            for r in T.vectorized(vector):
                own[start + r] = blocks[k, c, start + r]
        for r in T.unroll(size):
            q[r], x[r] = T.cast(blocks[k, r, c], "float32"), T.cast(own[r], "float32")
        for r in T.unroll(size):
            heads[r] = factor * (q[r] - x[r])
            q[r] = T.Select(inside, _bounded(dsl, heads[r]), T.float32(0.0))
            x[r] = T.Select(col == r, T.float32(1.0), T.float32(0.0)) - q[r]
            top[0] = T.max(top[0], _magnitude(dsl, q[r]))
        if T.call_extern("int32", "__any_sync", T.uint32(0xFFFFFFFF), T.cast(top[0] > 1.0, "int32")) != 0:
            for r in T.unroll(size):
                order[r] = T.cast(r, "float32")
            eliminated_pivoting(x, heads, order, col)
            # Rows were exchanged, so columns of the inverse are out of their places.
            source = T.alloc_var("int32")
            source = col
            for p in T.unroll(size):
                source = T.Select(T.cast(order[p], "int32") == col, p, source)
            for r in T.unroll(size):
                x[r] = T.shfl_sync(x[r], source, 16)
        else:
            if size > 1:
                eliminated(x, heads, scalars, col)
        # D = 2 (X - I), but on the diagonal of a small Q that cancels, and 2 Q X does not.
        scalars[0] = 0.0
        scalars[1] = 0.0
        for r in T.unroll(size):
            scalars[0] += -2.0 * q[r] * x[r]
            scalars[1] = T.Select(col == r, x[r], scalars[1])
        scalars[1] = 2.0 * (scalars[1] - 1.0)
        scalars[0] = T.Select(scalars[1] > T.float32(-0.5), scalars[0], scalars[1])
        for r in T.unroll(16):
            if r < size:
                tile[block * 16 + r, col] = T.Select(col == r, scalars[0], 2.0 * x[r])
            else:
                tile[block * 16 + r, col] = 0.0

    @T.macro
    def in_rounds(blocks, first, factor, tile):  # type: ignore[no-untyped-def]
        thread = T.get_thread_binding()
        for start in rounds:
            if start + thread < lanes:
                solved(blocks, first, factor, tile, start + thread)

    return in_rounds(blocks, first, factor, tile)


def solve_inline(dsl: Dsl, blocks: Any, first: Any, factor: Any, tile: Any, size: int, width: int, threads: int) -> Any:
    """tile[N * P, P] = D of N blocks from `first` on, S ≤ 16, by lanes where there are any."""
    if not dsl.cpu:
        return solve_lanes(dsl, blocks, first, factor, tile, size, threads)
    return solve_shared(dsl, blocks, first, factor, dsl.shared((width, 2 * width), "float32"), tile, size)


def _solve(dsl: Dsl, *, S: int, P: int, dtype: str, has_shrink: bool) -> Any:
    """delta[k] = D, one block a program."""
    T = dsl.T
    n_k = T.dynamic("n_k")

    @T.prim_func
    def kernel(
        blocks: T.Tensor((n_k, S, S), dtype), shrink: T.Tensor((1,), "float32"), delta: T.Tensor((n_k, S, S), "float32")
    ):
        with T.Kernel(n_k, threads=256) as pid_k:
            system = dsl.shared((P, 2 * P), "float32")
            tile = dsl.shared((P, P), "float32")
            solve_shared(dsl, blocks, pid_k, shrink[0] if has_shrink else 1.0, system, tile, S)
            for r, c in dsl.parallel(P, P):
                if r < S and c < S:
                    delta[pid_k, r, c] = tile[r, c]

    return kernel


def _solve_pair(dsl: Dsl, *, K: Size, S: int, dtype: str, has_shrink: bool) -> Any:
    """delta[k] = D for S ≤ 16, on CUDA: a warp takes two blocks. A constant K spares each access its guard."""
    T = dsl.T
    n_k = dsl.size("n_k", K)

    @T.prim_func
    def kernel(
        blocks: T.Tensor((n_k, S, S), dtype), shrink: T.Tensor((1,), "float32"), delta: T.Tensor((n_k, S, S), "float32")
    ):
        with T.Kernel(T.ceildiv(n_k, 2), threads=32) as pid:
            tile = dsl.shared((32, 16), "float32")
            solve_lanes(dsl, blocks, pid * 2, shrink[0] if has_shrink else 1.0, tile, S, 32)
            for i, m in dsl.parallel(32, 16):
                if i % 16 < S and m < S and pid * 2 + i // 16 < n_k:
                    delta[pid * 2 + i // 16, i % 16, m] = tile[i, m]

    return kernel


def solve(blocks: Tensor, delta: Tensor, shrink: Tensor | None, inline: bool) -> bool:
    """Writes delta[k, s, s] in a launch of its own, unless the next kernel's programs are to solve their blocks `inline`.

    Returns whether they have to; blocks above MAX_INLINE always get the launch.
    """
    target, size = target_of(blocks), blocks.shape[1]
    small = size <= MAX_INLINE
    if small and (inline or target.cpu):
        return True
    constants = {"S": size, "dtype": dtype_name(blocks.dtype), "has_shrink": shrink is not None}
    if small:
        run = build(_solve_pair, target, **sizes(target, K=len(blocks)), **constants)
    else:
        run = build(_solve, target, P=pad(size), **constants)
    run(blocks, None if shrink is None else shrink.view(1), delta)
    return False
