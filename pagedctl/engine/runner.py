"""The runner: turns a step plan into tensors, runs the model, and hands back what to commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagedctl.engine.batch_rows import BatchRows
from pagedctl.engine.kv_cache import KVArena
from pagedctl.engine.sampler import Sampled, Sampler
from pagedctl.engine.scheduler import SequenceKey
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import StepPlan
from pagedctl.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class CommittedTokens:
    """A step's sampled tokens on the host, in the plan's order: one entry per sample offset."""

    token_ids: list[int]
    logprobs: list[float]
    faulty: list[bool]


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step that the device is working on; ``sampled`` is None if it samples nothing.

    ``sequences`` are those of the plan's rows, in its order: results belong to them, not to
    whoever has their id when the results arrive.
    """

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    sampled: Sampled | None

    def wait(self) -> CommittedTokens:
        """The sampled tokens; the one place where the host waits for the device."""
        if self.sampled is None:
            return CommittedTokens(token_ids=[], logprobs=[], faulty=[])
        return CommittedTokens(
            token_ids=self.sampled.token_ids.tolist(),
            logprobs=self.sampled.logprobs.tolist(),
            faulty=self.sampled.faulty.tolist(),
        )


class Runner:
    """Runs steps on one device, in the order in which they are launched."""

    def __init__(self, decoder: Decoder, arena: KVArena, rows: BatchRows, sampler: Sampler) -> None:
        self.decoder = decoder
        self.caches = arena.layers()
        self.rows = rows
        self.sampler = sampler

    @torch.inference_mode()
    def launch(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> LaunchedStep:
        """Start the step; ``sequences`` holds every sequence that the plan names."""
        own = tuple(sequences[row.request_id, row.sample] for row in plan.rows)
        self.rows.update(plan, sequences)
        batch = self.rows.step_batch(plan, sequences)
        hidden = self.decoder.forward(batch.decoder, self.caches)
        if not len(batch.sample_index):
            return LaunchedStep(plan=plan, sequences=own, sampled=None)
        sampled = self.sampler(hidden[batch.sample_index], batch.sampling)
        self.rows.store(batch, sampled.token_ids, sampled.faulty)
        return LaunchedStep(plan=plan, sequences=own, sampled=sampled)
