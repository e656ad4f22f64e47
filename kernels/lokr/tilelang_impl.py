"""LoKr in TileLang: the four functions that kernels.common.fused calls."""

from kernels.lokr.tilelang_bypass import bypass_backward, bypass_forward
from kernels.lokr.tilelang_merge import merge_backward, merge_forward

__all__ = ["bypass_backward", "bypass_forward", "merge_backward", "merge_forward"]
