"""The runner: turns a step plan into tensors, runs the model, and hands back what to commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pagedctl.engine.batch_rows import BatchRows
from pagedctl.engine.kv_cache import KVArena
from pagedctl.engine.sampler import Sampled, Sampler
from pagedctl.engine.scheduler import SequenceKey
from pagedctl.engine.sequence import Sequence
from pagedctl.engine.step_plan import StepPlan
from pagedctl.errors import NumericsRefused
from pagedctl.models.decoder import Decoder
from pagedctl_kernels.machine import Machine, settings_drift


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
        self.sampler = sampler

    @torch.inference_mode()
    def launch(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> LaunchedStep:
        """Start the step; ``sequences`` holds every sequence that the plan names."""
        own = tuple(sequences[row.request_id, row.sample] for row in plan.rows)
        self.rows.update(plan, sequences)
        batch = self.rows.step_batch(plan, sequences)
        hidden = self.decoder.forward(batch.decoder, self.caches)
        self.rows.mark_faulty(batch, hidden)
        if not len(batch.sample_index):
            return LaunchedStep(plan=plan, sequences=own, sampled=None)
        drawn = self.sampler(hidden[batch.sample_index], batch.sampling)
        sampled = replace(drawn, faulty=drawn.faulty | self.rows.faulty[batch.sample_rows])
        self.rows.store(batch, sampled.token_ids, sampled.faulty)
        return LaunchedStep(plan=plan, sequences=own, sampled=sampled)

    def require_settings(self) -> None:
        """Raises NumericsRefused if the process's settings no longer keep the contract."""
        drift = settings_drift(self.guarded) if self.guarded is not None else None
        if drift is not None:
            raise NumericsRefused(
                f"the contract cannot be kept: {drift}",
                where="torch settings of this process, changed after the engine was built",
                rule="threads and float32 precision stay as they were when plans were bound",
                remedy="set them before building the engine, or use --numerics fast",
            )
