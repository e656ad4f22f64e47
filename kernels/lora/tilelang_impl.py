"""LoRA in TileLang: what `FusedOp` calls."""

from kernels.lora.tilelang_bypass import bypass_forward
from kernels.lora.tilelang_bypass_backward import bypass_backward
from kernels.lora.tilelang_merge import merge_backward, merge_forward

__all__ = ["bypass_backward", "bypass_forward", "merge_backward", "merge_forward"]
