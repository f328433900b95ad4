"""Prefix sharing through the scheduler: once computed, once found, never by the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from pagedctl.engine.block_pool import BlockPool
from pagedctl.engine.prefix_sharing import Prefix, PrefixSharing
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.scheduler import Scheduler
from pagedctl.engine.sequence import Sequence
from tests.engine.scheduler_harness import Driver, Site, samples, scheduler, sequence, shape


def sharing(blocks: int = 100, **limits: Any) -> Scheduler:
    return scheduler(blocks, **{"max_num_seqs": 32, "prefix_cache": True, **limits})


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 64])
@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 12, 13])
@pytest.mark.parametrize("count", [2, 8])
def test_samples_of_a_prompt_compute_it_once(
    count: int, prompt: int, chunk_size: int, lag: int
) -> None:
    """All but its last partial or last full block, which each needs for itself."""
    driver = Driver(sharing(chunk_size=chunk_size), lag=lag)
    driver.add(*samples(0, prompt=prompt, output=6, n=count))
    driver.run()
    found = (prompt - 1) // 4 * 4
    assert driver.forward_tokens == count * (prompt + 5) - (count - 1) * found
    assert driver.scheduler.prefix_hit_tokens == (count - 1) * found
    cached = [one.cached_tokens for one in driver.ended.values()]
    assert sorted(cached) == [0] + [found] * (count - 1)


@pytest.mark.parametrize("lag", [0, 1])
def test_samples_with_prompt_logprobs_compute_and_score_it_once(lag: int) -> None:
    """What one sample scores, no other scores again, but for the block that each computes."""
    scores = PromptScores(start=1, end=13)
    ones = samples(0, prompt=13, output=6, n=4)
    for one in ones:
        one.prompt_scores = scores
    driver = Driver(sharing(), lag=lag)
    driver.add(*ones)
    driver.run()
    assert driver.forward_tokens == 4 * 18 - 3 * 12
    assert sum(row.num_scored for plan in driver.plans for row in plan.rows) == 12
    assert scores.values().tolist() == driver.device.scores(ones[3], 0, 12).tolist()


def test_a_score_waits_for_nobody_that_scores_other_tokens() -> None:
    driver = Driver(sharing())
    for number in range(3):
        driver.add(sequence(number, 13, 0, scores=PromptScores(start=1, end=13)))
    assert len(driver.step().rows) == 3
    driver.run()


@pytest.mark.parametrize("start", [1, 4, 5, 8, 9, 12, 13])
def test_a_cached_prefix_never_takes_a_score(start: int) -> None:
    """vllm-project/vllm#3251: asked again, all positions from the one before start are scored."""
    driver = Driver(sharing())
    driver.add(sequence(0, 13, 4))
    driver.run()
    scores = PromptScores(start=start, end=13)
    one = sequence(1, 13, 4, scores=scores)
    assert one.num_skippable == start - 1
    driver.add(one)
    driver.run()
    assert one.cached_tokens == (start - 1) // 4 * 4
    assert scores.is_complete
    assert scores.values().tolist() == driver.device.scores(one, start - 1, 13 - start).tolist()


@pytest.mark.parametrize("prompt", [31, 32, 33])
def test_prompt_logprobs_asked_twice_are_equal_and_complete(prompt: int) -> None:
    """vllm-project/vllm#3251, #8268, #17251: prompts around a block of 32, asked twice."""
    driver = Driver(sharing(block_size=32))
    answers = []
    for number in range(2):
        scores = PromptScores(start=1, end=prompt)
        driver.add(sequence(number, prompt, 2, scores=scores))
        driver.run()
        answers.append(scores.values().tolist())
    assert len(answers[0]) == prompt - 1
    assert answers[0] == answers[1]
    assert 0.0 not in answers[0]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_prompt_that_is_cached_in_full_computes_its_last_token(block_size: int) -> None:
    """vllm-project/vllm#7753, #11186: a multiple of the block size, asked twice."""
    driver = Driver(sharing(block_size=block_size))
    for number in range(3):
        driver.add(sequence(number, prompt=8, output=3))
        plan = driver.step()
        start = 0 if number == 0 else 8 - block_size
        assert shape(plan) == [(number, start, 8 - start)]
        assert plan.num_sampled == 1
        driver.run()
    driver.add(sequence(3, prompt=12, output=3))
    assert driver.step().rows[0].start == 8


