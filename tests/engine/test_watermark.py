"""The admission watermark: little is computed twice, and nothing ever stalls."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Series

import pytest

from pagedctl.engine import scheduler as scheduler_module
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.scheduler import Scheduler
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.watermark import MOST_AHEAD, growth, keeps_watermark
from tests.engine.scheduler_harness import Driver, Site, scheduler, sequence

MINIMAL = (4 + 64 - 1) + 6 * (24 + 40 - 1)
"""Forward tokens of the bill below if nothing is computed twice."""

ARRIVALS = ((0,) * 6, (1, 2, 3, 4, 5, 6), (2, 4, 6, 8, 10, 12), (3, 3, 3, 30, 30, 30))


def bill(blocks: int, arrivals: Series[int], *, prefix_cache: bool, foreseen: bool) -> Driver:
    """A long decoder of 4 + 64 tokens, and arrivals of 24 + 40, over a small pool.

    ``foreseen``: each ends at its own max_len; else all could fill the pool, and stop earlier.
    """
    under_test = scheduler(
        blocks, max_num_seqs=16, max_num_batched_tokens=512, prefix_cache=prefix_cache
    )
    driver = Driver(under_test, stops={0: 64, **dict.fromkeys(range(1, 7), 40)})
    pending = []
    for number, step in enumerate((0, *arrivals)):
        prompt, output = (4, 64) if number == 0 else (24, 40)
        if not foreseen:
            output = blocks * 4 + 1 - prompt
        ids = [1_000 * number + place for place in range(prompt)]
        pending.append((step, sequence(number, ids, output)))
    while pending:
        while pending and pending[0][0] <= len(driver.plans):
            driver.add(pending.pop(0)[1])
        driver.step()
    driver.run()
    assert sorted(one.num_output_tokens for one in driver.ended.values()) == [40] * 6 + [64]
    return driver


def worst_bill(pools: range, **options: bool) -> float:
    """Forward tokens as a multiple of the minimal, in the worst of all pools and patterns."""
    found = [
        bill(blocks, arrivals, **options).forward_tokens
        for blocks in pools
        for arrivals in ARRIVALS
    ]
    return max(found) / MINIMAL


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("foreseen", [False, True])
def test_the_bill_of_recompute_stays_small(foreseen: bool, prefix_cache: bool) -> None:
    """vllm-project/vllm#25538: a nearly full pool, and a long prefill that comes and goes."""
    assert MINIMAL == 445
    pools = range(20, 41, 4)
    assert worst_bill(pools, prefix_cache=prefix_cache, foreseen=foreseen) <= 1.3


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("foreseen", [False, True])
def test_the_bill_stays_small_in_every_pool(foreseen: bool, prefix_cache: bool) -> None:
    pools = range(20, 41)
    assert worst_bill(pools, prefix_cache=prefix_cache, foreseen=foreseen) <= 1.3


def running(prompt: int, output: int, blocks: int) -> Sequence:
    one = sequence("running", prompt, output)
    one.blocks = list(range(blocks))
    return one


def keeps(num_free: int, ones: list[Sequence], candidate: Sequence, num_found: int = 0) -> bool:
    return keeps_watermark(num_free, ones, candidate, num_found=num_found, block_size=4)


def test_growth_counts_blocks_beyond_those_held_and_stops_at_the_last_fed_token() -> None:
    one = running(prompt=6, output=100, blocks=2)
    assert [growth(one, 8, ahead, 4) for ahead in (0, 2, 3, 6, 7)] == [0, 0, 1, 1, 2]
    assert [growth(running(6, output, 2), 8, 50, 4) for output in (1, 2, 3, 4, 7, 8)] == [
        0,
        0,
        0,
        1,
        1,
        2,
    ]


@pytest.mark.parametrize("output", [3, 1_000])
def test_what_cannot_grow_needs_nothing_and_what_can_needs_more(output: int) -> None:
    ones = [running(6, output, 2) for _ in range(3)]
    free = [count for count in range(40) if keeps(count, ones, sequence(0, 30, output))]
    assert free == list(range(0 if output == 3 else free[0], 40))
    assert (free[0] > 0) == (output > 3)


