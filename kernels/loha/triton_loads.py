"""Loads of LoHa's factors, and the ranks that they take."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common.errors import UnsupportedCase

MAX_RANK = 128


@triton.jit
def load_up(up, rows_o, mask_o, offs_r, n_r, stride_o, stride_r):
    """up[rows_o, :] as [BLOCK_O, BLOCK_R], zero past the edges."""
    mask = mask_o[:, None] & (offs_r < n_r)[None, :]
    return tl.load(up + rows_o[:, None] * stride_o + offs_r[None, :] * stride_r, mask=mask, other=0.0)


@triton.jit
def load_down(down, rows_i, mask_i, offs_r, n_r, stride_r, stride_i):
    """down[:, rows_i] as [BLOCK_R, BLOCK_I], zero past the edges."""
    mask = (offs_r < n_r)[:, None] & mask_i[None, :]
    return tl.load(down + offs_r.to(tl.int64)[:, None] * stride_r + rows_i[None, :] * stride_i, mask=mask, other=0.0)


def rank_block(op: str, n_r: int) -> int:
    """The rank's tile; raises UnsupportedCase above MAX_RANK."""
    if n_r > MAX_RANK:
        raise UnsupportedCase(f"{op}: rank {n_r} is above {MAX_RANK}, the most that the Triton kernels hold in a tile")
    return max(16, triton.next_power_of_2(n_r))
