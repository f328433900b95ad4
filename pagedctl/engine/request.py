"""What goes into the engine and what comes out: flat, frozen data. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagedctl.errors import Fault

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
class TopLogprobs:
    """The K likeliest tokens at each of N output positions, ties to the lowest id.

    ``token_ids`` int32[N, K] and ``logprobs`` float32[N, K], the likeliest first.
    """

    token_ids: Ids
    logprobs: Floats


@dataclass(frozen=True, kw_only=True)
class RequestFailure:
    """Why a request has no complete answer; ``kind`` as in an error line, e.g. non_finite."""

    kind: str
    what: str
    where: str
    rule: str
    remedy: str

    @property
    def fault(self) -> Fault:
        """The same without its kind, for an error that holds several."""
        return Fault(what=self.what, where=self.where, rule=self.rule, remedy=self.remedy)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample of one request.

    ``token_ids`` int32[N] and ``logprobs`` float32[N] have equal length always; a sampled stop
    token is in both. ``text`` is cut at a stop text and has none of a stop token; None without
    a tokenizer. ``stop_reason`` is the stop token's id, the stop text, or None. ``seed`` is the
    one used. ``cached_tokens`` are the tokens whose keys and values were found in the prefix
    cache when the sample was first admitted. ``prompt_logprobs`` float32[len(prompt) - 1] and
    ``top_logprobs`` are None unless asked for. A request that failed mid-run has ``error`` set,
    ``finish_reason`` None, and keeps the tokens that were committed before.
    """

    id: RequestId
    sample: int
    group: RequestId
    prompt_token_ids: Ids
    token_ids: Ids
    logprobs: Floats
    logprob_basis: str
    text: str | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    temperature: float
    seed: int
    weight_version_first: int
    weight_version_last: int
    cached_tokens: int
    preemptions: int
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: Floats | None = None
    metadata: Mapping[str, object] | None = None
    error: RequestFailure | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """A sequence whose tokens are to be scored: those from index ``start`` on.

    ``id`` and ``sample`` are echoed. ``temperature`` 0 scores as 1 does.

    Example: ``ScoreRequest(id="q17", token_ids=(785, 6722, 315, 9), start=3)`` asks for the
    logprob of token 9 given the three before it.
    """

    id: RequestId
    token_ids: tuple[int, ...]
    start: int = 1
    temperature: float = 1.0
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The logprobs of a given sequence: ``logprobs[i]`` float32 is that of ``token_ids[start + i]``
    given all tokens before it.

    With ``error`` set, ``logprobs`` is empty.
    """

    id: RequestId
    sample: int
    start: int
    temperature: float
    logprob_basis: str
    logprobs: Floats
    weight_version_first: int
    weight_version_last: int
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
    """Counters since the engine was built, and its present load.

    ``free_blocks`` can be handed out; those of them that still hold a cached prefix are in
    ``cached_blocks`` too. ``prefix_hit_tokens`` were not computed because their blocks were
    found, at first admissions and after preemptions.
    """

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    steps: int
    forward_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    output_tokens: int
