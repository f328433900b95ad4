"""What an engine has done so far, counted step by step. No torch."""

from __future__ import annotations

from collections import Counter

from pagedctl.engine.request import Stats
from pagedctl.engine.scheduler import Scheduler, SequenceKey
from pagedctl.engine.step_plan import StepPlan
from pagedctl.engine.step_report import StepReport


class StepCounts:
    """Counters since an engine was built, and the report of its last step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps = 0
        self._forward_tokens = 0
        self._output_tokens = 0
        self._last: StepReport | None = None

    def commit(self, committed: Counter[SequenceKey]) -> None:
        """Output tokens of each sequence that a step gave."""
        self._output_tokens += committed.total()

    def step(self, plan: StepPlan, committed: Counter[SequenceKey]) -> None:
        """A step was launched, and *committed* came to the host meanwhile."""
        scheduler = self._scheduler
        self._steps += bool(plan.rows)
        self._forward_tokens += plan.num_tokens
        self._last = StepReport(
            step=plan.step,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            num_sampled=plan.num_sampled,
            committed=tuple((id_, sample, count) for (id_, sample), count in committed.items()),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=scheduler.pool.num_used,
        )

    def last(self) -> StepReport:
        """Raises RuntimeError before the first step."""
        if self._last is None:
            raise RuntimeError("no step has run yet")
        return self._last

    def stats(self, *, num_held: int) -> Stats:
        """The counters and the present load; *num_held* wait outside the scheduler."""
        scheduler = self._scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + num_held,
            free_blocks=scheduler.pool.num_free,
            cached_blocks=scheduler.pool.num_cached,
            steps=self._steps,
            forward_tokens=self._forward_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.num_preemptions,
            output_tokens=self._output_tokens,
        )
