"""LoKr in Triton: the four functions that kernels.common.fused calls."""

from kernels.lokr.triton_bypass import bypass_backward, bypass_forward
from kernels.lokr.triton_merge import merge_backward, merge_forward

__all__ = ["bypass_backward", "bypass_forward", "merge_backward", "merge_forward"]
