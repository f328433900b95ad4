"""The kernel of a linear layer on float32 operands: IEEE products on the CUDA cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def fma_chain(
    x,
    weight,
    bias,
    y,
    rows,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One program a tile; each output is one chain of fused multiply-adds over ascending k.

    Narrower operands are widened as they are loaded. A dot of precision ``ieee`` keeps an output
    in one register and takes k one after the other, whatever the tile.
    """
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * k + step[None, :]
    weight_at = weight + column[:, None] * k + step[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        inside = start + step[None, :] < k
        left = tl.load(x_at + start, mask=inside & (row[:, None] < rows), other=0.0)
        right = tl.load(weight_at + start, mask=inside & (column[:, None] < n), other=0.0)
        sums = tl.dot(left.to(tl.float32), right.to(tl.float32).T, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    place = y + row[:, None] * n + column[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < n))
