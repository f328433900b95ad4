"""Gives a step's results to the sequences that they belong to. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedctl.engine.completions import non_finite_failure
from pagedctl.engine.scheduler import Scheduler
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import ScheduledRow

if TYPE_CHECKING:
    from pagedctl.engine.runner import CommittedTokens, LaunchedStep


@dataclass(frozen=True, kw_only=True)
class CommittedRow:
    """One sequence after the commit of its row, and how many output tokens it got."""

    sequence: Sequence
    num_tokens: int


def commit_step(launched: LaunchedStep, scheduler: Scheduler) -> Iterator[CommittedRow]:
    """Wait for *launched* and commit its rows, each as it is asked for.

    What a sequence computed behind its end (it stopped, failed or was cancelled meanwhile) is
    dropped. A faulty row fails its request, and nothing of its step is committed.
    """
    results = launched.wait()
    first = 0
    for place, row in enumerate(launched.plan.rows):
        sampled = range(first, first + len(row.sample_offsets))
        first = sampled.stop
        sequence = launched.sequences[place]
        if not sequence.is_finished:
            before = sequence.num_output_tokens
            _commit_row(results, place, row, sequence, sampled, scheduler)
            yield CommittedRow(sequence=sequence, num_tokens=sequence.num_output_tokens - before)


def _commit_row(
    results: CommittedTokens,
    place: int,
    row: ScheduledRow,
    sequence: Sequence,
    sampled: range,
    scheduler: Scheduler,
) -> None:
    if results.row_faulty[place] or any(results.faulty[index] for index in sampled):
        sequence.fail(non_finite_failure(sequence))
        return
    if row.num_scored:
        assert sequence.prompt_scores is not None
        position = row.start + row.scored_offsets[0]
        sequence.prompt_scores.deliver(position, results.scores[place])
    scheduler.confirm(row, sequence)
    for index in sampled:
        if not sequence.is_finished:
            sequence.commit(results.token_ids[index], results.logprobs[index], results.top[index])
    if sequence.is_scored:
        sequence.finish_reason = "length"