def test_a_cheap_admission_keeps_less_free_than_a_dear_one() -> None:
    ones = [running(6, 1_000, 2) for _ in range(3)]

    def least(prompt: int, found: int) -> int:
        candidate = sequence(0, prompt, 1_000)
        return next(n for n in range(1_000) if keeps(n, ones, candidate, found))

    needed = [least(prompt, 0) for prompt in (4, 40, 200, 2_000, 20_000)]
    assert needed == sorted(needed)
    assert needed[0] < needed[2]
    assert needed[-1] == needed[-2] <= 4 * (MOST_AHEAD // 4 + 1)
    assert least(200, 196) <= least(8, 0)


def test_a_score_grows_by_nothing() -> None:
    one = sequence(0, 9, 0, scores=PromptScores(start=1, end=9))
    assert keeps(0, [running(6, 3, 2)], one)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_no_load_stalls_however_tight_the_pool(lag: int, prefix_cache: bool) -> None:
    """Every sequence may fill the pool alone; with nothing running it is never refused."""
    rng = random.Random(11)
    for blocks in (1, 2, 3, 5, 8, 13):
        for size in (1, 2, 4, 16):
            tokens = blocks * size
            under_test = scheduler(blocks, block_size=size, prefix_cache=prefix_cache)
            driver = Driver(under_test, lag=lag)
            for number in range(8):
                prompt = rng.randint(1, tokens)
                driver.add(sequence(number, prompt, tokens + 1 - prompt))
                driver.stops[number] = rng.randint(1, 20)
            driver.run()
            assert len(driver.ended) == 8


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_pool_with_room_for_all_holds_nobody_back(prefix_cache: bool) -> None:
    driver = Driver(scheduler(8 * 16, prefix_cache=prefix_cache, max_num_batched_tokens=512))
    for number in range(8):
        driver.add(sequence(number, [number] * 24, 40))
    assert len(driver.step().rows) == 8
    driver.run()


def no_watermark(patch: pytest.MonkeyPatch, site: Site) -> None:
    def keep(num_free: int, *others: object, **options: object) -> bool:
        site.reached += 1
        return True

    patch.setattr(scheduler_module, "keeps_watermark", keep)


def one_block_each(patch: pytest.MonkeyPatch, site: Site) -> None:
    """The watermark of many engines: a block for every running sequence."""

    def keep(num_free: int, ones: Series[Sequence], *others: object, **options: object) -> bool:
        site.reached += 1
        return len(ones) <= num_free

    patch.setattr(scheduler_module, "keeps_watermark", keep)


def the_oldest_goes_first(patch: pytest.MonkeyPatch, site: Site) -> None:
    """The victim has the most to compute again."""

    def oldest(self: Scheduler, step: scheduler_module._Step) -> Sequence | None:
        for key, one in self.running.items():
            if key not in step.rows and one.num_schedulable > 0:
                site.reached += 1
                return one
        return None

    patch.setattr(Scheduler, "_youngest_unscheduled", oldest)


def victims() -> None:
    """Two that outgrow the pool, once: the one with less to lose gives way."""
    driver = Driver(scheduler(11), stops={0: 20, 1: 20})
    driver.add(sequence(0, 16, 1_000))
    driver.step()
    driver.add(sequence(1, [7, 8], 1_000))
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    least = (16 + 19) + (2 + 19)
    assert driver.forward_tokens - least <= 2 + 19


def small_bill() -> None:
    assert worst_bill(range(24, 41, 8), prefix_cache=False, foreseen=True) <= 1.3


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Site], None], Callable[[], None]]] = {
    "no watermark": (no_watermark, small_bill),
    "one block each": (one_block_each, small_bill),
    "oldest victim": (the_oldest_goes_first, victims),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_scheduler_that_computes_too_much_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate, oracle = MUTANTS[name]
    oracle()
    site = Site()
    mutate(monkeypatch, site)
    with pytest.raises(AssertionError):
        oracle()
    assert site.reached
