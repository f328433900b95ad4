"""Random loads on the scheduler: every event audited, every attended slot checked.

Arrivals, samples of one prompt, scores, salts, stops, faults, cancels at any moment, forced
preemptions, any chunk, budget and block size, with and without the prefix cache, at both lags.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedctl.engine import commit, prefix_index
from pagedctl.engine.block_pool import BlockPool
from pagedctl.engine.prefix_index import CachedBlock, PrefixIndex
from pagedctl.engine.prefix_sharing import PrefixSharing
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.request import RequestFailure
from pagedctl.engine.scheduler import Scheduler, SchedulerLimits
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import ScheduledRow
from tests.engine.scheduler_harness import STOP, Driver, Site, sequence

ROOT = Path(__file__).resolve().parents[2]
SHARED = (3, 4, 3, 3, 4, 4, 3, 4, 3, 3, 3, 4, 4, 4, 3, 4, 3, 3, 4, 3)


class CountingPool(BlockPool):
    """Counts what a run must have exercised to prove anything."""

    refused = 0
    evicted = 0

    def allocate(self, count: int) -> tuple[int, ...] | None:
        blocks = super().allocate(count)
        self.refused += blocks is None
        return blocks

    def _take(self) -> int:
        self.evicted += not self._free
        return super()._take()


class Load:
    """One random load; ``expected`` are the output tokens of whatever ends by itself."""

    def __init__(self, seed: int, *, lag: int, prefix_cache: bool, sequences: int = 24) -> None:
        self.rng = rng = random.Random(f"{seed} {lag} {prefix_cache}")
        size = rng.choice([1, 2, 3, 4, 8])
        self.pool_tokens = rng.choice([24, 40, 56, 160])
        limits = SchedulerLimits(
            max_num_seqs=rng.choice([1, 2, 5, 8]),
            max_num_batched_tokens=rng.choice([2, 5, 16, 64]),
            chunk_size=rng.choice([1, 3, 7, 64]),
            block_size=size,
            prefix_cache=prefix_cache,
            force_preemption_interval=rng.choice([None, None, 1, 2, 7, -1, -2, -5]),
        )
        self.pool = CountingPool(-(-self.pool_tokens // size))
        self.driver = Driver(Scheduler(limits, self.pool), lag=lag)
        self.left = sequences
        self.expected: dict[tuple[object, int], list[int]] = {}
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        rng, driver = self.rng, self.driver
        while self.left > 0 or driver.live.sequences or driver.launched:
            if self.left > 0 and rng.random() < 0.5:
                self.arrive()
            if driver.live.sequences and rng.random() < 0.04:
                self.cancel(rng.choice(driver.live.ids()))
            if driver.scheduler.has_unfinished() or driver.launched:
                driver.step()
            if rng.random() < 0.01:
                driver.scheduler.pool.unlink_all()
                driver.scheduler.audit()
        driver.run()
        for key, one in driver.ended.items():
            self.check(key, one)
        self.counts["preempted"] = driver.scheduler.num_preemptions
        assert driver.scheduler.num_preemptions == sum(len(plan.preempted) for plan in driver.plans)
        self.counts["hit tokens"] = driver.scheduler.prefix_hit_tokens
        self.counts["overshoots"] = driver.overshoots
        self.counts["evicted"] = self.pool.evicted
        return self.counts

    def arrive(self) -> None:
        """A request of one or more samples, or a sequence to score."""
        rng, number = self.rng, 1_000 - self.left
        most = self.pool_tokens // 2
        ids = [*SHARED[: rng.randint(0, most)], *rng.choices((3, 4, 5), k=rng.randint(1, 4))]
        salt = rng.choice([None, None, "x"])
        kind = rng.choice(["samples", "samples", "prompt scores", "score"])
        scores = None
        if kind != "samples":
            start = rng.randint(1, len(ids)) if kind == "score" else 1
            scores = PromptScores(start=start, end=len(ids))
            if kind == "score" and scores.is_complete:
                return
        wanted = 0 if kind == "score" else rng.randint(1, self.pool_tokens + 1 - len(ids))
        stop = rng.choice([1, 2, 5, 9, wanted + 1])
        self.driver.stops[number] = stop
        for sample in range(1 if kind == "score" else rng.choice([1, 1, 2, 4])):
            one = sequence(number, ids, wanted, sample=sample, salt=salt, scores=scores)
            if rng.random() < 0.08:
                self.driver.device.faults[number, sample] = rng.randrange(one.max_len)
            outputs = [1000 + len(ids) + place for place in range(wanted)]
            if stop <= wanted:
                outputs[stop - 1 :] = [STOP]
            self.expected[number, sample] = outputs
            self.driver.add(one)
            self.left -= 1

    def cancel(self, name: str) -> None:
        """Cancel a request, twice; now and then its id comes again at once."""
        ones = self.driver.live.of(name)
        self.counts["cancelled in the prompt"] += sum(
            0 < one.num_computed_tokens < one.num_prompt_tokens for one in ones
        )
        leaders = self.driver.scheduler._sharing._leaders.values()
        self.counts["leaders cancelled"] += any(one is leader for one in ones for leader in leaders)
        assert self.driver.cancel(name) == len(ones)
        assert self.driver.cancel(name) == 0
        if self.rng.random() < 0.5:
            again = ones[0]
            key = (again.request.id, again.sample)
            self.driver.add(
                sequence(
                    again.request.id,
                    again.tokens[: again.num_prompt_tokens],
                    max(again.max_len - again.num_prompt_tokens, 1),
                    sample=again.sample,
                )
            )
            if again.max_len == again.num_prompt_tokens:
                self.driver.stops[again.request.id] = 1
                self.expected[key] = [STOP]

    def check(self, key: tuple[int | str, int], one: Sequence) -> None:
        """It ended by itself with all its tokens, or was cut off with the first of them."""
        outputs, expected = one.committed_tokens(), self.expected[key]
        self.counts[f"ended by {one.finish_reason or 'a fault'}"] += 1
        assert outputs == expected[: len(outputs)]
        if one.failure is not None:
            assert key in self.driver.device.faults
        elif one.finish_reason != "abort":
            assert outputs == expected
            scores = one.prompt_scores
            if scores is not None:
                count = scores.end - scores.start
                right = self.driver.device.scores(one, scores.start - 1, count)
                assert scores.values().tolist() == right.tolist()


def run_loads(seeds: range, *, lag: int, prefix_cache: bool) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        total += Load(seed, lag=lag, prefix_cache=prefix_cache).run()
    return total


LAGS_AND_CACHES = [(0, False), (1, False), (0, True), (1, True)]


@pytest.mark.parametrize(("lag", "prefix_cache"), LAGS_AND_CACHES)
def test_random_loads_end_rightly_and_nobody_reads_anothers_slots(
    lag: int, prefix_cache: bool
) -> None:
    check_power(run_loads(range(24), lag=lag, prefix_cache=prefix_cache), lag, prefix_cache)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 900, 100))
@pytest.mark.parametrize(("lag", "prefix_cache"), LAGS_AND_CACHES)
def test_many_random_loads(lag: int, prefix_cache: bool, first: int) -> None:
    loads = run_loads(range(first, first + 100), lag=lag, prefix_cache=prefix_cache)
    check_power(loads, lag, prefix_cache)


def check_power(total: Counter[str], lag: int, prefix_cache: bool) -> None:
    """The loads reached what they are there for."""
    for what in ("stop", "length", "abort", "a fault"):
        assert total[f"ended by {what}"] > 10, total
    assert total["preempted"] > 100, total
    assert total["overshoots"] > 10 or lag == 0, total
    assert total["cancelled in the prompt"] > 5, total
    if prefix_cache:
        assert total["hit tokens"] > 1_000, total
        assert total["evicted"] > 100, total
        assert total["leaders cancelled"] > 5, total


def decisions() -> str:
    """What two loads decided, as one digest."""
    seen = hashlib.sha256()
    for lag in (0, 1):
        load = Load(5, lag=lag, prefix_cache=True)
        load.run()
        for plan in load.driver.plans:
            seen.update(plan.fingerprint())
    return seen.hexdigest()


def test_equal_events_give_equal_blocks_and_rows_in_every_process() -> None:
    here = decisions()
    code = f"from {__name__} import decisions; print(decisions())"
    for seed in ("1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here


def test_colliding_digests_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """openvinotoolkit/openvino.genai#3722: a key alone names nobody's block."""
    weaken_digests(monkeypatch)
    assert run_loads(range(12), lag=0, prefix_cache=True)["hit tokens"] > 100


