"""The scheduler: order, budgets, growth, preemption, lag, and what others got wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pagedctl.engine.block_pool import BlockPoolError
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.request import Request
from pagedctl.engine.request_check import check_request
from pagedctl.engine.request_limits import PoolBound, RequestLimits
from pagedctl.engine.scheduler import Scheduler, key_of
from pagedctl.engine.sequence import IN_FLIGHT, Sequence
from pagedctl.errors import RequestError
from tests.engine.scheduler_harness import STOP, Driver, Site, samples, scheduler, sequence, shape

FAR = 1_000
"""Output that no test reaches: the watermark cannot foresee where such a sequence ends."""


def test_prefill_is_chunked_and_samples_at_its_end_only() -> None:
    under_test = scheduler(chunk_size=5)
    under_test.add(sequence(0, prompt=12, output=2))
    plans = [under_test.schedule() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[(0, 0, 5)], [(0, 5, 5)], [(0, 10, 2)]]
    assert [plan.num_sampled for plan in plans] == [0, 0, 1]


def test_decodes_come_before_prefill_chunks_and_admissions() -> None:
    driver = Driver(scheduler(max_num_batched_tokens=8, chunk_size=6))
    driver.add(sequence(0, prompt=3, output=5))
    driver.step()
    driver.add(sequence(1, prompt=20, output=5))
    assert shape(driver.step()) == [(0, 3, 1), (1, 0, 6)]
    driver.add(sequence(2, prompt=9, output=5))
    assert shape(driver.step()) == [(0, 4, 1), (1, 6, 6), (2, 0, 1)]


def test_a_decode_comes_before_the_chunk_of_an_older_one() -> None:
    driver = Driver(scheduler(max_num_batched_tokens=8, chunk_size=6))
    driver.add(sequence(0, prompt=20, output=5), sequence(1, prompt=2, output=5))
    assert shape(driver.step()) == [(0, 0, 6), (1, 0, 2)]
    assert shape(driver.step()) == [(1, 2, 1), (0, 6, 6)]


def test_only_a_row_in_flight_that_needs_a_block_lets_chunks_go_first() -> None:
    """It may be an overshoot, so it takes what is left after all others had their turn."""
    driver = Driver(scheduler(max_num_batched_tokens=8, chunk_size=3), lag=1)
    driver.add(sequence(0, prompt=2, output=12), sequence(1, prompt=40, output=2))
    driver.step()
    for start in range(2, 12):
        order = [row.request_id for row in driver.step().rows]
        assert order == ([1, 0] if start % 4 == 0 else [0, 1])
    driver.run()


def test_a_step_that_would_write_into_a_shared_block_is_not_launched() -> None:
    under_test = scheduler(chunk_size=5)
    one = sequence(0, prompt=12, output=2)
    under_test.add(one)
    under_test.schedule()
    under_test.pool.share(one.blocks[2:])
    with pytest.raises(BlockPoolError, match="shared block 2"):
        under_test.schedule()


def test_a_row_in_flight_that_needs_a_block_costs_no_step() -> None:
    """With a block free and one token of budget, the host stays ahead of the device."""
    driver = Driver(scheduler(max_num_batched_tokens=1), lag=1)
    driver.add(sequence(0, prompt=1, output=20))
    driver.run()
    assert [len(plan.rows) for plan in driver.plans] == [1] * 20 + [0]


def test_the_budget_and_the_batch_are_never_exceeded() -> None:
    driver = Driver(scheduler(max_num_seqs=3, max_num_batched_tokens=7, chunk_size=4))
    for number in range(9):
        driver.add(sequence(number, prompt=1 + number, output=3))
    driver.run()
    assert max(plan.num_tokens for plan in driver.plans) == 7
    assert max(len(plan.rows) for plan in driver.plans) == 3
    assert len(driver.finished) == 9


def test_the_budget_may_be_below_the_batch() -> None:
    driver = Driver(scheduler(max_num_batched_tokens=2))
    for number in range(5):
        driver.add(sequence(number, prompt=1, output=4))
    driver.run()
    assert len(driver.finished) == 5


def test_admission_is_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    driver = Driver(scheduler(blocks=6))
    driver.add(sequence(0, prompt=9, output=3))
    driver.step()
    driver.add(sequence(1, prompt=13, output=2))
    driver.add(sequence(2, prompt=1, output=1))
    assert shape(driver.step()) == [(0, 9, 1)]
    driver.run()
    assert set(driver.finished) == {0, 1, 2}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_request_that_ends_at_n_tokens_keeps_n_minus_one(lag: int, prefix_cache: bool) -> None:
    """The last token of a sequence is never fed, so a pool of exactly the others is enough."""
    for prompt in range(1, 10):
        for output in (1, 2, 3, 4, 5, 8, 9):
            needed = -(-(prompt + output - 1) // 4)
            driver = Driver(scheduler(blocks=needed, prefix_cache=prefix_cache), lag=lag)
            driver.add(sequence(0, prompt=prompt, output=output))
            driver.run()
            assert driver.peak_blocks == needed
            assert driver.finished[0].num_output_tokens == output
            assert driver.scheduler.num_preemptions == 0


@pytest.mark.parametrize("chunk_size", [3, 64])
@pytest.mark.parametrize("start", [1, 5, 8])
def test_a_score_that_fills_the_pool_is_served(start: int, chunk_size: int) -> None:
    """Nine given tokens keep eight: two blocks of four, although nothing follows the ninth."""
    driver = Driver(scheduler(blocks=2, chunk_size=chunk_size))
    scores = PromptScores(start=start, end=9)
    driver.add(sequence(0, prompt=9, output=0, scores=scores))
    driver.run()
    one = driver.finished[0]
    assert one.finish_reason == "length"
    assert scores.values().tolist() == driver.device.scores(one, start - 1, 9 - start).tolist()


def test_what_never_fits_is_refused_and_what_just_fits_runs_with_others_behind_it() -> None:
    """vllm-project/vllm#39734: a request beyond the pool must not wait forever before others."""
    pool = PoolBound(num_blocks=5, block_size=4)
    limits = RequestLimits(input_vocab_size=FAR, output_vocab_size=FAR, max_model_len=21, pool=pool)
    with pytest.raises(RequestError, match=r"6 blocks, the KV pool has 5") as refused:
        check_request(Request(id=0, prompt_token_ids=tuple(range(21))), limits)
    assert refused.value.kind == "never_fits"
    driver = Driver(scheduler(blocks=5))
    fits = check_request(Request(id=1, prompt_token_ids=tuple(range(20))), limits)
    driver.add(sequence(1, fits.prompt_token_ids, 1), sequence(2, prompt=3, output=2))
    driver.run()
    assert set(driver.finished) == {1, 2}


