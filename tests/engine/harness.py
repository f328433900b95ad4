"""Runs an engine over requests and records what its sampler saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request
from tests.reference.tiny_models import TinyModel

Key = tuple[int | str, int]
POISON = 97
"""The token whose embedding is not finite in a poisoned engine."""


def tiny_engine(
    model: TinyModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    run_seed: int = 0,
    pool_blocks: int | None = None,
    poisoned: bool = False,
    pieces: Sequence[str] | None = None,
    **options: Any,
) -> Engine:
    """An engine over a tiny model; the pool defaults to a few thousand tokens.

    ``pool_blocks`` is its size in blocks. *poisoned* puts NaN into the embedding of POISON.
    *pieces* are the texts of the token ids, from 0 on, of a tokenizer that joins them.
    """
    name = "auto" if dtype == torch.float64 else str(dtype).removeprefix("torch.")
    chosen = {"kv_cache_memory_bytes": 4 << 20, "dtype": name, **options}
    if pool_blocks is not None:
        size = chosen.get("block_size", 16) * token_bytes(model, dtype)
        chosen["kv_cache_memory_bytes"] = pool_blocks * size
    path = model.write_config(folder)
    if pieces is not None:
        write_tokenizer(folder, pieces)
    weights = model.tensors(dtype)
    if poisoned:
        weights["model.embed_tokens.weight"][POISON] = torch.nan
    return Engine(EngineConfig(model=path, **chosen), weights=weights, run_seed=run_seed)


def token_bytes(model: TinyModel, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    config = model.config
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    return int(2 * config["num_hidden_layers"] * heads * dim * dtype.itemsize)


def write_tokenizer(folder: Path, pieces: Sequence[str]) -> None:
    """A tokenizer.json whose token ids are the places of *pieces* and whose text joins them."""
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=pieces[0]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))


@dataclass(kw_only=True)
class Trace:
    """What one run did: completions, every sampled row of logits, and what was exercised."""

    completions: dict[Key, Completion] = field(default_factory=dict)
    logits: dict[Key, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    chunk_splits: int = 0
    max_rows: int = 0
    preemptions: int = 0
    overshoots: int = 0
    hit_tokens: int = 0
    forward_tokens: int = 0
    steps: int = 0


@contextmanager
def captured_logits(engine: Engine, rows: list[torch.Tensor]) -> Iterator[None]:
    """Collect the logits that the sampler draws from, one tensor A[R, V] per step."""
    sampler = engine.parts.runner.sampler
    plain: Callable[..., Any] = sampler.sample

    def watched(logits: torch.Tensor, *rest: Any) -> Any:
        rows.append(logits.clone())
        return plain(logits, *rest)

    sampler.sample = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        sampler.sample = plain  # type: ignore[method-assign]


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
    before = engine.stats()
    with captured_logits(engine, captured):
        while pending or engine.has_unfinished():
            while pending and (arrivals or {}).get(pending[0], 0) <= trace.steps:
                engine.submit(asked[pending.pop(0)])
            for done in engine.step():
                assert (done.id, done.sample) not in trace.completions
                trace.completions[done.id, done.sample] = done
            scheduler.audit()
            trace.steps += 1
    scheduler.schedule = plain_schedule  # type: ignore[method-assign]
    for keys, logits in zip(sampled_keys, captured, strict=True):
        for key, row in zip(keys, logits, strict=True):
            trace.logits[key].append(row)
    after = engine.stats()
    trace.preemptions = after.preemptions - before.preemptions
    trace.hit_tokens = after.prefix_hit_tokens - before.prefix_hit_tokens
    trace.forward_tokens = after.forward_tokens - before.forward_tokens
    trace.overshoots = sum(
        len(rows) - len(trace.completions[key].token_ids) for key, rows in trace.logits.items()
    )
    assert_all_free(engine)
    return trace


def drain(engine: Engine) -> dict[Key, Completion]:
    """Step until all requests are answered; audit the books after every step."""
    found: dict[Key, Completion] = {}
    while engine.has_unfinished():
        for done in engine.step():
            assert (done.id, done.sample) not in found
            found[done.id, done.sample] = done
        engine.parts.scheduler.audit()
    assert_all_free(engine)
    return found


def assert_all_free(engine: Engine) -> None:
    """Nothing runs, waits, or holds a block."""
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == engine.capacity().kv_blocks


def assert_same_bits(one: Completion, other: Completion) -> None:
    """All that a request is answered with is equal, floats bit for bit."""
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert_same_floats(one.logprobs, other.logprobs)
    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    assert (one.text, one.seed) == (other.text, other.seed)
    assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    if one.prompt_logprobs is not None and other.prompt_logprobs is not None:
        assert_same_floats(one.prompt_logprobs, other.prompt_logprobs)
    assert (one.top_logprobs is None) == (other.top_logprobs is None)
    if one.top_logprobs is not None and other.top_logprobs is not None:
        assert one.top_logprobs.token_ids.tolist() == other.top_logprobs.token_ids.tolist()
        assert_same_floats(one.top_logprobs.logprobs, other.top_logprobs.logprobs)


def assert_same_floats(one: NDArray[np.float32], other: NDArray[np.float32]) -> None:
    """Equal shapes and equal bits of float32."""
    assert one.dtype == other.dtype == np.float32
    assert one.shape == other.shape
    bits, other_bits = one.view(np.int32), other.view(np.int32)
    assert torch.equal(torch.from_numpy(bits), torch.from_numpy(other_bits))


def assert_prefix_bits(part: Completion, whole: Completion) -> None:
    """*part* was cut short: what it has are the first bits of *whole*."""
    count = len(part.token_ids)
    assert len(part.logprobs) == count
    assert part.token_ids.tolist() == whole.token_ids[:count].tolist()
    assert_same_floats(part.logprobs, whole.logprobs[:count])
