"""The Cayley transform of skew blocks: its formulas, the sizes that kernels take, and the constraint's chain rule.

    Q = f (B - Bᵀ)      X = (I - Q)⁻¹      D = R - I = 2 Q X = 2 (X - I)
    backward: with P = ∂L/∂D, ∂L/∂Q = 2 Xᵀ P Xᵀ and ∂L/∂B = f (∂L/∂Q - ∂L/∂Qᵀ), X = I + D / 2

f = min(1, constraint / (‖B - Bᵀ‖ + 1e-8)) is 1 without a constraint. D = 2 Q X loses nothing where Q is small, and needs no
pivots there, since I - Q has the identity as its symmetric part; D = 2 (X - I), with pivots, is exact where Q is large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.errors import UnsupportedCase
from kernels.common.views import power_of_two

MAX_BLOCK = 64
# Entries of Q are kept within this bound, whose fourth power float32 holds. Such an entry turns its plane by π to float32's
# last bit, which is also the limit that PyTorch finds for inf.
MAX_Q = 1e9
# Blocks up to this size are eliminated by the program that applies them; larger ones by a kernel of their own.
MAX_INLINE = 16
# Blocks up to this size are applied by multiply-adds of whole rows; larger ones by tensor-core dots.
MAX_SCALARS = 4


def pad(size: int) -> int:
    """The side of a block's tile: a power of two, of at least the 16 that tensor cores take."""
    return power_of_two(size, 16)


def check_size(op: str, backend: str, size: int) -> None:
    """Raises UnsupportedCase for blocks too large for the kernels' tiles."""
    if size > MAX_BLOCK:
        raise UnsupportedCase(
            f"{op}: blocks of {size} are above {MAX_BLOCK}, the largest whose Cayley transform the {backend} kernels hold"
        )


def shrink_factor(blocks: Tensor, constraint: float) -> Tensor | None:
    """f as a float32 tensor on the blocks' device, or None without a constraint."""
    if constraint <= 0:
        return None
    b = blocks.float()
    return (constraint / ((b - b.mT).norm() + 1e-8)).clamp(max=1)


def shrink_backward(grad: Tensor, blocks: Tensor, constraint: float) -> Tensor:
    """∂L/∂B in the blocks' dtype from `grad` = ∂L/∂Q - ∂L/∂Qᵀ (float32, Q after the constraint)."""
    b = blocks.float()
    q = b - b.mT
    norm = q.norm() + 1e-8
    factor = (constraint / norm).clamp(max=1)
    # <∂L/∂Q, Q> of the unbounded Q; ∂f/∂B = -f / ‖Q‖² · 2 Q where the bound holds, else 0.
    along = torch.where(norm > constraint, (grad * b).sum() * factor / (norm * norm), 0)
    return (factor * grad - 2 * along * q).to(blocks.dtype)


class Gradients:
    """Where a backward writes the gradients of blocks and rescale, None for those not asked for.

    blocks: ∂L/∂B, or with a constraint ∂L/∂Q - ∂L/∂Qᵀ in float32, which `result` turns into it. rescale: [k · s].
    """

    def __init__(
        self, blocks: Tensor, rescale: Tensor | None, constraint: float, need_blocks: bool, need_rescale: bool
    ) -> None:
        self._blocks, self._constraint = blocks, constraint
        dtype = torch.float32 if constraint > 0 else blocks.dtype
        self.blocks = torch.empty(blocks.shape, dtype=dtype, device=blocks.device) if need_blocks else None
        self.rescale = None
        if need_rescale and rescale is not None:
            self.rescale = torch.empty(rescale.shape, dtype=rescale.dtype, device=rescale.device)

    def partials(self, splits: int) -> Tensor | None:
        """A buffer for P by split, float32 [splits, k, s, s]; None where one program sees all of P, or nothing needs it."""
        if splits == 1 or (self.blocks is None and self.rescale is None):
            return None
        return torch.empty((splits, *self._blocks.shape), dtype=torch.float32, device=self._blocks.device)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of blocks and rescale, once the kernels are launched."""
        if self.blocks is not None and self._constraint > 0:
            return shrink_backward(self.blocks, self._blocks, self._constraint), self.rescale
        return self.blocks, self.rescale
