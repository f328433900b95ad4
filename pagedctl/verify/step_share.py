"""A sequence's share of a step: which rows of an op's call are its own. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedctl.engine.scheduler import SequenceKey
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """A sequence's rows in one step.

    Its ``count`` tokens from position ``start`` on lie at ``first`` of ``num_tokens``. ``outputs``
    maps a place among what the step scores, then samples, to the position it is computed at;
    ``num_scored`` of those places are scored. ``plan_row`` is its row of the plan, ``top`` how
    many likeliest tokens it reports.
    """

    first: int
    count: int
    start: int
    num_tokens: int
    num_scored: int
    outputs: Mapping[int, int]
    plan_row: int
    top: int


def share_of(
    plan: StepPlan, key: SequenceKey, sequences: Mapping[SequenceKey, Sequence]
) -> StepShare | None:
    """The share that sample *key* has in the step, None if it is not in it."""
    first = 0
    scored, sampled = 0, sum(row.num_scored for row in plan.rows)
    num_scored = sampled
    for place, row in enumerate(plan.rows):
        if (row.request_id, row.sample) == key:
            begin = row.start + row.scored_offsets[0]
            outputs = {scored + step: begin + step for step in range(row.num_scored)}
            outputs |= {
                sampled + step: row.start + offset for step, offset in enumerate(row.sample_offsets)
            }
            return StepShare(
                first=first,
                count=row.num_tokens,
                start=row.start,
                num_tokens=plan.num_tokens,
                num_scored=num_scored,
                outputs=outputs,
                plan_row=place,
                top=sequences[key].request.params.top_logprobs,
            )
        first += row.num_tokens
        scored += row.num_scored
        sampled += len(row.sample_offsets)
    return None
