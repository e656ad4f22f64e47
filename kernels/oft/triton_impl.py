"""Diag-OFT in Triton; D = R - I, M = D diag(r) + diag(r - 1), or D itself without rescale.

    merge     ΔW[O, I]: per block Mᵀ W_k                       one launch: a program solves its block and streams its rows
      backward  grad_W: per block M G_k, P_k = W_k G_kᵀ          one launch, W and G read once, and a second that sums P
    bypass    out[T, O]: per block y_k M                       the same over tokens, several blocks a program
      backward  grad_y: per block g_k Mᵀ, P_k = y_kᵀ g_k
                grad_blocks, grad_rescale from P_k: kernels/common/cayley.py

D is solved in float32, kept as [k, s, s] float32 for the backward, and meets 16-bit tensor cores as a sum of two 16-bit
parts: it is never rounded. Sums over more than one program go through float32 partials added in a fixed order.
"""

from kernels.oft.triton_bypass import bypass_backward, bypass_forward
from kernels.oft.triton_merge import merge_backward, merge_forward

__all__ = ["bypass_backward", "bypass_forward", "merge_backward", "merge_forward"]
