"""The block pool's books: all-or-nothing, no leaks, no double frees, checked after every event."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedctl.engine.block_pool import BlockPool, BlockPoolError, blocks_for
from pagedctl.engine.prefix_index import PrefixIndex
from tests.engine.pool_harness import ROOT_KEY, Pair, Prefix, churn, find, publish


def test_allocation_is_all_or_nothing() -> None:
    """inference-sim/inference-sim#1061: a failed multi-block grow leaves no trace."""
    pool = BlockPool(4)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    pool.audit([held])


def test_the_null_block_is_on_top_of_the_pool_and_never_handed_out() -> None:
    pool = BlockPool(3)
    assert pool.null_block == 3
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.null_block not in blocks


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="not 0"):
        BlockPool(0)


def test_a_freed_block_is_reused_last_and_a_tail_before_its_head() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    assert first == (0, 1)
    pool.release(first)
    assert pool.allocate(4) == (2, 3, 1, 0)


def test_blocks_without_a_prefix_go_before_those_with_one_and_the_tail_before_the_head() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks == (0, 1, 2)
    publish(pool, blocks[:2], (7, 8))
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.allocate(4) == (3, 2, 1, 0)
    assert pool.num_cached == 0


def test_use_makes_a_cached_block_recent() -> None:
    pool = BlockPool(2)
    for prefix in ((7,), (8,)):
        blocks = pool.allocate(1)
        assert blocks is not None
        publish(pool, blocks, prefix)
        pool.release(blocks)
    pool.share(find(pool, (7,)))
    pool.release(find(pool, (7,)))
    assert pool.allocate(1) == (1,)
    assert find(pool, (7,)) == (0,)


def test_a_shared_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.audit([blocks])
    pool.release(blocks)
    assert pool.num_free == 2


def test_forgetting_all_prefixes_leaves_blocks_in_use_with_their_owners() -> None:
    pool = BlockPool(4)
    used, free = pool.allocate(1), pool.allocate(1)
    assert used is not None
    assert free is not None
    publish(pool, used, (7,))
    publish(pool, free, (8,))
    pool.release(free)
    assert not pool.is_private(used[0])
    assert pool.unlink_all() == 2
    assert pool.unlink_all() == 0
    assert find(pool, (7,)) == find(pool, (8,)) == ()
    assert pool.is_private(used[0])
    pool.audit([used])
    assert pool.num_free == 3


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool, blocks: pool.release([*blocks, *blocks]),
        lambda pool, blocks: pool.share([blocks[0], pool.num_blocks - 1]),
        lambda pool, blocks: (pool.release(blocks), pool.release(blocks)),
        lambda pool, blocks: pool.publish(pool.num_blocks - 1, b"key", [1], ROOT_KEY),
    ],
    ids=["released twice at once", "a free block shared", "released twice", "published free"],
)
def test_misuse_raises_and_changes_nothing_of_others(
    misuse: Callable[[BlockPool, tuple[int, ...]], object],
) -> None:
    pool = BlockPool(4)
    other = pool.allocate(1)
    blocks = pool.allocate(2)
    assert other is not None
    assert blocks is not None
    with pytest.raises(BlockPoolError):
        misuse(pool, blocks)
    assert pool.refcount(other[0]) == 1


