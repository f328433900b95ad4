"""Prefix sharing: what a new sequence finds, whom it waits for, what it leaves to others.

Pure Python, no tensors. Only full blocks are shared, and nobody writes into a shared block. A
block can be found once the step that computed it was committed without a fault; until then its
prefix is *awaited*: a sequence that would compute the same block waits for its leader instead. So
does one whose prompt another sample of its request is scoring.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedctl.engine.block_pool import BlockPool
from pagedctl.engine.prefix_index import CachedBlock, Link, extend_keys
from pagedctl.engine.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """What a sequence would share; ``awaited``: a leader computes now what it would compute."""

    found: tuple[CachedBlock, ...] = ()
    awaited: bool = False

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(one.block for one in self.found)


class PrefixSharing:
    """The prefix cache of one pool; with ``enabled`` off nothing is ever found or kept."""

    def __init__(self, pool: BlockPool, *, block_size: int, enabled: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._leaders: dict[bytes, Sequence] = {}

    def look_up(self, sequence: Sequence) -> Prefix:
        """The longest cached prefix of a waiting *sequence*, as far as it may skip computing."""
        scores = sequence.prompt_scores
        if scores is not None and scores.scorer is not None and not scores.is_complete:
            return Prefix(awaited=True)
        if not self.enabled:
            return Prefix()
        limit = sequence.num_skippable // self.block_size
        self._extend(sequence, limit)
        if limit and sequence.block_keys[limit - 1] in self._leaders:
            return Prefix(awaited=True)  # keys are chained: a leader computes all of it
        found: list[CachedBlock] = []
        parent: Link = sequence.root_key
        for place, key in enumerate(sequence.block_keys[:limit]):
            one = self.pool.find(key, self._tokens(sequence, place), parent)
            if one is None:
                return Prefix(found=tuple(found), awaited=key in self._leaders)
            found.append(one)
            parent = one
        return Prefix(found=tuple(found))

    def lead(self, sequence: Sequence, prefix: Prefix) -> None:
        """*sequence* was admitted with *prefix*: it computes the other blocks that are known.

        Where two compute the same block, the first one leads.
        """
        num_found = len(prefix.found)
        sequence.num_shared = sequence.num_published = num_found
        sequence.parent = prefix.found[-1] if prefix.found else sequence.root_key
        if sequence.prompt_scores is not None and sequence.prompt_scores.scorer is None:
            sequence.prompt_scores.scorer = sequence
        if not self.enabled:
            return
        count = sequence.num_computable // self.block_size
        self._extend(sequence, count)
        for key in sequence.block_keys[num_found:count]:
            self._leaders.setdefault(key, sequence)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """The first *num_tokens* tokens of a running *sequence* were computed without a fault."""
        count = num_tokens // self.block_size
        if not self.enabled or count <= sequence.num_published:
            return
        self._extend(sequence, count)
        for place in range(sequence.num_published, count):
            key = sequence.block_keys[place]
            sequence.parent = self.pool.publish(
                sequence.blocks[place], key, self._tokens(sequence, place), sequence.parent
            )
            self._follow(sequence, key)
        sequence.num_published = count

    def leave(self, sequence: Sequence) -> None:
        """*sequence* stops computing; who waited for it may compute for himself."""
        scores = sequence.prompt_scores
        if scores is not None and scores.scorer is sequence:
            scores.scorer = None
        for key in sequence.block_keys[sequence.num_published :]:
            self._follow(sequence, key)

    def taint(self, sequence: Sequence) -> None:
        """Nobody may find the blocks that a faulty *sequence* computed."""
        self.pool.unlink(sequence.blocks[sequence.num_shared :])

    def audit(self, running: list[Sequence]) -> None:
        """Raise RuntimeError if somebody leads who does not run."""
        for key, leader in self._leaders.items():
            if not any(one is leader for one in running):
                raise RuntimeError(f"{leader.request.id} leads {key.hex()} and does not run")

    def _follow(self, sequence: Sequence, key: bytes) -> None:
        if self._leaders.get(key) is sequence:
            del self._leaders[key]

    def _extend(self, sequence: Sequence, num_blocks: int) -> None:
        extend_keys(
            sequence.block_keys,
            sequence.root_key,
            sequence.tokens,
            block_size=self.block_size,
            num_blocks=num_blocks,
        )

    def _tokens(self, sequence: Sequence, place: int) -> list[int]:
        return sequence.tokens[place * self.block_size : (place + 1) * self.block_size]
