"""The block pool's books: all-or-nothing, no leaks, no double frees, checked after every event."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedctl.engine.block_pool import BlockPool, BlockPoolError


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


def test_a_freed_block_is_reused_last_and_a_tail_before_its_head() -> None:
    pool = BlockPool(4)
    first = pool.allocate(2)
    assert first == (0, 1)
    pool.release(first)
    assert pool.allocate(4) == (2, 3, 1, 0)


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


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool, blocks: pool.release([*blocks, *blocks]),
        lambda pool, blocks: pool.share([blocks[0], pool.num_blocks - 1]),
        lambda pool, blocks: (pool.release(blocks), pool.release(blocks)),
    ],
    ids=["released twice at once", "a free block shared", "released twice"],
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


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, share and release, against books kept by tables alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is not None:
            assert len(blocks) == count
            self.tables.append(list(blocks))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(prefix)
        self.tables.append(list(prefix))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @invariant()
    def books_agree(self) -> None:
        self.pool.audit(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def churn(pool: BlockPool, events: int) -> int:
    """Random events with the audit after each; the number of refused allocations."""
    rng = random.Random(7)
    tables: list[tuple[int, ...]] = []
    refused = 0
    for _ in range(events):
        if tables and rng.random() < 0.45:
            pool.release(tables.pop(rng.randrange(len(tables))))
        else:
            blocks = pool.allocate(rng.randint(1, 4))
            refused += blocks is None
            if blocks is not None:
                tables.append(blocks)
        pool.audit(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == pool.num_blocks
    return refused


def test_ten_thousand_events_leave_no_leak() -> None:
    assert churn(BlockPool(20), 10_000) > 100


class LeakingPool(BlockPool):
    """Mutant: the last block of a release is never returned."""

    def release(self, blocks) -> None:  # type: ignore[no-untyped-def]
        super().release(blocks[:-1])
        if blocks:
            self._refcounts[blocks[-1]] = 0


class DoublingPool(BlockPool):
    """Mutant: a block is handed out although it is still referenced."""

    def allocate(self, count):  # type: ignore[no-untyped-def]
        blocks = super().allocate(count)
        if blocks and self._refcounts[0] and 0 not in blocks:
            self._refcounts[0] += 1
            return (0, *blocks[1:])
        return blocks


@pytest.mark.parametrize("mutant", [LeakingPool, DoublingPool])
def test_the_audit_catches_a_broken_pool(mutant: type[BlockPool]) -> None:
    with pytest.raises(BlockPoolError):
        churn(mutant(20), 2_000)
