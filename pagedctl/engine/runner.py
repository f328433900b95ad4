"""The runner: turns a step plan into tensors, runs the model, and hands back what to commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pagedctl.engine.batch_rows import BatchRows, StepBatch
from pagedctl.engine.edit_rows import EditRows
from pagedctl.engine.kv_cache import KVArena
from pagedctl.engine.own_precision import own_precision
from pagedctl.engine.sampler import LikeliestTokens, Sampled, Sampler
from pagedctl.engine.scheduler import SequenceKey
from pagedctl.engine.sequence import Sequence, TopTokens
from pagedctl.engine.step_plan import StepPlan
from pagedctl.errors import NumericsRefused
from pagedctl.models.decoder import Decoder
from pagedctl_kernels.machine import Machine, settings_drift


@dataclass(frozen=True, kw_only=True)
class CommittedTokens:
    """What a step gave, on the host and in the plan's order.

    ``token_ids``, ``logprobs``, ``faulty`` and ``top`` (None where not asked for) have one
    entry per sample offset; ``row_faulty`` and ``scores``, float32[row.num_scored], one per row
    of the plan. A row that is faulty stays so; its scores hold a NaN if they made it faulty.
    """

    token_ids: list[int]
    logprobs: list[float]
    faulty: list[bool]
    top: list[TopTokens | None]
    row_faulty: list[bool]
    scores: list[NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step that the device is working on; ``sampled`` is None if it samples nothing.

    ``sequences`` are those of the plan's rows, in its order: results belong to them, not to
    whoever has their id when the results arrive. ``scores`` A[N] are those of all rows,
    ``row_faulty`` bool[S] has the marks of the plan's rows after this step.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    sampled: Sampled | None
    scores: torch.Tensor | None
    row_faulty: torch.Tensor

    def wait(self) -> CommittedTokens:
        """What to commit; the one place where the host waits for the device."""
        sampled = self.sampled
        return CommittedTokens(
            token_ids=[] if sampled is None else sampled.token_ids.tolist(),
            logprobs=[] if sampled is None else sampled.logprobs.tolist(),
            faulty=[] if sampled is None else sampled.faulty.tolist(),
            top=self._top(),
            row_faulty=self.row_faulty.tolist(),
            scores=self._scores(),
        )

    def _top(self) -> list[TopTokens | None]:
        if self.sampled is None or self.sampled.top is None:
            return [None] * self.plan.num_sampled
        return _top_lists(self.sampled.top)

    def _scores(self) -> list[NDArray[np.float32]]:
        counts = [row.num_scored for row in self.plan.rows]
        found = torch.empty(0) if self.scores is None else self.scores
        values = found.to("cpu", torch.float32).numpy()
        return np.split(values, np.cumsum(counts)[:-1])


class Runner:
    """Runs steps on one device, in the order in which they are launched."""

    def __init__(
        self,
        decoder: Decoder,
        arena: KVArena,
        rows: BatchRows,
        sampler: Sampler,
        *,
        guarded: Machine | None,
    ) -> None:
        """``guarded`` is the machine whose settings must hold at every step, under a contract."""
        self.guarded = guarded
        self.decoder = decoder
        self.caches = arena.layers()
        self.rows = rows
        self.edits = EditRows(
            max_num_seqs=len(rows.faulty),
            vocab_size=decoder.spec.output_vocab_size,
            dtype=rows.temperature.dtype,
            device=rows.device,
        )
        self.sampler = sampler

    @torch.inference_mode()
    def launch(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> LaunchedStep:
        """Start the step; ``sequences`` holds every sequence that the plan names."""
        with own_precision(self.rows.device.type):
            return self._launch(plan, sequences)

    def _launch(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> LaunchedStep:
        own = tuple(sequences[row.request_id, row.sample] for row in plan.rows)
        self.rows.update(plan, sequences)
        self.edits.update(plan, sequences)
        batch = self.rows.step_batch(plan, sequences)
        hidden = self.decoder.forward(batch.decoder, self.caches)
        self.rows.mark_faulty(batch, hidden)
        scores = self._score(batch, hidden)
        sampled = self._sample(plan, batch, hidden)
        return LaunchedStep(
            plan=plan,
            sequences=own,
            sampled=sampled,
            scores=scores,
            row_faulty=self.rows.faulty[batch.rows],
        )

    def require_settings(self) -> None:
        """Raises NumericsRefused if the process's settings no longer keep the contract."""
        drift = settings_drift(self.guarded) if self.guarded is not None else None
        if drift is not None:
            raise NumericsRefused(
                f"the contract cannot be kept: {drift}",
                where="torch settings of this process, changed after the engine was built",
                rule="threads, precision and subnormals stay as they were when plans were bound",
                remedy="set them before building the engine, or use --numerics fast",
            )

    def _score(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logprobs A[N] of the given tokens; a row whose logits are not finite is marked."""
        scored = batch.scored
        if scored is None:
            return None
        logprobs = self.sampler.score(hidden[scored.index], scored.temperature, scored.token_ids)
        self.rows.mark_scores(scored, logprobs)
        return logprobs

    def _sample(self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor) -> Sampled | None:
        """One token per sample offset, kept for the next step and counted where it is edited."""
        if not len(batch.sample_index):
            return None
        edits = self.edits.step_edits(plan)
        drawn = self.sampler(hidden[batch.sample_index], batch.sampling, edits, batch.top)
        sampled = replace(drawn, faulty=drawn.faulty | self.rows.faulty[batch.sample_rows])
        self.rows.store(batch, sampled.token_ids, sampled.faulty)
        if edits is not None:
            self.edits.count(edits, sampled.token_ids)
        return sampled


def _top_lists(top: LikeliestTokens) -> list[TopTokens | None]:
    """Per sampled row None, or as many of its likeliest tokens as it asked for."""
    found = zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    lists: list[TopTokens | None] = []
    for count in top.asked.counts:
        ids, logprobs = next(found) if count else ([], [])
        lists.append((ids[:count], logprobs[:count]) if count else None)
    return lists
