"""Mutants of single ops of a built engine: one site, one layer, a last bit moved.

Each is put beneath whatever else watches the plans, and counts how often it changed something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedctl.engine.batch_rows import BatchRows, StepBatch
from pagedctl.engine.engine import Engine

Change = Callable[[Any], Any]


@dataclass
class Reached:
    """How often a mutant changed something."""

    count: int = 0


def nudged(result: Any) -> Any:
    """Every value one float further; of a pair the first alone."""
    if isinstance(result, tuple):
        return (nudged(result[0]), *result[1:])
    return torch.nextafter(result, torch.full_like(result, torch.inf))


def next_token(result: Any) -> Any:
    return replace(result, token_ids=(result.token_ids + 1) % 5)


class Mutated:
    """A leaf's ``run`` whose calls are changed in turn *turn* of every *turns*, else sound."""

    def __init__(self, run: Any, change: Change, turn: int, turns: int, reached: Reached) -> None:
        self._run, self._change = run, change
        self._turn, self._turns, self._calls = turn, turns, 0
        self._reached = reached

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self._run(*arguments, **named)
        self._calls += 1
        if (self._calls - 1) % self._turns != self._turn:
            return result
        self._reached.count += 1
        return self._change(result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


@contextmanager
def plan_mutated(
    engine: Engine, name: str, *, turn: int = 0, turns: int = 1, change: Change = nudged
) -> Iterator[Reached]:
    """The plan *name* of *engine* changed; a dictionary of plans in every entry."""
    decoder, sampler = engine.parts.runner.decoder, engine.parts.runner.sampler
    sound, reached = decoder.plans, Reached()
    value = getattr(sound, name)

    def mutated(plan: Any) -> Any:
        return replace(plan, run=Mutated(plan.run, change, turn, turns, reached))

    put = (
        {key: mutated(one) for key, one in value.items()} if name == "attention" else mutated(value)
    )
    decoder.plans = sampler.plans = replace(sound, **{name: put})
    try:
        yield reached
    finally:
        decoder.plans = sampler.plans = sound


@contextmanager
def method_mutated(
    target: Any, name: str, replacement: Callable[[Any, Reached], Any]
) -> Iterator[Reached]:
    """``target.name`` is what *replacement* makes of it."""
    reached, original = Reached(), getattr(target, name)
    setattr(target, name, replacement(original, reached))
    try:
        yield reached
    finally:
        setattr(target, name, original)


def batch_mutated(change: Callable[[StepBatch], StepBatch]) -> Any:
    """Every step's tensors changed on their way to the model."""

    def replacement(original: Any, reached: Reached) -> Any:
        def step_batch(self: BatchRows, plan: Any, sequences: Any) -> StepBatch:
            reached.count += 1
            return change(original(self, plan, sequences))

        return step_batch

    return method_mutated(BatchRows, "step_batch", replacement)


def with_decoder(batch: StepBatch, **values: Any) -> StepBatch:
    return replace(batch, decoder=replace(batch.decoder, **values))


def with_sampling(batch: StepBatch, **values: Any) -> StepBatch:
    return replace(batch, sampling=replace(batch.sampling, **values))


def other_first_block(batch: StepBatch) -> StepBatch:
    """The first block of each row's table is its neighbour's."""
    tables = batch.decoder.metadata.block_tables.copy()
    tables[:, 0] = tables[[*range(1, len(tables)), 0], 0]
    return with_decoder(batch, metadata=replace(batch.decoder.metadata, block_tables=tables))
