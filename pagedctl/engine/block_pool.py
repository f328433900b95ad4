"""The block pool: who owns which KV block, and which blocks hold a known prefix.

    block   0 .. num_blocks - 1    usable
    block   num_blocks             the null block: nobody owns it

Pure Python, ordered containers only. A block is either free (refcount 0, in one of two queues
exactly once) or referenced. Free blocks without a cached prefix are handed out first, the one
that was freed longest ago before all others; then those with a cached prefix, the least recently
used first, which lose it. A freed block keeps its content until then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from pagedctl.engine.prefix_index import CachedBlock, Link, PrefixIndex


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold *num_tokens*."""
    return -(-num_tokens // block_size)


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
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, with a cached prefix or without."""
        return len(self._free) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a new sequence could share, free or in use."""
        return len(self._index)

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def is_private(self, block: int) -> bool:
        """Whether its one owner may write into *block*: nobody else reads it or can find it."""
        return self._refcounts[block] == 1 and block not in self._index

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take *count* blocks, each with refcount 1; None (and no change) if there are fewer."""
        if count > self.num_free:
            return None
        return tuple(self._take() for _ in range(count))

    def find(self, key: bytes, tokens: Sequence[int], parent: Link) -> CachedBlock | None:
        """The block of *key* whose own tokens are *tokens*, behind *parent*, if there is one."""
        return self._index.find(key, tokens, parent)

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of *blocks*, which must be referenced or cached."""
        for block in blocks:
            if self._refcounts[block] < 1 and block not in self._free_cached:
                raise BlockPoolError(f"block {block} is free and cannot be shared")
        for block in blocks:
            self._free_cached.pop(block, None)
            self._refcounts[block] += 1

    def num_revived(self, blocks: Sequence[int]) -> int:
        """How many of *blocks* are free now, so that sharing them takes them from the pool."""
        return sum(1 for block in blocks if self._refcounts[block] == 0)

    def publish(self, block: int, key: bytes, tokens: Sequence[int], parent: Link) -> CachedBlock:
        """Let new sequences find *block*, full and in use, from now on; the parent of its next.

        Another block that was published under the same prefix before stays the one to find.
        """
        if self._refcounts[block] < 1:
            raise BlockPoolError(f"block {block} is free and cannot be published")
        return self._index.put(key, tokens, block, parent)

    def unlink(self, blocks: Iterable[int]) -> None:
        """Let nobody find *blocks* any more; who shares them already keeps them."""
        for block in blocks:
            if self._index.drop(block) and block in self._free_cached:
                del self._free_cached[block]
                self._free[block] = None

    def unlink_all(self) -> int:
        """Forget every cached prefix; how many blocks that were."""
        count = self.num_cached
        self.unlink(self._index.blocks())
        return count

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
                queue = self._free_cached if block in self._index else self._free
                queue[block] = None

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Recompute the books from the live tables; raises BlockPoolError on a difference."""
        held = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            counted, booked = held.pop(block, 0), self._refcounts[block]
            if counted != booked:
                raise BlockPoolError(
                    f"block {block} has {booked} references, tables hold {counted}"
                )
            queues = (block in self._free, block in self._free_cached)
            cached = block in self._index
            if queues != (booked == 0 and not cached, booked == 0 and cached):
                raise BlockPoolError(
                    f"block {block} has {booked} references, is {'' if cached else 'not '}cached, "
                    f"and its places in the free queues are {queues}"
                )
        if held:
            raise BlockPoolError(f"tables hold blocks outside the pool: {sorted(held)}")
        self._index.audit()

    def _take(self) -> int:
        queue = self._free or self._free_cached
        block, _ = queue.popitem(last=False)
        self._index.drop(block)
        self._refcounts[block] = 1
        return block
