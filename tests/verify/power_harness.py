"""Small engines over any registry, and what requests give there alone and together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams
from pagedctl_kernels.registry import Registry
from tests.reference.tiny_models import TinyModel


def engine_over(
    model: TinyModel | None,
    folder: Path,
    *,
    dtype: str = "float32",
    registry: Registry | None = None,
    **options: Any,
) -> Engine:
    """An engine over a tiny model, or over the embedded one, with the leaves of *registry*."""
    given = "auto" if dtype == "float64" else dtype  # no file asks for float64, weights do
    chosen = {"kv_cache_memory_bytes": 4 << 20, "dtype": given, **options}
    if model is None:
        config = EngineConfig(model="embedded", **chosen)
        return Engine(config, registry=registry, needs_record=False)
    config = EngineConfig(model=model.write_config(folder), **chosen)
    weights = model.tensors(getattr(torch, dtype))
    return Engine(config, weights=weights, registry=registry, needs_record=False)


def requests(
    count: int, vocab: int, *, tokens: int = 16, shortest: int = 3, **sampling: Any
) -> list[Request]:
    """Greedy requests and seeded ones at T = 1 in turn, with random prompts of many lengths."""
    rng = np.random.default_rng(7)
    return [
        Request(
            id=number,
            prompt_token_ids=tuple(rng.integers(0, vocab, shortest + number % 7).tolist()),
            params=SamplingParams(
                **{
                    "temperature": float(number % 2),
                    "seed": 1000 + number,
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    **sampling,
                }
            ),
        )
        for number in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How many requests gave other ids, and how many others only other logprobs."""

    other_ids: int
    other_logprobs: int


def alone_against_packed(
    engine: Engine, asked: list[Request], *, probes: int | None = None
) -> Comparison:
    """The first *probes* requests (None: all) by themselves, then among all of *asked*."""
    single = [engine.generate([request])[0] for request in asked[:probes]]
    return compared(single, engine.generate(asked)[: len(single)])


def compared(single: Iterable[Completion], packed: Iterable[Completion]) -> Comparison:
    pairs = list(zip(single, packed, strict=True))
    ids = [one.token_ids.tolist() != other.token_ids.tolist() for one, other in pairs]
    bits = [
        not np.array_equal(one.logprobs.view(np.int32), other.logprobs.view(np.int32))
        for one, other in pairs
    ]
    only = sum(moved and not differ for moved, differ in zip(bits, ids, strict=True))
    return Comparison(other_ids=sum(ids), other_logprobs=only)
