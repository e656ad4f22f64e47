"""LoKr in Triton: the four functions that kernels.common.fused calls."""

from kernels.lokr.triton_merge import merge_backward, merge_forward

__all__ = ["merge_backward", "merge_forward"]