def weaken_digests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_index, "_digest", lambda data: bytes([sum(data) % 7]))


Mutate = Callable[[pytest.MonkeyPatch, Site], None]


def digests_decide(patch: pytest.MonkeyPatch, site: Site) -> None:
    def find(self: PrefixIndex, key: bytes, *others: object) -> CachedBlock | None:
        found = self._by_key.get(key)
        site.reached += found is not None
        return found

    weaken_digests(patch)
    patch.setattr(PrefixIndex, "find", find)


def own_tokens_decide(patch: pytest.MonkeyPatch, site: Site) -> None:
    """Of colliding prefixes only the last blocks are compared."""

    def same(one: object, other: object) -> bool:
        site.reached += 1
        return True

    weaken_digests(patch)
    patch.setattr(prefix_index, "_is_same_prefix", same)


def evicted_blocks_stay_findable(patch: pytest.MonkeyPatch, site: Site) -> None:
    def take(self: CountingPool) -> int:
        block, _ = (self._free or self._free_cached).popitem(last=False)
        site.reached += block in self._index
        self._refcounts[block] = 1
        return block

    patch.setattr(CountingPool, "_take", take)
    patch.setattr(BlockPool, "is_private", lambda self, block: self.refcount(block) == 1)


def faulty_steps_are_confirmed(patch: pytest.MonkeyPatch, site: Site) -> None:
    def fail(self: Sequence, failure: RequestFailure) -> None:
        site.reached += 1
        self.finish_reason = "abort"

    confirm_all(patch)
    patch.setattr(Sequence, "fail", fail)


