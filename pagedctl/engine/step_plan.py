"""A step as data: what the scheduler decided, and nothing else. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pagedctl.engine.request import RequestId


@dataclass(frozen=True, kw_only=True)
class ScheduledRow:
    """One sequence's share of a step.

    Tokens ``[start, start + num_tokens)`` are computed. ``sample_offsets`` are the offsets in
    that range at which a token is sampled: usually none, or the last. ``scored_offsets``
    [first, end) are those whose next token, which is known, is scored. ``admitted`` marks a
    sequence whose row must be written in full, ``new_blocks`` being all of its blocks (those
    found in the prefix cache first); else ``new_blocks`` were appended. ``preemptions`` counts
    those of the sequence before: a result may come back after one more.

    Example: a decode of a 41-token sequence, ``start=40, num_tokens=1, sample_offsets=(0,)``.
    """

    request_id: RequestId
    sample: int
    row: int
    start: int
    num_tokens: int
    sample_offsets: tuple[int, ...]
    new_blocks: tuple[int, ...]
    admitted: bool
    scored_offsets: tuple[int, int] = (0, 0)
    preemptions: int = 0

    @property
    def num_scored(self) -> int:
        first, end = self.scored_offsets
        return end - first


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The rows of one step, decodes first, and who was preempted to make room for them."""

    step: int
    rows: tuple[ScheduledRow, ...]
    preempted: tuple[tuple[RequestId, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_sampled(self) -> int:
        return sum(len(row.sample_offsets) for row in self.rows)

    def fingerprint(self) -> bytes:
        """8 bytes that agree between ranks exactly if the whole decision does."""
        return hashlib.sha256(repr(self).encode()).digest()[:8]
