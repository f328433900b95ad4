"""Who is not answered yet, by key and by name, held back or queued."""

from __future__ import annotations

import pytest

from pagedctl.engine.live_requests import LiveRequests
from pagedctl.engine.scheduler import Scheduler, key_of
from pagedctl.engine.sequence import Sequence
from tests.engine.scheduler_harness import samples, scheduler, sequence


@pytest.fixture
def under_test() -> Scheduler:
    return scheduler()


def names(ones: list[Sequence]) -> list[tuple[object, int]]:
    return [key_of(one) for one in ones]


def test_requests_are_found_by_name_and_sequences_by_key(under_test: Scheduler) -> None:
    live = LiveRequests(under_test)
    for one in [*samples(5, 3, 2, n=2), sequence("six", 3, 2)]:
        live.add(one, hold=False)
    assert live.ids() == ["5", "six"]
    assert 5 in live
    assert "5" in live
    assert 6 not in live
    assert names(live.of("5")) == names(live.of(5)) == [(5, 0), (5, 1)]
    assert live.of("unknown") == []
    assert len(live) == 3
    assert list(live.sequences) == [(5, 0), (5, 1), ("six", 0)]


def test_a_request_is_live_until_its_last_sample_is_forgotten(under_test: Scheduler) -> None:
    live = LiveRequests(under_test)
    first, second = samples(5, 3, 2, n=2)
    for one in (first, second):
        live.add(one, hold=False)
    live.forget(first)
    assert names(live.of(5)) == [(5, 1)]
    live.forget(second)
    assert 5 not in live
    assert live.ids() == []
    assert len(live) == 0
    assert not under_test.has_unfinished()


def test_what_is_held_comes_to_the_scheduler_later_and_in_order(under_test: Scheduler) -> None:
    live = LiveRequests(under_test)
    queued, *held = (sequence(number, 3, 2) for number in range(4))
    live.add(queued, hold=False)
    for one in held:
        live.add(one, hold=True)
    assert live.num_held == 3
    assert names(list(under_test.waiting)) == [(0, 0)]
    live.forget(held[1])
    live.release_held()
    live.release_held()
    assert live.num_held == 0
    assert names(list(under_test.waiting)) == [(0, 0), (1, 0), (3, 0)]


@pytest.mark.parametrize("state", ["held", "waiting", "running"])
def test_who_is_forgotten_gives_back_all_it_holds(state: str, under_test: Scheduler) -> None:
    live = LiveRequests(under_test)
    one = sequence(0, 9, 2)
    live.add(one, hold=state == "held")
    if state == "running":
        under_test.schedule()
        assert under_test.pool.num_used == 3
    live.forget(one)
    assert not under_test.has_unfinished()
    assert (live.num_held, len(live)) == (0, 0)
    assert under_test.pool.num_free == under_test.pool.num_blocks
    under_test.audit()


def test_an_id_can_come_again_while_its_old_sequence_is_still_in_a_step(
    under_test: Scheduler,
) -> None:
    live = LiveRequests(under_test)
    old, new = sequence(0, 9, 2), sequence(0, 4, 2)
    live.add(old, hold=False)
    under_test.schedule()
    live.forget(old)
    live.add(new, hold=False)
    assert live.sequences[0, 0] is new
    live.forget(new)
    assert 0 not in live
