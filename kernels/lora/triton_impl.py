"""LoRA in Triton: what `FusedOp` calls."""

from kernels.lora.triton_bypass import bypass_backward, bypass_forward
from kernels.lora.triton_merge import merge_backward, merge_forward

__all__ = ["bypass_backward", "bypass_forward", "merge_backward", "merge_forward"]
