"""The scheduler: order, budgets, preemption, lag, and books that agree after every event."""

from __future__ import annotations

import random

import pytest

from pagedctl.engine.block_pool import BlockPool
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.scheduler import Scheduler, SchedulerLimits, key_of
from pagedctl.engine.sequence import IN_FLIGHT, Sequence
from pagedctl.engine.step_plan import StepPlan

STOP = 9


def sequence(request_id: int, prompt: int, output: int) -> Sequence:
    ids = tuple(range(100, 100 + prompt))
    return Sequence(
        request=Request(id=request_id, prompt_token_ids=ids, params=SamplingParams()),
        sample=0,
        seed=0,
        max_len=prompt + output,
        stop_token_ids=frozenset([STOP]),
        tokens=list(ids),
        num_prompt_tokens=prompt,
    )


def scheduler(blocks: int = 100, **limits: int) -> Scheduler:
    chosen = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "chunk_size": 64,
        "block_size": 4,
        **limits,
    }
    return Scheduler(SchedulerLimits(**chosen), BlockPool(blocks))


def shape(plan: StepPlan) -> list[tuple[object, int, int]]:
    return [(row.request_id, row.start, row.num_tokens) for row in plan.rows]


class Driver:
    """Runs a scheduler as the engine does, at a lag, without a model: token t is 1000 + t."""

    def __init__(self, under_test: Scheduler, lag: int = 0, stops: dict[int, int] | None = None):
        self.scheduler = under_test
        self.lag = lag
        self.stops = stops or {}  # request id -> output token at which it samples STOP
        self.launched: list[tuple[StepPlan, list[Sequence]]] = []
        self.plans: list[StepPlan] = []
        self.finished: dict[int, Sequence] = {}
        self.overshoots = 0

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.rows or self.launched, "nothing to schedule and nothing in flight"
        self.scheduler.audit()
        self.plans.append(plan)
        if plan.rows:
            rows = [self.scheduler.running[row.request_id, row.sample] for row in plan.rows]
            self.launched.append((plan, rows))
        while len(self.launched) > (self.lag if plan.rows else 0):
            self.commit(*self.launched.pop(0))
        self.scheduler.audit()
        return plan

    def commit(self, plan: StepPlan, rows: list[Sequence]) -> None:
        for row, one in zip(plan.rows, rows, strict=True):
            for offset in row.sample_offsets:
                if one.is_finished:
                    self.overshoots += 1
                    continue
                position = row.start + offset + 1
                output = position - one.num_prompt_tokens + 1
                stops = self.stops.get(int(one.request.id), -1) == output
                one.commit(STOP if stops else 1000 + position, 0.0)
                if one.is_finished:
                    self.finished[int(one.request.id)] = one
                    self.scheduler.finish(one)

    def run(self, limit: int = 5_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished() and not self.launched:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")


def test_prefill_is_chunked_and_samples_at_its_end_only() -> None:
    under_test = scheduler(chunk_size=5)
    under_test.add(sequence(0, prompt=12, output=2))
    plans = [under_test.schedule() for _ in range(3)]
    assert [shape(plan) for plan in plans] == [[(0, 0, 5)], [(0, 5, 5)], [(0, 10, 2)]]
    assert [plan.num_sampled for plan in plans] == [0, 0, 1]


def test_decodes_come_before_prefill_chunks_and_admissions() -> None:
    under_test = scheduler(max_num_batched_tokens=8, chunk_size=6)
    driver = Driver(under_test)
    under_test.add(sequence(0, prompt=3, output=5))
    driver.step()
    under_test.add(sequence(1, prompt=20, output=5))
    assert shape(driver.step()) == [(0, 3, 1), (1, 0, 6)]
    under_test.add(sequence(2, prompt=9, output=5))
    assert shape(driver.step()) == [(0, 4, 1), (1, 6, 6), (2, 0, 1)]


def test_the_budget_and_the_batch_are_never_exceeded() -> None:
    under_test = scheduler(max_num_seqs=3, max_num_batched_tokens=7, chunk_size=4)
    for number in range(9):
        under_test.add(sequence(number, prompt=1 + number, output=3))
    driver = Driver(under_test)
    driver.run()
    assert max(plan.num_tokens for plan in driver.plans) == 7
    assert max(len(plan.rows) for plan in driver.plans) == 3
    assert len(driver.finished) == 9


def test_the_budget_may_be_below_the_batch() -> None:
    under_test = scheduler(max_num_batched_tokens=2)
    for number in range(5):
        under_test.add(sequence(number, prompt=1, output=4))
    driver = Driver(under_test)
    driver.run()
    assert len(driver.finished) == 5


def test_admission_is_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    under_test = scheduler(blocks=6)
    driver = Driver(under_test)
    under_test.add(sequence(0, prompt=9, output=3))
    driver.step()
    under_test.add(sequence(1, prompt=13, output=2))
    under_test.add(sequence(2, prompt=1, output=1))
    assert shape(driver.step()) == [(0, 9, 1)]
    driver.run()
    assert set(driver.finished) == {0, 1, 2}


def test_a_request_that_ends_at_n_tokens_keeps_n_minus_one() -> None:
    """block 4, prompt 3, max_tokens 6: eight cached tokens are exactly two blocks."""
    under_test = scheduler(blocks=2)
    under_test.add(sequence(0, prompt=3, output=6))
    driver = Driver(under_test)
    driver.run()
    assert driver.finished[0].num_output_tokens == 6
    assert under_test.num_preemptions == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_the_youngest_is_preempted_and_keeps_its_tokens(lag: int) -> None:
    """vllm-project/vllm-gaudi#524: output tokens count once, recompute covers all tokens."""
    under_test = scheduler(blocks=7)
    driver = Driver(under_test, lag=lag)
    under_test.add(sequence(0, prompt=4, output=16))
    under_test.add(sequence(1, prompt=4, output=16))
    driver.run()
    victims = {key for plan in driver.plans for key in plan.preempted}
    assert victims == {(1, 0)}
    for number in (0, 1):
        done = driver.finished[number]
        assert done.committed_tokens() == [1000 + position for position in range(4, 20)]
        assert done.num_output_tokens == 16
        assert done.finish_reason == "length"


def test_a_preempted_sequence_goes_before_those_that_wait() -> None:
    under_test = scheduler(blocks=7, max_num_seqs=2)
    driver = Driver(under_test)
    for number in range(3):
        under_test.add(sequence(number, prompt=4, output=16))
    while not under_test.num_preemptions:
        driver.step()
    assert next(iter(under_test.waiting)).request.id == 1


def test_at_lag_one_a_stop_overshoots_by_one_row_and_a_length_never_does() -> None:
    under_test = scheduler()
    driver = Driver(under_test, lag=1, stops={0: 3})
    under_test.add(sequence(0, prompt=4, output=16))
    under_test.add(sequence(1, prompt=4, output=16))
    driver.run()
    assert driver.overshoots == 1
    assert driver.finished[0].committed_tokens()[-1] == STOP
    assert driver.finished[0].finish_reason == "stop"
    assert driver.finished[1].num_output_tokens == 16


class Watched(Scheduler):
    """Notes for whom others were preempted, and who waited because its input was in flight."""

    causes: list[int]
    waits: int

    def _grow(self, one, num_tokens, step):  # type: ignore[no-untyped-def]
        in_flight, before = one.num_in_flight, self.num_preemptions
        blocks = super()._grow(one, num_tokens, step)
        if self.num_preemptions > before:
            self.causes.append(in_flight)
        self.waits += blocks is None and in_flight > 0
        return blocks


def test_nobody_is_preempted_for_a_row_whose_input_is_in_flight() -> None:
    """Such a row may be an overshoot; it waits for the commit instead."""
    plain = scheduler(blocks=4)
    under_test = Watched(plain.limits, plain.pool)
    under_test.causes, under_test.waits = [], 0
    driver = Driver(under_test, lag=1)
    under_test.add(sequence(0, prompt=7, output=9))
    under_test.add(sequence(1, prompt=3, output=9))
    driver.run()
    assert under_test.waits > 0
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
@pytest.mark.parametrize("seed", range(6))
def test_random_load_ends_with_every_token_and_an_empty_pool(lag: int, seed: int) -> None:
    rng = random.Random(seed)
    under_test = scheduler(
        blocks=rng.choice([9, 14, 40]),
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([3, 8, 32]),
        chunk_size=rng.choice([2, 5, 32]),
        block_size=rng.choice([2, 4]),
    )
    stops = {number: rng.randint(1, 9) for number in range(0, 40, 3)}
    driver = Driver(under_test, lag=lag, stops=stops)
    expected = {}
    for number in range(40):
        prompt, output = rng.randint(1, 9), rng.randint(1, 9)
        expected[number] = min(output, stops.get(number, output))
        under_test.add(sequence(number, prompt=prompt, output=output))
        for _ in range(rng.randint(0, 2)):
            driver.step()
    driver.run()
    assert {n: one.num_output_tokens for n, one in driver.finished.items()} == expected
    assert under_test.pool.num_free == under_test.pool.num_blocks
    under_test.audit()
    for one in driver.finished.values():
        outputs = one.committed_tokens()
        last = [STOP] if one.finish_reason == "stop" else []
        body = outputs[: len(outputs) - len(last)]
        start = one.num_prompt_tokens
        assert body == [1000 + position for position in range(start, start + len(body))]


def forgetful_rewind(self: Sequence) -> None:
    """Mutant: a preempted sequence loses its generated tokens."""
    del self.tokens[self.num_prompt_tokens :]
    self.num_computed_tokens = 0
    self.num_preemptions += 1


def test_a_preemption_that_forgets_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test_the_youngest_is_preempted_and_keeps_its_tokens(0)
    monkeypatch.setattr(Sequence, "rewind", forgetful_rewind)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        test_the_youngest_is_preempted_and_keeps_its_tokens(0)


def leaky_vacate(self: Scheduler, one: Sequence) -> None:
    """Mutant: the row comes back, the blocks do not."""
    assert one.row is not None
    self._free_rows.append(one.row)
    one.blocks, one.row = [], None


def test_a_finish_that_leaks_blocks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    test_a_request_that_ends_at_n_tokens_keeps_n_minus_one()
    monkeypatch.setattr(Scheduler, "_vacate", leaky_vacate)
    with pytest.raises(RuntimeError):
        test_a_request_that_ends_at_n_tokens_keeps_n_minus_one()


def test_keys_name_the_sample() -> None:
    assert key_of(sequence(3, prompt=1, output=1)) == (3, 0)
