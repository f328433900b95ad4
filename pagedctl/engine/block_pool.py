"""The block pool: who owns which KV block. Pure Python, ordered containers only.

    block   0 .. num_blocks - 1    usable
    block   num_blocks             the null block: nobody owns it

A block is either free (refcount 0, in the free queue exactly once) or referenced. Blocks are
taken from the front of the queue and returned to its back, so the block that was freed longest
ago is reused first; a freed block keeps its content until then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockPoolError(RuntimeError):
    """The pool's books are broken: a fault of ours, never of the user."""


class BlockPool:
    """Fixed-size KV blocks with reference counts. All changes are all-or-nothing."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self._refcounts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take *count* blocks, each with refcount 1; None (and no change) if there are fewer."""
        if count > len(self._free):
            return None
        blocks = tuple(self._free.popitem(last=False)[0] for _ in range(count))
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of *blocks*, which must be referenced already."""
        for block in blocks:
            if self._refcounts[block] < 1:
                raise BlockPoolError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._refcounts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of *blocks*; those that nobody holds become free.

        The last block goes first into the queue, so that of one sequence's blocks the tail is
        reused before the head.
        """
        dropped = Counter(blocks)
        for block, times in dropped.items():
            if self._refcounts[block] < times:
                raise BlockPoolError(
                    f"block {block} is released {times} times but has "
                    f"{self._refcounts[block]} references"
                )
        for block in reversed(blocks):
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                self._free[block] = None

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Recompute the books from the live tables; raises BlockPoolError on a difference."""
        held = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            counted, booked = held.pop(block, 0), self._refcounts[block]
            if counted != booked:
                raise BlockPoolError(
                    f"block {block} has {booked} references, tables hold {counted}"
                )
            if (booked == 0) != (block in self._free):
                raise BlockPoolError(
                    f"block {block} has {booked} references and is "
                    f"{'' if block in self._free else 'not '}in the free queue"
                )
        if held:
            raise BlockPoolError(f"tables hold blocks outside the pool: {sorted(held)}")
