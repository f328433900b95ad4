"""The plainest kernel of a linear layer, and forms of it that add in another order."""

import torch
import triton
import triton.language as tl


@triton.jit
def _plain_chain(
    x,
    weight,
    sums,
    rows,
    n,
    k,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DESCENDING: tl.constexpr,
):
    """64 x 64 sums float32, unrounded: SEGMENTS chains over K, folded left to right."""
    row = tl.program_id(0) * 64 + tl.arange(0, 64)
    column = tl.program_id(1) * 64 + tl.arange(0, 64)
    steps = tl.cdiv(k, BLOCK_K * SEGMENTS)
    total = tl.zeros((64, 64), tl.float32)
    for segment in range(SEGMENTS):
        chain = tl.zeros((64, 64), tl.float32)
        for step in range(steps):
            place = step
            if DESCENDING:
                place = steps - 1 - step
            at = (segment * steps + place) * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = at[None, :] < k
            left = tl.load(
                x + row[:, None] * k + at[None, :], mask=inside & (row[:, None] < rows), other=0.0
            )
            right = tl.load(
                weight + column[:, None] * k + at[None, :],
                mask=inside & (column[:, None] < n),
                other=0.0,
            )
            chain = tl.dot(left, right.T, chain)
        total = chain if SEGMENTS == 1 else total + chain
    place = sums + row[:, None] * n + column[None, :]
    tl.store(place, total, mask=(row[:, None] < rows) & (column[None, :] < n))


def plain_sums(
    x: torch.Tensor, weight: torch.Tensor, *, segments: int = 1, descending: bool = False
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, as float32 sums [M, N] that nothing rounded."""
    rows, k = x.shape
    n = weight.shape[0]
    sums = torch.full((rows, n), torch.nan, dtype=torch.float32, device=x.device)
    _plain_chain[(triton.cdiv(rows, 64), triton.cdiv(n, 64))](
        x,
        weight,
        sums,
        rows,
        n,
        k,
        BLOCK_K=64,
        SEGMENTS=segments,
        DESCENDING=descending,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return sums