@pytest.mark.parametrize(
    "breakage",
    [
        lambda pool: pool._free.popitem(),
        lambda pool: pool._free.setdefault(0),
        lambda pool: pool._free_cached.setdefault(0),
        lambda pool: pool._refcounts.__setitem__(0, 2),
        lambda pool: pool._index.drop(1),
        lambda pool: pool._index._by_key.clear(),
    ],
    ids=["lost", "free and used", "cached and used", "a reference too many", "unlinked", "index"],
)
def test_the_audit_sees_every_broken_book(breakage: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks == (0, 1)
    publish(pool, (1,), (7,))
    pool.release((1,))
    pool.audit([(0,)])
    breakage(pool)
    with pytest.raises(RuntimeError):
        pool.audit([(0,)])


def test_the_audit_sees_blocks_outside_the_pool() -> None:
    with pytest.raises(BlockPoolError, match=r"outside the pool: \[4\]"):
        BlockPool(4).audit([(4,)])


def test_ten_thousand_events_leave_no_leak_and_equal_the_reference() -> None:
    counts = churn(BlockPool(24), 10_000)
    assert min(counts[what] for what in ("refused", "shared", "evicted")) > 100, counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_events_in_pools_of_all_sizes(seed: int) -> None:
    assert sum(churn(BlockPool(1 + 3 * seed), 10_000, seed).values()) > 100


class PoolMachine(RuleBasedStateMachine):
    """The events of a pool in any order that hypothesis finds."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(BlockPool(8))

    @rule(prefix=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=9))
    def admit(self, prefix: list[int]) -> None:
        self.pair.admit(tuple(prefix))

    @precondition(lambda self: self.pair.holders)
    @rule(data=st.data(), tokens=st.lists(st.sampled_from((1, 2)), max_size=4))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        self.pair.grow(self._holder(data), tuple(tokens))

    @precondition(lambda self: self.pair.holders)
    @rule(data=st.data(), count=st.integers(0, 9))
    def publish(self, data: st.DataObject, count: int) -> None:
        self.pair.publish(self._holder(data), count)

    @precondition(lambda self: self.pair.holders)
    @rule(data=st.data(), fault=st.booleans())
    def finish(self, data: st.DataObject, fault: bool) -> None:
        self.pair.finish(self._holder(data), fault=fault)

    @rule()
    def forget(self) -> None:
        self.pair.forget()

    @invariant()
    def books_agree(self) -> None:
        self.pair.check()

    def _holder(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.pair.holders) - 1))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


class Mutant(BlockPool):
    """A pool with a planted fault; ``reached`` counts how often its site was."""

    reached = 0


class Leaking(Mutant):
    """The last block of a release is never returned."""

    def release(self, blocks) -> None:  # type: ignore[no-untyped-def]
        super().release(blocks[:-1])
        if blocks:
            self.reached += 1
            self._refcounts[blocks[-1]] = 0


class DoublyHandedOut(Mutant):
    """A freed block stands twice in the queue, so it is handed out while it is referenced."""

    def allocate(self, count):  # type: ignore[no-untyped-def]
        blocks = super().allocate(count)
        if blocks and self._refcounts[0] and 0 not in blocks:
            self.reached += 1
            self._free[blocks[0]] = None
            self._refcounts[blocks[0]] -= 1
            self._refcounts[0] += 1
            return (0, *blocks[1:])
        return blocks


class Uncounted(Mutant):
    """A shared block gets no further reference."""

    def share(self, blocks) -> None:  # type: ignore[no-untyped-def]
        self.reached += len(blocks)
        for block in blocks:
            self._free_cached.pop(block, None)
            self._refcounts[block] = max(self._refcounts[block], 1)


class FindableAfterEviction(Mutant):
    """A block that is handed out keeps its old prefix."""

    def _take(self) -> int:
        block = next(iter(self._free or self._free_cached))
        kept = self._index._by_block.get(block)
        super()._take()
        if kept is not None:
            self.reached += 1
            self._index._by_block[block] = self._index._by_key[kept.key] = kept
        return block


class HeadFirst(Mutant):
    """A sequence's head is reused before its tail."""

    def release(self, blocks) -> None:  # type: ignore[no-untyped-def]
        self.reached += 1
        super().release(blocks[::-1])


class LowestNumberEvicted(Mutant):
    """Of the cached blocks the one with the lowest number goes first, however recent its use."""

    def _take(self) -> int:
        if not self._free:
            self.reached += 1
            self._free_cached.move_to_end(min(self._free_cached), last=False)
        return super()._take()


MUTANTS = (
    Leaking,
    DoublyHandedOut,
    Uncounted,
    FindableAfterEviction,
    HeadFirst,
    LowestNumberEvicted,
)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_pool_is_caught(mutant: type[Mutant]) -> None:
    churn(BlockPool(24), 2_000)
    broken = mutant(24)
    with pytest.raises((AssertionError, RuntimeError)):
        churn(broken, 2_000)
    assert broken.reached


class Unguarded(Mutant):
    """A block that nobody holds can be released again."""

    def release(self, blocks) -> None:  # type: ignore[no-untyped-def]
        for block in reversed(blocks):
            self.reached += self._refcounts[block] < 1
            self._refcounts[block] = max(self._refcounts[block] - 1, 0)
            if self._refcounts[block] == 0:
                self._free[block] = None


def release_twice(pool: BlockPool) -> None:
    """One owner gives its blocks back twice, while another holds one of them."""
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.share(blocks[:1])
    pool.release(blocks)
    with pytest.raises(BlockPoolError):
        pool.release(blocks)
    assert pool.refcount(blocks[0]) == 1


def test_a_pool_without_its_guard_against_double_release_is_caught() -> None:
    release_twice(BlockPool(4))
    broken = Unguarded(4)
    with pytest.raises(pytest.fail.Exception):
        release_twice(broken)
    assert broken.reached


class TokensUnchecked(PrefixIndex):
    """Mutant: the digest alone decides."""

    reached = 0

    def find(self, key, tokens, parent):  # type: ignore[no-untyped-def]
        found = self._by_key.get(key)
        TokensUnchecked.reached += found is not super().find(key, tokens, parent)
        return found


def test_an_index_that_trusts_digests_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a digest of a few values keys collide all the time; the comparison keeps hits exact."""
    monkeypatch.setattr("pagedctl.engine.prefix_index._digest", lambda data: bytes([sum(data) % 5]))
    exact = BlockPool(24)
    assert colliding_hits(exact) > 100
    trusting = BlockPool(24)
    trusting._index = TokensUnchecked()
    with pytest.raises(AssertionError):
        colliding_hits(trusting)
    assert TokensUnchecked.reached


def colliding_hits(pool: BlockPool) -> int:
    """How many blocks were found; each holds the very prefix that was asked for."""
    rng, held, hits = random.Random(3), dict[int, Prefix](), 0
    for _ in range(3_000):
        prefix = tuple(rng.choices((1, 2, 6), k=rng.randint(1, 4)))
        found = find(pool, prefix)
        hits += len(found)
        for place, block in enumerate(found):
            assert held[block] == prefix[: place + 1]
        pool.share(found)
        own = pool.allocate(len(prefix) - len(found))
        assert own is not None
        blocks = (*found, *own)
        held.update({block: prefix[: place + 1] for place, block in enumerate(blocks)})
        publish(pool, blocks, prefix)
        pool.audit([blocks])
        pool.release(blocks)
    return hits


def test_a_part_of_a_block_needs_a_block() -> None:
    assert [blocks_for(count, 4) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
