"""The scheduler: which tokens of which sequences the next step computes.

Pure Python on ordered containers, no tensors, no clock. The planner simulates rollouts with
this very class, and ranks of one engine run it in lockstep.

A sequence is computed until its counter reaches its tokens, so prefill, chunked prefill,
decode, scoring and recompute after a preemption are one path. Decodes come first, then prefill
chunks, then admissions, first come first served; only a sequence that waits for a leader's
blocks is overtaken.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from pagedctl.engine.block_pool import BlockPool, BlockPoolError, blocks_for
from pagedctl.engine.prefix_sharing import Prefix, PrefixSharing
from pagedctl.engine.request import RequestId
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import ScheduledRow, StepPlan
from pagedctl.engine.watermark import keeps_watermark

SequenceKey = tuple[RequestId, int]


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one step and of the batch; all in tokens, except ``max_num_seqs``.

    ``force_preemption_interval``: preempt somebody every so many steps, to prove that it changes
    nothing; negative: only a sequence that is still in its prompt. None: never.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_size: int
    block_size: int
    prefix_cache: bool = False
    force_preemption_interval: int | None = None


class Scheduler:
    """Waiting and running sequences over one block pool.

    ``schedule`` advances the counters of what it schedules at once: the host runs ahead of the
    device, and a sampled token stands as in flight until :meth:`Sequence.commit`.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: OrderedDict[SequenceKey, Sequence] = OrderedDict()
        self.num_preemptions = 0
        self.prefix_hit_tokens = 0
        self._sharing = PrefixSharing(
            pool, block_size=limits.block_size, enabled=limits.prefix_cache
        )
        self._step = 0
        self._free_rows = list(range(limits.max_num_seqs))

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences, running ones first."""
        yield from self.running.values()
        yield from self.waiting

    def schedule(self) -> StepPlan:
        """Decide the next step; a plan without rows means that all wait for commits."""
        self._step += 1
        step = _Step(budget=self.limits.max_num_batched_tokens)
        self._force_preemption(step)
        ready, chunks, unconfirmed = self._running_by_kind()
        for sequence in ready:
            self._schedule_running(sequence, step)
        step.budget -= len(unconfirmed)
        for sequence in chunks:
            self._schedule_running(sequence, step)
        step.budget += len(unconfirmed)
        for sequence in unconfirmed:
            self._schedule_running(sequence, step)
        for sequence in step.preempted:
            self.waiting.appendleft(sequence)
        if not (step.preempted and step.rows):
            self._admit(step)
        return StepPlan(
            step=self._step,
            rows=tuple(step.rows.values()),
            preempted=tuple(key_of(sequence) for sequence in step.preempted),
        )

    def confirm(self, row: ScheduledRow, sequence: Sequence) -> None:
        """The step of *row* was committed without a fault: its full blocks may be shared."""
        if sequence.row is not None and row.preemptions == sequence.num_preemptions:
            self._sharing.publish(sequence, row.start + row.num_tokens)

    def finish(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence and give back its blocks and row.

        The blocks that a failed one still holds are tainted: nobody may share them.
        """
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        if sequence.failure is not None:
            self._sharing.taint(sequence)
        del self.running[key_of(sequence)]
        self._vacate(sequence)

    def audit(self) -> None:
        """Recompute all books; raises if blocks, rows or counters disagree."""
        self.pool.audit(sequence.blocks for sequence in self.sequences())
        self._sharing.audit(list(self.running.values()))
        rows = [sequence.row for sequence in self.running.values()]
        booked = sorted([*self._free_rows, *(row for row in rows if row is not None)])
        if None in rows or booked != list(range(self.limits.max_num_seqs)):
            raise RuntimeError(f"rows are lost or taken twice: {rows}, free {self._free_rows}")
        for sequence in self.sequences():
            held = len(sequence.blocks) * self.limits.block_size
            if not 0 <= sequence.num_computed_tokens <= min(held, len(sequence.tokens)):
                raise RuntimeError(f"{key_of(sequence)} computed more than it holds")
            if sequence.row is None and (sequence.blocks or sequence.num_computed_tokens):
                raise RuntimeError(f"{key_of(sequence)} waits but holds blocks")

    def _running_by_kind(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Decodes, prefill chunks, and unconfirmed decodes that need a block; oldest first.

        An unconfirmed decode's input is in flight, so it may turn out to have stopped. It takes
        a block only after all others had their turn: nobody is preempted because of it.
        """
        ready: list[Sequence] = []
        chunks: list[Sequence] = []
        unconfirmed: list[Sequence] = []
        for one in self.running.values():
            count = one.num_schedulable
            if count > 1:
                chunks.append(one)
            elif count == 1:
                needed = blocks_for(one.num_computed_tokens + 1, self.limits.block_size)
                grows = needed > len(one.blocks)
                (unconfirmed if grows and one.num_in_flight else ready).append(one)
        return ready, chunks, unconfirmed

    def _schedule_running(self, sequence: Sequence, step: _Step) -> None:
        if sequence.row is None:
            return  # preempted earlier in this step
        count = min(sequence.num_schedulable, self.limits.chunk_size, step.budget)
        if count <= 0:
            return
        new_blocks = self._grow(sequence, sequence.num_computed_tokens + count, step)
        if new_blocks is not None:
            self._take(step, sequence, count, new_blocks, admitted=False)

    def _grow(self, sequence: Sequence, num_tokens: int, step: _Step) -> tuple[int, ...] | None:
        """Blocks up to *num_tokens*, preempting younger sequences; None if it must wait.

        A sequence whose last token is in flight may turn out to have stopped. It takes a free
        block, but nobody is preempted for it: it waits for the commit instead.
        """
        needed = blocks_for(num_tokens, self.limits.block_size) - len(sequence.blocks)
        if needed <= 0:
            return ()
        while (blocks := self.pool.allocate(needed)) is None:
            if sequence.num_in_flight:
                return None
            victim = self._youngest_unscheduled(step)
            if victim is None:
                return None
            self._preempt(victim, step)
            if victim is sequence:
                return None
        sequence.blocks.extend(blocks)
        return blocks

    def _youngest_unscheduled(self, step: _Step) -> Sequence | None:
        """The victim; a sequence that only waits for its last commit gives nothing to redo."""
        for key, sequence in reversed(self.running.items()):
            if key not in step.rows and sequence.num_schedulable > 0:
                return sequence
        return None

    def _force_preemption(self, step: _Step) -> None:
        """Every so many steps, preempt the youngest that got further than ever before.

        So every sequence advances between two preemptions, however often they come.
        """
        interval = self.limits.force_preemption_interval
        if interval is None or self._step % abs(interval):
            return
        for sequence in reversed(self.running.values()):
            in_prompt = sequence.num_computed_tokens < sequence.num_prompt_tokens
            advanced = sequence.num_computed_tokens > sequence.furthest
            if advanced and sequence.num_schedulable > 0 and (interval > 0 or in_prompt):
                self._preempt(sequence, step)
                return

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        del self.running[key_of(sequence)]
        self._vacate(sequence)
        sequence.rewind()
        self.num_preemptions += 1
        step.preempted.append(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._sharing.leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = None

    def _admit(self, step: _Step) -> None:
        """Admit in order of arrival while all of a sequence's tokens fit.

        Its blocks are taken for the whole token list at once, so a prefill never stalls
        halfway. A sequence whose next block a leader computes is passed over; those passed over
        have a claim on the free rows.
        """
        passed_over: list[Sequence] = []
        while self.waiting and step.budget > 0 and len(self._free_rows) > len(passed_over):
            sequence = self.waiting[0]
            if sequence.num_in_flight:
                break  # preempted just now; its last token comes with the next commit
            prefix = self._sharing.look_up(sequence)
            if prefix.awaited:
                passed_over.append(self.waiting.popleft())
            elif self._fits(sequence, prefix):
                self._admit_one(self.waiting.popleft(), prefix, step)
            else:
                break
        self.waiting.extendleft(reversed(passed_over))

    def _fits(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether its blocks are free, and the watermark stays free behind them."""
        needed = blocks_for(sequence.num_computable, self.limits.block_size) - len(prefix.blocks)
        left = self.pool.num_free - needed - self.pool.num_revived(prefix.blocks)
        if left < 0 or not self.running:
            return left >= 0
        return keeps_watermark(
            left,
            self.running.values(),
            sequence,
            num_found=len(prefix.blocks) * self.limits.block_size,
            block_size=self.limits.block_size,
        )

    def _admit_one(self, sequence: Sequence, prefix: Prefix, step: _Step) -> None:
        self.pool.share(prefix.blocks)
        needed = blocks_for(sequence.num_computable, self.limits.block_size) - len(prefix.blocks)
        own = self.pool.allocate(needed)
        assert own is not None
        sequence.blocks = [*prefix.blocks, *own]
        sequence.row = heapq.heappop(self._free_rows)
        self.running[key_of(sequence)] = sequence
        self._sharing.lead(sequence, prefix)
        found = len(prefix.blocks) * self.limits.block_size
        sequence.num_computed_tokens = found
        if sequence.cached_tokens is None:
            sequence.cached_tokens = found
        self.prefix_hit_tokens += found
        count = min(sequence.num_schedulable, self.limits.chunk_size, step.budget)
        self._take(step, sequence, count, tuple(sequence.blocks), admitted=True)

    def _take(
        self,
        step: _Step,
        sequence: Sequence,
        count: int,
        new_blocks: tuple[int, ...],
        *,
        admitted: bool,
    ) -> None:
        """Put *count* tokens of *sequence* into the step, which may write into its blocks."""
        start, size = sequence.num_computed_tokens, self.limits.block_size
        for block in sequence.blocks[start // size : blocks_for(start + count, size)]:
            if not self.pool.is_private(block):
                raise BlockPoolError(f"{key_of(sequence)} would write into shared block {block}")
        step.take(sequence, count, new_blocks, admitted=admitted)


class _Step:
    """The step under construction."""

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self.rows: OrderedDict[SequenceKey, ScheduledRow] = OrderedDict()
        self.preempted: list[Sequence] = []

    def take(
        self, sequence: Sequence, count: int, new_blocks: tuple[int, ...], *, admitted: bool
    ) -> None:
        """Schedule *count* tokens of *sequence* and advance its counters."""
        assert sequence.row is not None
        start = sequence.num_computed_tokens
        samples = start + count == len(sequence.tokens)
        scores = sequence.prompt_scores
        self.rows[key_of(sequence)] = ScheduledRow(
            request_id=sequence.request.id,
            sample=sequence.sample,
            row=sequence.row,
            start=start,
            num_tokens=count,
            sample_offsets=(count - 1,) if samples else (),
            new_blocks=new_blocks,
            admitted=admitted,
            scored_offsets=(0, 0) if scores is None else scores.offsets(start, count),
            preemptions=sequence.num_preemptions,
        )
        self.budget -= count
        sequence.num_computed_tokens += count
        if samples:
            sequence.append_in_flight()


def key_of(sequence: Sequence) -> SequenceKey:
    return (sequence.request.id, sequence.sample)