@pytest.mark.parametrize("lag", [0, 1])
def test_the_youngest_is_preempted_and_keeps_its_tokens(lag: int) -> None:
    """vllm-project/vllm-gaudi#524: output tokens count once, recompute covers all tokens."""
    driver = Driver(scheduler(blocks=7), lag=lag, stops={0: 16, 1: 16})
    driver.add(sequence(0, prompt=4, output=FAR), sequence(1, prompt=4, output=FAR))
    driver.run()
    victims = {key for plan in driver.plans for key in plan.preempted}
    assert victims == {(1, 0)}
    for number in (0, 1):
        done = driver.finished[number]
        assert done.committed_tokens() == [*range(1004, 1019), STOP]
        assert done.num_preemptions == sum((number, 0) in plan.preempted for plan in driver.plans)
        assert done.num_output_tokens == 16
        assert done.finish_reason == "stop"


@pytest.mark.parametrize("interval", [1, 3, 20, None])
def test_a_preempted_request_goes_on_from_its_last_token(interval: int | None) -> None:
    """vllm-project/vllm-gaudi#524: prompt 3, preempted after 20 tokens, 20 more: 40 in all."""
    driver = Driver(scheduler(force_preemption_interval=interval, chunk_size=8))
    driver.add(sequence(0, prompt=3, output=40))
    driver.run()
    one = driver.finished[0]
    assert one.committed_tokens() == list(range(1003, 1043))
    assert (one.num_preemptions > 0) == (interval is not None)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("blocks", "output", "interval"), [(9, FAR, None), (6, 12, 1), (6, 12, 4), (6, FAR, 3)]
)
def test_samples_that_share_a_prompt_survive_preemption_of_any(
    blocks: int, output: int, interval: int | None, lag: int
) -> None:
    """vllm-project/vllm#8844: n 3 over a 12-token prompt, block 4, pool 6, 12 tokens each."""
    under_test = scheduler(blocks, prefix_cache=True, force_preemption_interval=interval)
    driver = Driver(under_test, lag=lag, stops={0: 12})
    driver.add(*samples(0, prompt=12, output=output, n=3))
    driver.run()
    assert under_test.num_preemptions > 0
    assert under_test.prefix_hit_tokens > 0
    for one in driver.ended.values():
        assert one.committed_tokens() == [*range(1012, 1023), STOP]


