"""A block pool beside a reference in the plainest form: equal events, equal results."""

from __future__ import annotations

import random
from collections import Counter

from pagedctl.engine.block_pool import BlockPool
from pagedctl.engine.prefix_index import CachedBlock, Link, chained_key

ROOT_KEY = b"root"
Prefix = tuple[int, ...]
"""A prefix of blocks of one token each."""


def publish(pool: BlockPool, blocks: tuple[int, ...], prefix: Prefix) -> None:
    """Publish *blocks* as the first ones of *prefix*."""
    key = ROOT_KEY
    parent: Link = ROOT_KEY
    for block, token in zip(blocks, prefix, strict=False):
        key = chained_key(key, [token])
        parent = pool.publish(block, key, [token], parent)


def find(pool: BlockPool, prefix: Prefix) -> tuple[int, ...]:
    """The longest cached part of *prefix*."""
    key = ROOT_KEY
    parent: Link = ROOT_KEY
    found: list[CachedBlock] = []
    for token in prefix:
        key = chained_key(key, [token])
        one = pool.find(key, [token], parent)
        if one is None:
            break
        found.append(one)
        parent = one
    return tuple(one.block for one in found)


class ReferencePool:
    """The same pool in the plainest form: two lists, one table of prefixes, one of owners."""

    def __init__(self, num_blocks: int) -> None:
        self.plain = list(range(num_blocks))
        self.cached: list[int] = []
        self.prefixes: dict[int, Prefix] = {}
        self.owners: Counter[int] = Counter()

    def allocate(self, count: int) -> tuple[int, ...] | None:
        order = [*self.plain, *self.cached]
        if count > len(order):
            return None
        taken = tuple(order[:count])
        for block in taken:
            self.prefixes.pop(block, None)
        self.plain = [block for block in self.plain if block not in taken]
        self.cached = [block for block in self.cached if block not in taken]
        self.owners.update(taken)
        return taken

    def share(self, blocks: tuple[int, ...]) -> None:
        self.cached = [block for block in self.cached if block not in blocks]
        self.owners.update(blocks)

    def release(self, blocks: tuple[int, ...]) -> None:
        for block in reversed(blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                (self.cached if block in self.prefixes else self.plain).append(block)

    def publish(self, blocks: tuple[int, ...], prefix: Prefix) -> None:
        for place, block in enumerate(blocks[: len(prefix)]):
            behind = prefix[: place + 1]
            if block not in self.prefixes and behind not in self.prefixes.values():
                self.prefixes[block] = behind

    def unlink(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            if self.prefixes.pop(block, None) and block in self.cached:
                self.cached.remove(block)
                self.plain.append(block)

    def find(self, prefix: Prefix) -> tuple[int, ...]:
        blocks = {behind: block for block, behind in self.prefixes.items()}
        found = []
        for place in range(len(prefix)):
            if prefix[: place + 1] not in blocks:
                break
            found.append(blocks[prefix[: place + 1]])
        return tuple(found)


class Holder:
    """A sequence as the pool sees it: a prefix, and the blocks that hold the first of it."""

    def __init__(self, prefix: Prefix, shared: int, blocks: tuple[int, ...]) -> None:
        self.prefix = prefix
        self.shared = shared
        self.blocks = blocks


class Pair:
    """A pool and its reference, given the same events; whatever they hand out must be equal."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.reference = ReferencePool(pool.num_blocks)
        self.holders: list[Holder] = []
        self.counts: Counter[str] = Counter()

    def admit(self, prefix: Prefix) -> None:
        """Share the longest cached part of *prefix* and take blocks for the rest."""
        found = find(self.pool, prefix)
        assert found == self.reference.find(prefix)
        revived = self.pool.num_revived(found)
        if len(prefix) - len(found) + revived > self.pool.num_free:
            self.counts["refused"] += 1
            return
        self.pool.share(found)
        self.reference.share(found)
        self.counts["shared"] += bool(found)
        own = self._allocate(len(prefix) - len(found))
        assert own is not None
        self.holders.append(Holder(prefix, len(found), (*found, *own)))

    def grow(self, place: int, tokens: Prefix) -> None:
        holder = self.holders[place]
        blocks = self._allocate(len(tokens))
        if blocks is not None:
            holder.prefix += tokens
            holder.blocks += blocks

    def publish(self, place: int, count: int) -> None:
        holder = self.holders[place]
        publish(self.pool, holder.blocks[:count], holder.prefix)
        self.reference.publish(holder.blocks[:count], holder.prefix)

    def finish(self, place: int, *, fault: bool = False) -> Holder:
        holder = self.holders.pop(place)
        if fault:
            self.pool.unlink(holder.blocks[holder.shared :])
            self.reference.unlink(holder.blocks[holder.shared :])
        self.pool.release(holder.blocks)
        self.reference.release(holder.blocks)
        return holder

    def forget(self) -> None:
        count = len(self.reference.prefixes)
        self.reference.unlink(tuple(self.reference.prefixes))
        assert self.pool.unlink_all() == count

    def check(self) -> None:
        """The audit from live tables, and the books against the reference's."""
        self.pool.audit([holder.blocks for holder in self.holders])
        reference = self.reference
        assert self.pool.num_free == len(reference.plain) + len(reference.cached)
        assert self.pool.num_cached == len(reference.prefixes)
        held = Counter(block for holder in self.holders for block in holder.blocks)
        assert all(self.pool.refcount(block) == held[block] for block in range(len(held)))

    def _allocate(self, count: int) -> tuple[int, ...] | None:
        before = self.pool.num_cached
        blocks = self.pool.allocate(count)
        assert blocks == self.reference.allocate(count)
        self.counts["refused"] += blocks is None
        self.counts["evicted"] += before - self.pool.num_cached
        return blocks


def churn(pool: BlockPool, events: int, seed: int = 7) -> Counter[str]:
    """Random events with all books checked after each; what they exercised."""
    rng, pair = random.Random(seed), Pair(pool)

    def one() -> int:
        return rng.randrange(len(pair.holders))

    def tokens(most: int) -> Prefix:
        return tuple(rng.choices((1, 1, 1, 2), k=rng.randint(1, most)))

    for _ in range(events):
        choice = rng.random()
        if choice < 0.3 or not pair.holders:
            pair.admit(tokens(8))
        elif choice < 0.5:
            pair.grow(one(), tokens(3))
        elif choice < 0.75:
            pair.publish(one(), rng.randint(0, 8))
        elif choice < 0.76:
            pair.forget()
        elif choice < 0.8:
            pair.finish(one(), fault=True)
        elif choice < 0.85:
            pair.admit(pair.finish(one()).prefix)
        else:
            pair.finish(one())
        pair.check()
    while pair.holders:
        pair.finish(0)
    pair.check()
    assert pool.num_free == pool.num_blocks
    return pair.counts