def confirm_all(patch: pytest.MonkeyPatch) -> None:
    """A step is confirmed before anybody looks for its fault."""
    plain = commit._commit_row

    def commit_row(results, place, row, sequence, sampled, scheduler):  # type: ignore[no-untyped-def]
        scheduler.confirm(row, sequence)
        plain(results, place, row, sequence, sampled, scheduler)

    patch.setattr(commit, "_commit_row", commit_row)


def late_results_are_confirmed(patch: pytest.MonkeyPatch, site: Site) -> None:
    """A result that comes back after a preemption counts for the blocks held now."""

    def confirm(self: Scheduler, row: ScheduledRow, one: Sequence) -> None:
        if one.row is not None:
            site.reached += row.preemptions != one.num_preemptions
            self._sharing.publish(one, row.start + row.num_tokens)

    patch.setattr(Scheduler, "confirm", confirm)


def no_leader_is_ever_gone(patch: pytest.MonkeyPatch, site: Site) -> None:
    def leave(self: PrefixSharing, one: Sequence) -> None:
        site.reached += 1

    patch.setattr(PrefixSharing, "leave", leave)
    patch.setattr(PrefixSharing, "audit", lambda self, running: None)


MUTANTS = (
    digests_decide,
    own_tokens_decide,
    evicted_blocks_stay_findable,
    faulty_steps_are_confirmed,
    late_results_are_confirmed,
    no_leader_is_ever_gone,
)


@pytest.mark.parametrize("mutate", MUTANTS)
def test_random_loads_catch_a_broken_cache(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is :func:`test_random_loads_end_rightly_and_nobody_reads_anothers_slots`."""
    site = Site()
    mutate(monkeypatch, site)
    with pytest.raises((AssertionError, RuntimeError)):
        run_loads(range(24), lag=1, prefix_cache=True)
    assert site.reached
