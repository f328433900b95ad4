"""Runs a scheduler as the engine does, with an arena that holds prefixes instead of numbers.

Every slot names the whole prefix that its token was computed behind. A row that would attend to
anything but its own tokens is caught, whether sharing, eviction, preemption or a fault did it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedctl.engine.block_pool import BlockPool, blocks_for
from pagedctl.engine.commit import commit_step
from pagedctl.engine.live_requests import LiveRequests
from pagedctl.engine.prefix_index import root_key
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.runner import CommittedTokens
from pagedctl.engine.scheduler import Scheduler, SchedulerLimits, SequenceKey, key_of
from pagedctl.engine.sequence import IN_FLIGHT, Sequence
from pagedctl.engine.step_plan import ScheduledRow, StepPlan

STOP = 9
POISON = -1


def sequence(
    request_id: int | str,
    prompt: int | Iterable[int],
    output: int,
    *,
    sample: int = 0,
    salt: str | None = None,
    scores: PromptScores | None = None,
) -> Sequence:
    """A sequence over *prompt* (a length stands for tokens 100, 101, ...) and *output* more."""
    ids = tuple(range(100, 100 + prompt) if isinstance(prompt, int) else prompt)
    return Sequence(
        request=Request(id=request_id, prompt_token_ids=ids, params=SamplingParams()),
        sample=sample,
        seed=0,
        max_len=len(ids) + output,
        stop_token_ids=frozenset([STOP]),
        tokens=list(ids),
        num_prompt_tokens=len(ids),
        root_key=root_key("arithmetic", salt),
        prompt_scores=scores,
    )


def samples(request_id: int, prompt: int | Iterable[int], output: int, n: int) -> list[Sequence]:
    """*n* samples of one prompt."""
    ids = tuple(range(100, 100 + prompt) if isinstance(prompt, int) else prompt)
    return [sequence(request_id, ids, output, sample=number) for number in range(n)]


def scheduler(blocks: int = 100, *, kind: type[Scheduler] = Scheduler, **limits: Any) -> Scheduler:
    chosen = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "chunk_size": 64,
        "block_size": 4,
        **limits,
    }
    return kind(SchedulerLimits(**chosen), BlockPool(blocks))


def shape(plan: StepPlan) -> list[tuple[object, int, int]]:
    return [(row.request_id, row.start, row.num_tokens) for row in plan.rows]


class Site:
    """Counts how often a mutated site was reached."""

    def __init__(self) -> None:
        self.reached = 0


class Prefixes:
    """A number for every prefix, without collisions."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def behind(self, parent: object, token: int) -> int:
        return self._numbers.setdefault((parent, token), len(self._numbers))


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step on the device, with its results."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    results: CommittedTokens

    def wait(self) -> CommittedTokens:
        return self.results


class Device:
    """What the device does with a plan, and nothing that only the scheduler knows.

    Block tables come from the plans. A row that computes the position in ``faults`` is faulty:
    its slots of that step hold POISON from there on, later ones are written nowhere.
    """

    def __init__(self, block_size: int, sample: Callable[[Sequence, int], int]) -> None:
        self.block_size = block_size
        self.sample = sample
        self.faults: dict[SequenceKey, int] = {}
        self.prefixes = Prefixes()
        self.content: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self._last_token: dict[int, int] = {}
        self._faulty: set[int] = set()
        self._behind: dict[Sequence, list[int]] = {}

    def launch(self, plan: StepPlan, own: tuple[Sequence, ...]) -> Launched:
        for row, one in zip(plan.rows, own, strict=True):
            self._write(row, one)
        token_ids: list[int] = []
        scores = []
        for row, one in zip(plan.rows, own, strict=True):
            if row.row not in self._faulty:
                self._read(row, one)
            scores.append(self.scores(one, row.start + row.scored_offsets[0], row.num_scored))
            token_ids.extend(self._sample(row, one, offset) for offset in row.sample_offsets)
        marks = [row.row in self._faulty for row in plan.rows]
        results = CommittedTokens(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            faulty=[m for row, m in zip(plan.rows, marks, strict=True) for _ in row.sample_offsets],
            top=[None] * len(token_ids),
            row_faulty=marks,
            scores=scores,
        )
        return Launched(plan=plan, sequences=own, results=results)

    def scores(self, one: Sequence, position: int, count: int) -> np.ndarray:
        """The score of a given token is the number of its prefix."""
        behind = self._behind[one]
        return np.array(
            [
                self.prefixes.behind(behind[place], one.tokens[place + 1])
                for place in range(position, position + count)
            ],
            dtype=np.float32,
        )

    def _slot(self, row: int, position: int) -> int:
        table = self._tables[row]
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, row: ScheduledRow, one: Sequence) -> None:
        if row.admitted:
            self._tables[row.row] = []
            self._faulty.discard(row.row)
        self._tables[row.row].extend(row.new_blocks)
        behind = self._behind.setdefault(one, [])
        for position in range(row.start + row.num_tokens):
            if position == len(behind):
                token = one.tokens[position]
                token = self._last_token[row.row] if token == IN_FLIGHT else token
                behind.append(self.prefixes.behind(behind[-1] if behind else one.root_key, token))
        end = row.start + row.num_tokens
        fault = self.faults.get(key_of(one), end)
        broken = fault if fault >= row.start else end
        if row.row not in self._faulty:
            for position in range(row.start, end):
                held = POISON if position >= broken else behind[position]
                self.content[self._slot(row.row, position)] = held
        if broken < end:
            self._faulty.add(row.row)

    def _read(self, row: ScheduledRow, one: Sequence) -> None:
        """All that the row attends to was computed behind its own tokens."""
        for position in range(row.start + row.num_tokens):
            held = self.content.get(self._slot(row.row, position))
            assert held == self._behind[one][position], f"{key_of(one)} reads another's {position}"

    def _sample(self, row: ScheduledRow, one: Sequence, offset: int) -> int:
        assert 0 <= offset < row.num_tokens
        self._last_token[row.row] = token = self.sample(one, row.start + offset + 1)
        return token