def test_an_admission_takes_all_its_blocks_or_none() -> None:
    """inference-sim/inference-sim#1061: what does not fit holds nothing while it waits."""
    driver = Driver(scheduler(blocks=4))
    driver.add(sequence(0, prompt=4, output=5), sequence(1, prompt=10, output=3))
    driver.step()
    free, used = driver.scheduler.pool.num_free, driver.scheduler.pool.num_used
    assert (free, used) == (3, 1)
    assert not driver.live.sequences[1, 0].blocks
    driver.run()
    assert set(driver.finished) == {0, 1}


def test_a_preempted_sequence_goes_before_those_that_wait() -> None:
    driver = Driver(scheduler(blocks=7, max_num_seqs=2), stops={0: 16, 1: 16, 2: 16})
    for number in range(3):
        driver.add(sequence(number, prompt=4, output=FAR))
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert driver.scheduler.waiting[0].request.id == 1
    driver.run()


@pytest.mark.parametrize("lag", [0, 1])
def test_forced_preemption_takes_the_youngest_that_advanced(lag: int) -> None:
    driver = Driver(scheduler(force_preemption_interval=2), lag=lag)
    driver.add(sequence(0, prompt=4, output=9), sequence(1, prompt=4, output=9))
    driver.run()
    preempted = [key for plan in driver.plans for key in plan.preempted]
    assert preempted[0] == (1, 0)
    assert len(preempted) > 3
    assert {one.num_output_tokens for one in driver.ended.values()} == {9}


def test_a_negative_interval_preempts_prompts_only() -> None:
    driver = Driver(scheduler(force_preemption_interval=-1, chunk_size=3))
    driver.add(sequence(0, prompt=10, output=5))
    places = []
    while driver.scheduler.has_unfinished():
        one = driver.live.sequences[0, 0]
        before = one.num_computed_tokens
        if driver.step().preempted:
            places.append(before)
    assert places == [3, 6, 9]


def test_at_lag_one_a_stop_overshoots_by_one_row_and_a_length_never_does() -> None:
    driver = Driver(scheduler(), lag=1, stops={0: 3})
    driver.add(sequence(0, prompt=4, output=16), sequence(1, prompt=4, output=16))
    driver.run()
    assert driver.overshoots == 1
    assert driver.finished[0].committed_tokens()[-1] == STOP
    assert driver.finished[0].finish_reason == "stop"
    assert driver.finished[1].num_output_tokens == 16


