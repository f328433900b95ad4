"""The admission watermark: blocks that stay free so that those who run can grow. No torch.

Without it a new sequence takes the last free blocks, the next decodes of the running ones
preempt it, and its prefill is computed again and again. An admission costs as many tokens as
the sequence must compute. If the batch can then make ``cost / WASTE_SHARE`` tokens before blocks
run out, losing the new sequence again wastes at most that share of the work. Computing many
tokens at once is cheaper than decoding as many, so for a long sequence less is kept free.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from pagedctl.engine.block_pool import blocks_for
from pagedctl.engine.sequence import Sequence

WASTE_SHARE = 0.3
"""Recomputed tokens per decoded token that an admission may risk."""

MOST_AHEAD = 64
"""Most tokens of growth that are kept free for one sequence."""


def keeps_watermark(
    num_free: int,
    running: Collection[Sequence],
    candidate: Sequence,
    *,
    num_found: int,
    block_size: int,
) -> bool:
    """Whether the *num_free* blocks left beside *candidate* let all of them grow long enough.

    ``num_found`` of its tokens need no computing. No sequence grows beyond its ``max_len``.
    """
    cost = len(candidate.tokens) - num_found
    ahead = min(math.ceil(cost / (WASTE_SHARE * (len(running) + 1))), MOST_AHEAD)
    blocks_ahead = growth(candidate, len(candidate.tokens), ahead, block_size)
    for one in running:
        if blocks_ahead > num_free:
            break
        blocks_ahead += growth(one, len(one.blocks) * block_size, ahead, block_size)
    return blocks_ahead <= num_free


def growth(sequence: Sequence, held_tokens: int, ahead: int, block_size: int) -> int:
    """Blocks beyond *held_tokens* that *sequence* needs for its next *ahead* tokens."""
    end = min(len(sequence.tokens) + ahead, sequence.max_len - 1)
    return max(0, blocks_for(end, block_size) - blocks_for(held_tokens, block_size))
