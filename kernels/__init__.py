"""Fused adapter kernels: LoRA, LoHa, LoKr and Diag-OFT, as merge and as bypass.

Each family is a subpackage with public `merge` and `bypass`; `backend` picks "eager", "compile", "triton" or
"tilelang". Importing this package needs neither triton nor tilelang nor a GPU.
"""

from kernels.common.errors import UnsupportedCase

__all__ = ["UnsupportedCase"]