class Watched(Scheduler):
    """Notes for whom others were preempted, and who waited because its input was in flight."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.causes: list[int] = []
        self.waits = 0

    def _grow(self, sequence, num_tokens, step):  # type: ignore[no-untyped-def]
        in_flight, before = sequence.num_in_flight, self.num_preemptions
        blocks = super()._grow(sequence, num_tokens, step)
        if self.num_preemptions > before:
            self.causes.append(in_flight)
        self.waits += blocks is None and in_flight > 0
        return blocks


def test_nobody_is_preempted_for_a_row_whose_input_is_in_flight() -> None:
    """Such a row may be an overshoot; it waits for the commit instead."""
    under_test = scheduler(blocks=8, kind=Watched)
    assert isinstance(under_test, Watched)
    driver = Driver(under_test, lag=1, stops={0: 20, 1: 20})
    driver.add(sequence(0, prompt=7, output=FAR), sequence(1, prompt=3, output=FAR))
    driver.run()
    assert under_test.waits > 0
    assert under_test.causes
    assert set(under_test.causes) == {0}
    assert len(driver.finished) == 2


def test_an_in_flight_token_stands_in_the_list_until_it_is_committed() -> None:
    under_test = scheduler()
    one = sequence(0, prompt=3, output=4)
    under_test.add(one)
    under_test.schedule()
    assert one.tokens == [100, 101, 102, IN_FLIGHT]
    assert shape(under_test.schedule()) == [(0, 3, 1)]
    assert one.tokens[-2:] == [IN_FLIGHT, IN_FLIGHT]
    one.commit(55, -0.5)
    assert one.tokens == [100, 101, 102, 55, IN_FLIGHT]
    assert one.committed_tokens() == [55]


def test_equal_decisions_have_equal_fingerprints_and_others_do_not() -> None:
    def plans(prompt: int) -> list[bytes]:
        under_test = scheduler()
        under_test.add(sequence(0, prompt=prompt, output=3))
        return [under_test.schedule().fingerprint() for _ in range(2)]

    assert plans(5) == plans(5)
    assert plans(5)[0] != plans(6)[0]
    assert plans(5)[0] != plans(5)[1]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("moment", ["waiting", "mid-prefill", "decoding", "preempted"])
def test_a_request_can_be_cancelled_at_any_moment_and_only_once(moment: str, lag: int) -> None:
    driver = Driver(scheduler(blocks=9, chunk_size=3), lag=lag, stops={0: 24})
    driver.add(sequence(0, prompt=4, output=FAR), sequence(1, prompt=7, output=FAR))
    reached: dict[str, Callable[[Sequence], bool]] = {
        "waiting": lambda one: one.row is None,
        "mid-prefill": lambda one: 0 < one.num_computed_tokens < 7,
        "decoding": lambda one: one.num_output_tokens > 1,
        "preempted": lambda one: one.num_preemptions > 0,
    }
    one = driver.live.sequences[1, 0]
    while not reached[moment](one):
        driver.step()
    assert driver.cancel(1) == 1
    assert driver.cancel(1) == 0
    driver.add(sequence(1, prompt=2, output=3))
    driver.run()
    assert one.finish_reason == "abort"
    assert driver.finished[1].committed_tokens() == [1002, 1003, 1004]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_faulty_request_ends_alone(lag: int) -> None:
    driver = Driver(scheduler(chunk_size=4), lag=lag, faults={(1, 0): 6, (2, 0): 1})
    driver.add(*(sequence(number, prompt=5, output=6) for number in range(3)))
    driver.run()
    assert [driver.finished[n].failure is not None for n in range(3)] == [False, True, True]
    assert driver.finished[1].committed_tokens() == [1005, 1006]
    assert driver.finished[2].committed_tokens() == []
    assert driver.finished[0].committed_tokens() == list(range(1005, 1011))


def leads_without_running(under_test: Scheduler) -> None:
    under_test._sharing._leaders[b"key"] = sequence(7, prompt=4, output=2)


BROKEN_BOOKS: dict[str, Callable[[Scheduler, Sequence, Sequence], object]] = {
    "a block without an owner": lambda under_test, one, waiting: under_test.pool.allocate(1),
    "a row lost": lambda under_test, one, waiting: under_test._free_rows.pop(),
    "a row taken twice": lambda under_test, one, waiting: under_test._free_rows.append(one.row),
    "running without a row": lambda under_test, one, waiting: setattr(one, "row", None),
    "computed beyond its tokens": lambda under_test, one, waiting: setattr(
        one, "num_computed_tokens", len(one.tokens) + 1
    ),
    "waits but holds": lambda under_test, one, waiting: waiting.blocks.extend(
        under_test.pool.allocate(1) or ()
    ),
    "leads without running": lambda under_test, one, waiting: leads_without_running(under_test),
}


@pytest.mark.parametrize("books", BROKEN_BOOKS)
def test_the_audit_sees_every_broken_book(books: str) -> None:
    under_test = scheduler(prefix_cache=True)
    one, waiting = sequence(0, prompt=6, output=2), sequence(1, prompt=3, output=2)
    under_test.add(one)
    under_test.schedule()
    under_test.add(waiting)
    under_test.audit()
    BROKEN_BOOKS[books](under_test, one, waiting)
    with pytest.raises(RuntimeError):
        under_test.audit()


def forgetful_rewind(site: Site) -> Callable[[Sequence], None]:
    def rewind(self: Sequence) -> None:
        site.reached += 1
        del self.tokens[self.num_prompt_tokens :]
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    return rewind


def test_a_preemption_that_forgets_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    test_the_youngest_is_preempted_and_keeps_its_tokens(0)
    monkeypatch.setattr(Sequence, "rewind", forgetful_rewind(site))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        test_the_youngest_is_preempted_and_keeps_its_tokens(0)
    assert site.reached


@pytest.mark.parametrize("kept", ["at preemption", "at the end"])
def test_blocks_that_are_not_given_back_are_caught(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, plain = Site(), Scheduler._vacate

    def leaky(self: Scheduler, one: Sequence) -> None:
        if one.is_finished == (kept == "at the end"):
            site.reached += 1
            one.blocks = []
        plain(self, one)

    test_the_youngest_is_preempted_and_keeps_its_tokens(0)
    monkeypatch.setattr(Scheduler, "_vacate", leaky)
    with pytest.raises(RuntimeError, match="references"):
        test_the_youngest_is_preempted_and_keeps_its_tokens(0)
    assert site.reached


def test_an_admission_that_takes_a_block_too_many_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: blocks for every token, although the last one of a full sequence is never fed."""
    test_a_score_that_fills_the_pool_is_served(1, 64)
    reached: list[int] = []

    def all_tokens(one: Sequence) -> int:
        reached.append(len(one.tokens))
        return len(one.tokens)

    monkeypatch.setattr(Sequence, "num_computable", property(all_tokens))
    with pytest.raises((AssertionError, RuntimeError)):
        test_a_score_that_fills_the_pool_is_served(1, 64)
    assert reached


def test_keys_name_the_sample() -> None:
    assert key_of(sequence(3, prompt=1, output=1)) == (3, 0)