@pytest.mark.parametrize("lag", [0, 1])
def test_a_later_turn_finds_prompt_and_output_of_the_one_before(lag: int) -> None:
    driver = Driver(sharing(), lag=lag)
    driver.add(sequence(0, prompt=6, output=12))
    driver.run()
    first = driver.finished[0]
    driver.add(sequence(1, [*first.tokens, 77, 78, 79], 2))
    driver.run()
    assert driver.finished[1].cached_tokens == 16


def test_salts_and_arithmetics_share_nothing() -> None:
    driver = Driver(sharing())
    for number, salt in enumerate((None, "a", "b", "a", None)):
        driver.add(sequence(number, prompt=9, output=2, salt=salt))
        driver.run()
    assert [driver.finished[number].cached_tokens for number in range(5)] == [0, 0, 0, 8, 8]


def test_without_the_cache_nothing_is_found_or_kept() -> None:
    driver = Driver(scheduler())
    driver.add(*samples(0, prompt=12, output=3, n=3))
    driver.run()
    assert driver.scheduler.prefix_hit_tokens == driver.scheduler.pool.num_cached == 0
    assert driver.forward_tokens == 3 * 14


@pytest.mark.parametrize("lag", [0, 1])
def test_followers_wait_while_the_leader_computes_in_chunks(lag: int) -> None:
    driver = Driver(sharing(chunk_size=4), lag=lag)
    driver.add(*samples(0, prompt=20, output=3, n=3))
    while driver.scheduler.prefix_hit_tokens == 0:
        plan = driver.step()
        assert [row.sample for row in plan.rows if row.start < 16][:1] in ([], [0])
        assert sum(row.num_tokens for row in plan.rows if row.sample == 0) <= 4
    assert driver.scheduler.prefix_hit_tokens == 2 * 16
    driver.run()
    assert driver.forward_tokens == 22 + 2 * 6


