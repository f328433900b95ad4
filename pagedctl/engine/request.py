"""What goes into the engine and what comes out: flat, frozen data. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int32]
    Floats = NDArray[np.float32]

RequestId = int | str
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request is sampled; names, meanings and defaults are those of the request line.

    ``seed`` None: derived from the run seed and the request's id. ``max_tokens`` None: up to
    max_model_len.

    Example: ``SamplingParams(n=4, max_tokens=512, temperature=1.0, top_p=0.95, seed=7)``.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to sample from.

    ``id`` names the random stream and is unique among live requests. ``group`` (default: the
    id) is echoed, so that samples of one prompt can be reported together. ``metadata`` is
    echoed untouched.

    Example: ``Request(id="q17", prompt_token_ids=(785, 6722, 315))``.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    group: RequestId | None = None
    cache_salt: str | None = None
    metadata: Mapping[str, object] | None = None


@dataclass(frozen=True, kw_only=True)
class RequestFailure:
    """Why a request has no complete answer; ``kind`` as in an error line, e.g. non_finite."""

    kind: str
    what: str
    where: str
    rule: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample of one request.

    ``token_ids`` int32[N] and ``logprobs`` float32[N] have equal length always; a sampled stop
    token is in both. ``stop_reason`` is the stop token's id, or None. ``seed`` is the one used.
    A request that failed mid-run has ``error`` set, ``finish_reason`` None, and keeps the
    tokens that were committed before.
    """

    id: RequestId
    sample: int
    group: RequestId
    prompt_token_ids: Ids
    token_ids: Ids
    logprobs: Floats
    logprob_basis: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    temperature: float
    seed: int
    weight_version_first: int
    weight_version_last: int
    cached_tokens: int
    preemptions: int
    metadata: Mapping[str, object] | None = None
    error: RequestFailure | None = None


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The KV pool of one rank: usable blocks, the tokens they hold, and the terms in bytes."""

    kv_tokens: int
    kv_blocks: int
    max_concurrency_at_cap: float
    terms: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counters since the engine was built, and its present load."""

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    steps: int
    forward_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    output_tokens: int