class Driver:
    """Runs a scheduler at a lag, audits after every event, and checks every plan.

    Token t of every sequence is 1000 + t, but STOP as output token ``stops[id]``. ``faults``
    maps a sequence's key to the position at which it becomes faulty.
    """

    def __init__(
        self,
        under_test: Scheduler,
        lag: int = 0,
        stops: Mapping[int | str, int] | None = None,
        faults: Mapping[SequenceKey, int] | None = None,
    ) -> None:
        self.scheduler = under_test
        self.lag = lag
        self.stops = dict(stops or {})
        self.live = LiveRequests(under_test)
        self.device = Device(under_test.limits.block_size, self._token)
        self.device.faults.update(faults or {})
        self.launched: deque[Launched] = deque()
        self.plans: list[StepPlan] = []
        self.ended: dict[SequenceKey, Sequence] = {}
        self.forward_tokens = 0
        self.overshoots = 0
        self.peak_blocks = 0

    @property
    def finished(self) -> dict[int | str, Sequence]:
        """What ended, by request; for requests of one sample."""
        return {request_id: one for (request_id, _), one in self.ended.items()}

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.live.add(one, hold=False)
        self.scheduler.audit()

    def cancel(self, request_id: int | str) -> int:
        """Cancel a request; how many samples that ended."""
        ending = self.live.of(request_id)
        for one in ending:
            one.abort()
            self._end(one)
        return len(ending)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan.rows or self.launched, "nothing to schedule and nothing in flight"
        self.scheduler.audit()
        self._check(plan)
        self.plans.append(plan)
        self.forward_tokens += plan.num_tokens
        self.peak_blocks = max(self.peak_blocks, self.scheduler.pool.num_used)
        if plan.rows:
            own = tuple(self.live.sequences[row.request_id, row.sample] for row in plan.rows)
            self.launched.append(self.device.launch(plan, own))
        while len(self.launched) > (self.lag if plan.rows else 0):
            self._commit(self.launched.popleft())
        return plan

    def run(self, limit: int = 5_000) -> None:
        """Until all has ended; the pool is free again then."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished() and not self.launched:
                pool = self.scheduler.pool
                assert pool.num_free == pool.num_blocks
                assert not self.live.sequences
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def _commit(self, launched: Launched) -> None:
        samples_before = {one: one.num_output_tokens for one in launched.sequences}
        for row in commit_step(launched, self.scheduler):  # type: ignore[arg-type]
            self.scheduler.audit()
            if row.sequence.is_finished:
                self._end(row.sequence)
        committed = sum(one.num_output_tokens - n for one, n in samples_before.items())
        self.overshoots += launched.plan.num_sampled - committed

    def _end(self, one: Sequence) -> None:
        self.live.forget(one)
        self.ended[key_of(one)] = one
        self.scheduler.audit()

    def _token(self, one: Sequence, position: int) -> int:
        output = position - one.num_prompt_tokens + 1
        return STOP if self.stops.get(one.request.id) == output else 1000 + position

    def _check(self, plan: StepPlan) -> None:
        """Bounds of the plan, and that whoever writes into a block is its only owner."""
        limits, size = self.scheduler.limits, self.scheduler.limits.block_size
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len(plan.rows) <= limits.max_num_seqs
        assert len({row.row for row in plan.rows}) == len(plan.rows)
        assert plan.step == len(self.plans) + 1
        for key in plan.preempted:
            victim = self.live.sequences[key]
            admitted_again = victim.row is not None
            had_tokens_left = len(victim.tokens) < victim.max_len or not victim.num_in_flight
            assert admitted_again or had_tokens_left
        owners: dict[int, int] = {}
        for one in self.scheduler.running.values():
            for block in one.blocks:
                owners[block] = owners.get(block, 0) + 1
        for row in plan.rows:
            assert 0 < row.num_tokens <= limits.chunk_size
            blocks = self.scheduler.running[row.request_id, row.sample].blocks
            end = row.start + row.num_tokens
            for block in blocks[row.start // size : blocks_for(end, size)]:
                assert owners[block] == 1, f"{row.request_id} writes into a shared block"
