"""LoKr in TileLang: the four functions that kernels.common.fused calls."""

from kernels.lokr.tilelang_merge import merge_backward, merge_forward

__all__ = ["merge_backward", "merge_forward"]
