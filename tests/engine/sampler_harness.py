"""Hand-made steps of a runner, and the float64 reference of what its sampler hands out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.runner import CommittedTokens, LaunchedStep
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import ScheduledRow, StepPlan
from tests.kernels import reference
from tests.kernels.test_logit_edits import Edit, by_definition
from tests.reference.tiny_models import TinyModel

Top = tuple[list[int], list[float]]


def asked(number: int, prompt: tuple[int, ...], **params: Any) -> Request:
    """A request of 8 tokens; *number* is its id and seeds it."""
    chosen = {"max_tokens": 8, "ignore_eos": True, "seed": number, **params}
    return Request(id=number, prompt_token_ids=prompt, params=SamplingParams(**chosen))


@dataclass(kw_only=True)
class Result:
    """What the steps gave one sequence; ``scores`` are in the order of positions."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Top | None] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    faulty: bool = False

    def bits(self) -> tuple[object, ...]:
        """Everything, floats by their bits."""
        tops = [(ids, _bits(logprobs)) for ids, logprobs in (one or ([], []) for one in self.top)]
        return (self.token_ids, _bits(self.logprobs), tops, _bits(self.scores), self.faulty)


def _bits(values: list[float]) -> bytes:
    return np.array(values, dtype=np.float64).tobytes()


@dataclass(kw_only=True)
class Steps:
    """Runs sequences side by side on an engine's runner, each in blocks and a row of its own.

    Every step takes up to ``chunk`` tokens of each sequence that has some, and is committed
    ``lag`` steps later. ``score`` scores the prompts. ``readmit_at`` is a step at which every
    sequence starts over in another row, as after a preemption.
    """

    engine: Engine
    chunk: int = 64
    lag: int = 0
    score: bool = False
    readmit_at: int | None = None
    rows: list[int] | None = None
    stop_token_ids: frozenset[int] = frozenset()

    def run(self, requests: list[Request]) -> list[Result]:
        """The results in the order of *requests*."""
        sequences = [self._sequence(one) for one in requests]
        results = [Result(request=one) for one in requests]
        rows = self.rows or list(range(len(requests)))
        launched: deque[LaunchedStep] = deque()
        table = {(one.request.id, one.sample): one for one in sequences}
        step, fresh = 0, set(range(len(requests)))
        while True:
            step += 1
            if step == self.readmit_at:
                self._commit_all(launched, sequences, results)
                rows = rows[1:] + rows[:1]
                fresh = set(range(len(requests)))
                for sequence in sequences:
                    sequence.num_computed_tokens = 0
            scheduled = list(self._scheduled(sequences, rows, fresh))
            if not scheduled and not launched:
                return results
            if scheduled:
                plan = StepPlan(step=step, rows=tuple(scheduled))
                launched.append(self.engine.parts.runner.launch(plan, table))
            while len(launched) > (self.lag if scheduled else 0):
                self._commit(launched.popleft(), sequences, results)

    def _sequence(self, request: Request) -> Sequence:
        prompt = list(request.prompt_token_ids)
        return Sequence(
            request=request,
            sample=0,
            seed=request.params.seed or 0,
            max_len=len(prompt) + (request.params.max_tokens or 0),
            stop_token_ids=self.stop_token_ids,
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
        )

    def _scheduled(
        self, sequences: list[Sequence], rows: list[int], fresh: set[int]
    ) -> Iterator[ScheduledRow]:
        for place, sequence in enumerate(sequences):
            start = sequence.num_computed_tokens
            last = min(len(sequence.tokens), max(sequence.max_len - 1, sequence.num_prompt_tokens))
            count = min(self.chunk, last - start)
            if count <= 0:
                continue
            end = start + count
            samples = end == len(sequence.tokens) < sequence.max_len
            scored = max(min(end, sequence.num_prompt_tokens - 1) - start, 0) if self.score else 0
            yield ScheduledRow(
                request_id=sequence.request.id,
                sample=0,
                row=rows[place],
                start=start,
                num_tokens=count,
                sample_offsets=(count - 1,) if samples else (),
                new_blocks=self._blocks(place, sequence) if place in fresh else (),
                admitted=place in fresh,
                scored_offsets=(0, scored),
            )
            fresh.discard(place)
            sequence.num_computed_tokens = end
            if samples:
                sequence.append_in_flight()

    def _blocks(self, place: int, sequence: Sequence) -> tuple[int, ...]:
        most = 64 // self.engine.config.block_size
        assert sequence.max_len <= 64
        return tuple(range(place * most, (place + 1) * most))

    def _commit_all(
        self, launched: deque[LaunchedStep], sequences: list[Sequence], results: list[Result]
    ) -> None:
        while launched:
            self._commit(launched.popleft(), sequences, results)

    def _commit(
        self, launched: LaunchedStep, sequences: list[Sequence], results: list[Result]
    ) -> None:
        committed: CommittedTokens = launched.wait()
        assert len(committed.row_faulty) == len(committed.scores) == len(launched.plan.rows)
        sampled = zip(
            committed.token_ids, committed.logprobs, committed.faulty, committed.top, strict=True
        )
        for place, (row, sequence) in enumerate(
            zip(launched.plan.rows, launched.sequences, strict=True)
        ):
            result = results[sequences.index(sequence)]
            result.faulty |= committed.row_faulty[place]
            assert committed.scores[place].dtype == np.float32
            assert len(committed.scores[place]) == row.num_scored
            result.scores.extend(committed.scores[place].tolist())
            for _ in row.sample_offsets:
                token, logprob, faulty, top = next(sampled)
                result.faulty |= faulty
                sequence.commit(token, logprob)
                result.token_ids.append(token)
                result.logprobs.append(logprob)
                result.top.append(top)
        assert next(sampled, None) is None


