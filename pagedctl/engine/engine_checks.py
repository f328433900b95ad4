"""What an engine refuses at its surface, and what it adds to every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from pagedctl.config.groups import MAX_SEED
from pagedctl.config.kinds import Broken, Integer
from pagedctl.engine.build import EngineParts
from pagedctl.engine.completions import SamplingContext
from pagedctl.engine.config_checks import CAPPED_BY_POOL
from pagedctl.engine.request import Request, RequestId
from pagedctl.engine.request_faults import BrokenField, RequestFaults, plain, spelled
from pagedctl.engine.request_limits import PoolBound, RequestLimits
from pagedctl.errors import ConfigError, Fault, RequestError

PauseMode = Literal["abort", "wait", "keep"]


def sampling_context(parts: EngineParts, run_seed: int) -> SamplingContext:
    """What the engine of *parts* adds to every request."""
    config = parts.config
    assert config.max_model_len is not None
    return SamplingContext(
        run_seed=_checked_seed(run_seed),
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        eos_token_ids=tuple(parts.spec.eos_token_ids),
        arithmetic_id=parts.plans.arithmetic_id,
        logprob_basis=str(config.contract["logprob_basis"]),
        tokenizer=parts.model.tokenizer,
    )


def request_limits(parts: EngineParts) -> RequestLimits:
    """What bounds the requests of the engine of *parts*."""
    config = parts.config
    capped = config.origins["max_model_len"] == CAPPED_BY_POOL
    pool = PoolBound(num_blocks=parts.arena.num_blocks, block_size=config.block_size)
    return RequestLimits.of(
        parts.spec,
        config.max_model_len,
        has_tokenizer=parts.model.tokenizer is not None,
        logprob_basis=str(config.contract["logprob_basis"]),
        pool=pool if capped else None,
    )


def checked_samples(request: Request, samples: Sequence[int] | None) -> tuple[int, ...]:
    """Sample numbers of *request*, each once; None stands for all."""
    count = request.params.n
    if samples is None:
        return tuple(range(count))
    numbers = tuple(plain(one) for one in samples)
    known = all(type(one) is int and 0 <= one < count for one in numbers)
    if not (numbers and known and len(set(numbers)) == len(numbers)):
        faults = RequestFaults(f"request {spelled(request.id)}")
        what = f"samples {spelled(numbers)} are not some of the request's {count}"
        faults.add(None, BrokenField(what, rule=f"numbers in [0, {count}), each once"))
        raise faults.error()
    return numbers  # type: ignore[return-value]


def checked_mode(mode: str) -> PauseMode:
    """One of the modes of a pause."""
    modes = get_args(PauseMode)
    if mode not in modes:
        raise ConfigError(
            f"mode {mode!r} is not a mode of a pause",
            where="argument mode",
            rule=f"one of {', '.join(modes)}",
            remedy="give one of them",
        )
    return mode  # type: ignore[return-value]


def duplicate_id(request_id: RequestId) -> RequestError:
    """The refusal of an id that a live request has."""
    fault = Fault(
        what=f"the id {request_id!r} is in use",
        where=f"request {request_id}, field id",
        rule='ids are unique among live requests, 5 and "5" being one: they name the stream',
        remedy="give each request its own id",
    )
    return RequestError.of_kind("duplicate_id", [fault])


def no_processed_scores() -> ConfigError:
    """The refusal to score in a basis that exists for sampled tokens only."""
    return ConfigError(
        "given tokens have no logprobs of basis processed",
        where="option logprob_basis",
        rule="scores are scaled or raw: penalties and truncation belong to a sampled token",
        remedy="build the engine with logprob_basis scaled or raw",
    )


def _checked_seed(run_seed: int) -> int:
    seeds = Integer(minimum=0, maximum=MAX_SEED)
    try:
        return seeds.check(run_seed)
    except Broken as broken:
        raise ConfigError(
            f"run_seed {run_seed} {broken.problem}",
            where="argument run_seed",
            rule=broken.rule,
            remedy="give a seed in [0, 2^53)",
        ) from None
