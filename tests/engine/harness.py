"""Runs an engine over requests and records what its sampler saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request
from tests.reference.tiny_models import TinyModel

Key = tuple[int | str, int]


def tiny_engine(
    model: TinyModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    run_seed: int = 0,
    **options: Any,
) -> Engine:
    """An engine over a tiny model; the pool defaults to a few thousand tokens."""
    name = "auto" if dtype == torch.float64 else str(dtype).removeprefix("torch.")
    chosen = {"kv_cache_memory_bytes": 4 << 20, "dtype": name, **options}
    config = EngineConfig(model=model.write_config(folder), **chosen)
    return Engine(config, weights=model.tensors(dtype), run_seed=run_seed)


@dataclass(kw_only=True)
class Trace:
    """What one run did: completions, every sampled row of logits, and what was exercised."""

    completions: dict[Key, Completion] = field(default_factory=dict)
    logits: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    chunk_splits: int = 0
    max_rows: int = 0
    preemptions: int = 0
    overshoots: int = 0
    steps: int = 0


@contextmanager
def captured_logits(engine: Engine, rows: list[torch.Tensor]) -> Iterator[None]:
    """Collect the logits that the sampler draws from, one tensor A[R, V] per step."""
    decoder = engine.parts.runner.decoder
    plain: Callable[[torch.Tensor], torch.Tensor] = decoder.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        rows.append(logits.clone())
        return logits

    decoder.logits = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        decoder.logits = plain  # type: ignore[method-assign]


def run(
    engine: Engine, requests: Iterable[Request], *, arrivals: Mapping[int, int] | None = None
) -> Trace:
    """Drive *engine* until all requests are done; audit the books after every step.

    ``arrivals`` maps a request's place in the list to the step at which it is submitted
    (default: at the start).
    """
    asked = list(requests)
    pending = sorted(range(len(asked)), key=lambda place: (arrivals or {}).get(place, 0))
    trace = Trace()
    captured: list[torch.Tensor] = []
    scheduler = engine.parts.scheduler
    plain_schedule = scheduler.schedule
    sampled_keys: list[list[Key]] = []

    def watched_schedule() -> Any:
        plan = plain_schedule()
        keys = [(row.request_id, row.sample) for row in plan.rows for _ in row.sample_offsets]
        if keys:
            sampled_keys.append(keys)
        trace.chunk_splits += sum(1 for row in plan.rows if not row.sample_offsets)
        trace.max_rows = max(trace.max_rows, len(plan.rows))
        return plan

    scheduler.schedule = watched_schedule  # type: ignore[method-assign]
    before = engine.stats().preemptions
    with captured_logits(engine, captured):
        while pending or engine.has_unfinished():
            while pending and (arrivals or {}).get(pending[0], 0) <= trace.steps:
                engine.submit(asked[pending.pop(0)])
            for done in engine.step():
                trace.completions[done.id, done.sample] = done
            scheduler.audit()
            trace.steps += 1
    scheduler.schedule = plain_schedule  # type: ignore[method-assign]
    for keys, logits in zip(sampled_keys, captured, strict=True):
        for key, row in zip(keys, logits, strict=True):
            trace.logits[key].append(row)
    trace.preemptions = engine.stats().preemptions - before
    trace.overshoots = sum(
        len(rows) - len(trace.completions[key].token_ids) for key, rows in trace.logits.items()
    )
    assert engine.stats().free_blocks == engine.capacity().kv_blocks
    return trace


def assert_same_bits(one: Completion, other: Completion) -> None:
    """Ids and float32 logprobs are equal bit for bit."""
    assert torch.equal(torch.from_numpy(one.token_ids), torch.from_numpy(other.token_ids))
    bits, other_bits = one.logprobs.view("int32"), other.logprobs.view("int32")
    assert torch.equal(torch.from_numpy(bits), torch.from_numpy(other_bits))
    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
