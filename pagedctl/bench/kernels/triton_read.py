"""A kernel that only reads: what the floors of bytes rest on. torch's sums read 4 % slower."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048
PROGRAMS = 528
"""Four programs of eight warps on each of 132 multiprocessors; the fastest of 18 forms tried."""


@triton.jit
def read_all(x, out, blocks, BLOCK: tl.constexpr):
    """Combines every int32 of x [blocks * BLOCK] into out [programs]."""
    folded = tl.zeros((BLOCK,), tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=4):
        folded ^= tl.load(x + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.xor_sum(folded))
