"""The last step of LoHa's backward in TileLang: the four factor gradients from their partials, in one launch."""

from typing import Any

from torch import Tensor

from kernels.common.tilelang_target import Dsl, build, dtype_name, target_of
from kernels.loha.grads import Grads

# Small blocks, since the sums are few and short: a wide launch is what makes them quick.
_BLOCK, _THREADS = 256, 64


def reduce(dsl: Dsl, *, width: int, dtype: str, needs: tuple[tuple[bool, bool], tuple[bool, bool]]) -> Any:
    """The ups and the downs that `needs` asks for = scale · Σ_s parts[s], in the order of s, in vectors of `width`.

    Of both of a kind the partials hold the first one's vectors, n_up or n_down of them, before the second one's.
    """
    T = dsl.T
    block = _BLOCK // width
    n_up, n_down, splits_up, splits_down = (T.dynamic(n) for n in ("n_up", "n_down", "splits_up", "splits_down"))
    size_up, size_down = n_up * sum(needs[0]), n_down * sum(needs[1])

    def total(parts: Any, outs: Any, need: tuple[bool, bool], count: Any, first: Any, scale: Any) -> Any:
        # A macro renames the kernel's scalars that are its arguments, and two of one name don't compile.
        size, skipped = count * sum(need), count if all(need) else 0

        @T.macro
        def sum_block(first):  # type: ignore[no-untyped-def]
            acc = dsl.fragment((block, width))
            T.clear(acc)
            # In eights, whose loads are in flight together.
            for step in T.serial(T.ceildiv(parts.shape[0], 8)):
                for k in T.unroll(8):
                    for n, lane in dsl.parallel(block, width):
                        if first + n < size and step * 8 + k < parts.shape[0]:
                            acc[n, lane] += parts[step * 8 + k, first + n, lane]
            if need[0]:
                for n, lane in dsl.parallel(block, width):
                    if first + n < count:
                        outs[0][first + n, lane] = T.cast(acc[n, lane] * scale, dtype)
            if need[1]:
                for n, lane in dsl.parallel(block, width):
                    if first + n >= skipped and first + n < size:
                        outs[1][first + n - skipped, lane] = T.cast(acc[n, lane] * scale, dtype)

        return sum_block(first)

    @T.prim_func
    def kernel(
        up_parts: T.Tensor((splits_up, size_up, width), "float32"),
        up1: T.Tensor((n_up, width), dtype),
        up2: T.Tensor((n_up, width), dtype),
        down_parts: T.Tensor((splits_down, size_down, width), "float32"),
        down1: T.Tensor((n_down, width), dtype),
        down2: T.Tensor((n_down, width), dtype),
        scale: T.float32,
    ):
        if not any(needs[1]):
            with T.Kernel(T.ceildiv(size_up, block), threads=_THREADS) as pid:
                total(up_parts, (up1, up2), needs[0], n_up, pid * block, scale)
        elif not any(needs[0]):
            with T.Kernel(T.ceildiv(size_down, block), threads=_THREADS) as pid:
                total(down_parts, (down1, down2), needs[1], n_down, pid * block, scale)
        else:
            with T.Kernel(T.ceildiv(size_up, block) + T.ceildiv(size_down, block), threads=_THREADS) as pid:
                if pid < T.ceildiv(size_up, block):
                    total(up_parts, (up1, up2), needs[0], n_up, pid * block, scale)
                else:
                    first = (pid - T.ceildiv(size_up, block)) * block
                    total(down_parts, (down1, down2), needs[1], n_down, first, scale)

    return kernel


def reduce_grads(parts: tuple[Tensor | None, Tensor | None], grads: tuple[Grads, Grads], scale: float) -> None:
    """The gradients of grads[k], where not None, = scale · Σ_s parts[k][s], for ups and downs as `new_grads` makes them."""
    made = [grad for pair in grads for grad in pair if grad is not None]
    if not made:
        return
    width = 1 if any(grad.numel() % 4 for grad in made) else 4
    needs = tuple(tuple(grad is not None for grad in pair) for pair in grads)
    run = build(reduce, target_of(made[0]), width=width, dtype=dtype_name(made[0].dtype), needs=needs)
    values: list[Tensor | None] = []
    for part, pair in zip(parts, grads, strict=True):
        values.append(None if part is None else part.view(part.shape[0], -1, width))
        values += [None if grad is None else grad.view(-1, width) for grad in pair]
    run(*values, scale)