def edit_of(request: Request, output: list[int], stop_token_ids: frozenset[int]) -> Edit:
    """The edits of the token that follows *output*."""
    params = request.params
    return Edit(
        prompt=request.prompt_token_ids,
        output=tuple(output),
        allowed=params.allowed_token_ids,
        bias=params.logit_bias,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        barred=tuple(stop_token_ids) if len(output) < params.min_tokens else (),
    )


def check_result(
    result: Result,
    model: TinyModel,
    basis: str,
    *,
    stop_token_ids: frozenset[int] = frozenset(),
    tolerance: float = 1e-4,
) -> None:
    """Every token, logprob and likeliest token against numpy in float64, edit by edit."""
    request, decoder = result.request, model.reference()
    params, prompt = request.params, list(request.prompt_token_ids)
    assert not result.faulty
    assert len(result.token_ids) == params.max_tokens
    for place, token in enumerate(result.token_ids):
        output = result.token_ids[:place]
        logits = decoder.logits([*prompt, *output])[-1]
        edited = np.array(by_definition(logits.tolist(), edit_of(request, output, stop_token_ids)))
        divisor = params.temperature or 1.0
        kept = reference.kept_tokens(
            edited.tolist(), divisor, params.top_k or 0, params.top_p, params.min_p
        )
        if params.temperature == 0:
            assert edited.max() - edited[token] < tolerance
        else:
            assert token in kept
        reported = {"raw": logits, "scaled": logits / divisor}.get(basis)
        if reported is None:
            reported = np.full(len(edited), -np.inf)
            reported[kept] = edited[kept] / divisor
        expected = reference.log_softmax(reported)
        assert abs(result.logprobs[place] - expected[token]) < tolerance
        check_top(result.top[place], result, place, expected, params.top_logprobs, tolerance)


def check_top(
    top: Top | None,
    result: Result,
    place: int,
    expected: np.ndarray[Any, Any],
    count: int,
    tolerance: float,
) -> None:
    """The likeliest tokens by the reference, and the sampled one's logprob bit for bit."""
    if count == 0:
        assert top is None
        return
    assert top is not None
    ids, logprobs = top
    assert len(ids) == len(set(ids)) == len(logprobs) == count
    ranked = np.sort(expected)[::-1][:count]
    finite = np.isfinite(ranked)
    assert (np.isfinite(logprobs) == finite).all()
    assert np.abs(np.array(logprobs)[finite] - ranked[finite]).max() < tolerance
    assert np.abs(np.array(logprobs)[finite] - expected[ids][finite]).max() < tolerance
    if result.token_ids[place] in ids:
        assert logprobs[ids.index(result.token_ids[place])] == result.logprobs[place]