def test_waiting_for_a_leader_costs_followers_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the prompt that is being computed: nothing is looked up at every step."""
    walks: list[int] = []
    plain = BlockPool.find

    def counted(self: BlockPool, *arguments: Any) -> Any:
        walks.append(1)
        return plain(self, *arguments)

    monkeypatch.setattr(BlockPool, "find", counted)
    driver = Driver(sharing(blocks=1000, chunk_size=40))
    driver.add(*samples(0, prompt=801, output=4, n=16))
    for _ in range(20):
        assert len(driver.step().rows) == 1
    assert len(walks) == 1  # the leader's own, when it was admitted
    driver.run()
    assert len(walks) == 1 + 15 * 200


def test_a_longer_prompt_waits_for_the_last_full_block_of_a_shorter_one() -> None:
    """Which the shorter one itself could not have skipped."""
    driver = Driver(sharing(chunk_size=4))
    driver.add(sequence(0, prompt=8, output=3), sequence(1, prompt=13, output=3))
    assert shape(driver.step()) == [(0, 0, 4)]
    assert shape(driver.step()) == [(0, 4, 4)]
    assert shape(driver.step()) == [(0, 8, 1), (1, 8, 4)]
    driver.run()


def test_who_waits_for_a_leader_is_overtaken_but_keeps_its_row() -> None:
    driver = Driver(sharing(chunk_size=4, max_num_seqs=2))
    driver.add(*samples(0, prompt=20, output=3, n=2))
    driver.add(sequence(1, [7, 8, 9], 2))
    driver.step()
    driver.step()
    assert {row.request_id for plan in driver.plans for row in plan.rows} == {0}
    driver.run()
    free = Driver(sharing(chunk_size=4, max_num_seqs=3))
    free.add(*samples(0, prompt=20, output=3, n=2))
    free.add(sequence(1, [7, 8, 9], 2))
    assert shape(free.step()) == [(0, 0, 4), (1, 0, 3)]
    free.run()


@dataclass(frozen=True, kw_only=True)
class Departure:
    """How a leader stops leading, halfway through its prompt."""

    name: str
    interval: int | None = None
    faults: tuple[tuple[tuple[int, int], int], ...] = ()
    cancel: bool = False


DEPARTURES = (
    Departure(name="cancelled", cancel=True),
    Departure(name="faulty", faults=(((0, 0), 9),)),
    Departure(name="preempted", interval=-2),
)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("departure", DEPARTURES, ids=lambda one: one.name)
def test_a_follower_leads_when_the_leader_is_gone(departure: Departure, lag: int) -> None:
    under_test = sharing(chunk_size=4, force_preemption_interval=departure.interval)
    driver = Driver(under_test, lag=lag, faults=dict(departure.faults))
    driver.add(sequence(0, prompt=20, output=3))
    driver.add(*samples(1, prompt=20, output=3, n=3))
    driver.step()
    driver.step()
    if departure.cancel:
        assert driver.cancel(0) == 1
    driver.run(limit=200)
    assert under_test.num_preemptions > 0 or departure.interval is None
    for sample in range(3):
        assert driver.ended[1, sample].committed_tokens() == [1020, 1021, 1022]
    ended = driver.ended[0, 0]
    assert (ended.failure is not None) == (departure.name == "faulty")
    assert under_test.prefix_hit_tokens >= 2 * 16


@pytest.mark.parametrize("lag", [0, 1])
def test_blocks_of_a_faulty_sequence_are_found_by_nobody(lag: int) -> None:
    driver = Driver(sharing(chunk_size=4), lag=lag, faults={(0, 0): 14})
    driver.add(sequence(0, prompt=12, output=9))
    while driver.live.sequences:
        driver.step()
    assert driver.finished[0].failure is not None
    assert driver.scheduler.pool.num_cached == 0
    driver.add(sequence(1, prompt=12, output=3))
    driver.run()
    assert driver.finished[1].cached_tokens == 0


def test_who_shares_a_block_keeps_it_when_its_first_owner_fails() -> None:
    driver = Driver(sharing(), faults={(0, 0): 14})
    driver.add(sequence(0, prompt=12, output=9))
    driver.step()
    driver.add(sequence(1, prompt=12, output=9))
    driver.run()
    assert driver.finished[0].failure is not None
    assert driver.finished[1].cached_tokens == 8
    assert driver.finished[1].num_output_tokens == 9


def test_found_blocks_are_not_tainted_by_who_found_them() -> None:
    driver = Driver(sharing(), faults={(1, 0): 9})
    for number in range(3):
        driver.add(sequence(number, prompt=12, output=3))
        driver.run()
    assert driver.finished[1].failure is not None
    assert driver.finished[2].cached_tokens == 8


@pytest.mark.parametrize("lag", [0, 1])
def test_forgetting_all_prefixes_disturbs_nobody_who_runs(lag: int) -> None:
    driver = Driver(sharing(chunk_size=4), lag=lag)
    driver.add(*samples(0, prompt=20, output=8, n=3))
    for _ in range(7):
        driver.step()
    assert driver.scheduler.pool.unlink_all() > 0
    driver.scheduler.audit()
    assert driver.scheduler.pool.num_cached == 0
    driver.add(sequence(1, prompt=20, output=3))
    driver.run()
    assert driver.finished[1].cached_tokens == 0


def test_preempted_sequences_find_their_own_blocks_again() -> None:
    driver = Driver(sharing(force_preemption_interval=1))
    driver.add(sequence(0, prompt=9, output=12))
    driver.run()
    one = driver.finished[0]
    assert one.committed_tokens() == list(range(1009, 1021))
    assert one.num_preemptions > 5
    assert one.cached_tokens == 0
    assert driver.forward_tokens < 20 + one.num_preemptions * 5


Mutate = Callable[[pytest.MonkeyPatch, Site], None]


def a_partial_block_is_shared(patch: pytest.MonkeyPatch, site: Site) -> None:
    """A block is entered when it is begun, as though all of its tokens were computed."""
    plain = PrefixSharing.publish

    def publish(self: PrefixSharing, one: Sequence, num_tokens: int) -> None:
        full = -(-num_tokens // self.block_size) * self.block_size
        site.reached += num_tokens < full <= len(one.tokens)
        plain(self, one, full if full <= len(one.tokens) else num_tokens)

    patch.setattr(PrefixSharing, "publish", publish)


def the_last_token_is_skipped(patch: pytest.MonkeyPatch, site: Site) -> None:
    """A prompt that is cached in full leaves nothing to compute."""
    plain = PrefixSharing.look_up

    def look_up(self: PrefixSharing, one: Sequence) -> Prefix:
        one.tokens.append(0)
        found = plain(self, one)
        one.tokens.pop()
        site.reached += len(found.found) * self.block_size == len(one.tokens)
        del one.block_keys[len(one.tokens) // self.block_size :]
        return found

    patch.setattr(PrefixSharing, "look_up", look_up)


def scored_positions_are_skipped(patch: pytest.MonkeyPatch, site: Site) -> None:
    def num_skippable(one: Sequence) -> int:
        site.reached += one.prompt_scores is not None
        return len(one.tokens) - 1

    patch.setattr(Sequence, "num_skippable", property(num_skippable))


def a_leader_is_not_forgotten(patch: pytest.MonkeyPatch, site: Site) -> None:
    """Its followers wait forever, unless the audit sees it first."""

    def leave(self: PrefixSharing, one: Sequence) -> None:
        site.reached += any(leader is one for leader in self._leaders.values())

    patch.setattr(PrefixSharing, "leave", leave)
    patch.setattr(PrefixSharing, "audit", lambda self, running: None)


def blocks_are_found_before_the_commit(patch: pytest.MonkeyPatch, site: Site) -> None:
    plain = Scheduler._take

    def take(self: Scheduler, step: Any, one: Sequence, *others: Any, **options: Any) -> None:
        plain(self, step, one, *others, **options)
        if not one.num_in_flight or one.num_computed_tokens == one.num_prompt_tokens:
            site.reached += 1
            self._sharing.publish(one, one.num_computed_tokens)

    patch.setattr(Scheduler, "_take", take)


def faulty_blocks_stay_findable(patch: pytest.MonkeyPatch, site: Site) -> None:
    def taint(self: PrefixSharing, one: Sequence) -> None:
        site.reached += 1

    patch.setattr(PrefixSharing, "taint", taint)


def nobody_waits(patch: pytest.MonkeyPatch, site: Site) -> None:
    def lead(self: PrefixSharing, one: Sequence, prefix: Prefix) -> None:
        site.reached += 1
        one.num_shared = one.num_published = len(prefix.found)
        one.parent = prefix.found[-1] if prefix.found else one.root_key

    patch.setattr(PrefixSharing, "lead", lead)


def test_a_long_sequence_can_be_shown() -> None:
    """Each block stands behind the one before it: a chain that no repr may follow."""
    driver = Driver(sharing(blocks=4000, max_num_batched_tokens=16000, chunk_size=16000))
    one = sequence(0, 12000, 4)
    driver.add(one)
    driver.step()
    driver.step()
    assert one.num_published == 3000
    assert "num_published=3000" in repr(one)
    driver.run()


def growing_prompts() -> None:
    """Each prompt ends one token behind the last; all are found as far as they are full."""
    driver = Driver(sharing(chunk_size=3))
    for number in range(9):
        driver.add(sequence(number, prompt=3 + number, output=2))
        driver.step()
    driver.run()


def a_leader_fails_where_others_wait_for_it() -> None:
    """Its step is launched, and the next one decided, before its fault is known."""
    driver = Driver(sharing(chunk_size=4), lag=1, faults={(0, 0): 5})
    driver.add(sequence(0, prompt=12, output=3), sequence(1, prompt=13, output=3))
    driver.run()
    assert driver.finished[1].num_output_tokens == 3


MUTANTS: dict[str, tuple[Mutate, Callable[[], None]]] = {
    "partial block": (a_partial_block_is_shared, growing_prompts),
    "last token": (
        the_last_token_is_skipped,
        lambda: test_a_prompt_that_is_cached_in_full_computes_its_last_token(4),
    ),
    "scores": (scored_positions_are_skipped, lambda: test_a_cached_prefix_never_takes_a_score(5)),
    "leader": (
        a_leader_is_not_forgotten,
        lambda: test_a_follower_leads_when_the_leader_is_gone(DEPARTURES[2], 0),
    ),
    "cancelled leader": (
        a_leader_is_not_forgotten,
        lambda: test_a_follower_leads_when_the_leader_is_gone(DEPARTURES[0], 1),
    ),
    "before commit": (
        blocks_are_found_before_the_commit,
        a_leader_fails_where_others_wait_for_it,
    ),
    "taint": (
        faulty_blocks_stay_findable,
        lambda: test_blocks_of_a_faulty_sequence_are_found_by_nobody(0),
    ),
    "no leaders": (nobody_waits, lambda: test_samples_of_a_prompt_compute_it_once(8, 13, 64, 0)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_sharing_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, oracle = MUTANTS[name]
    oracle()
    site = Site()
    mutate(monkeypatch, site)
    with pytest.raises((AssertionError, RuntimeError)):
        oracle()
    assert site.reached
