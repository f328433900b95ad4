"""From a request to its sequences, and from a finished sequence to its completion. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedctl.engine.prefix_index import extend_keys, root_key
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.request import Completion, Request, RequestFailure, TopLogprobs
from pagedctl.engine.sequence import Sequence, TopTokens
from pagedctl.engine.stop_texts import StopTexts
from pagedctl.numerics.random_stream import derive_seed, sample_seed

if TYPE_CHECKING:
    from pagedctl.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SamplingContext:
    """What an engine adds to a request: its run seed, bounds, end tokens and tokenizer.

    ``arithmetic_id`` names what keys and values are computed by: no other arithmetic shares
    them. ``max_model_len`` is in tokens, prompt and output.
    """

    run_seed: int
    max_model_len: int
    block_size: int
    eos_token_ids: tuple[int, ...]
    arithmetic_id: str
    logprob_basis: str
    tokenizer: Tokenizer | None


def sequences_of(
    request: Request, context: SamplingContext, samples: Iterable[int] | None = None
) -> list[Sequence]:
    """One sequence for each of *samples* (None: all), each with its own stream.

    ``max_tokens`` beyond max_model_len is cut there. With ``ignore_eos`` the model's end tokens
    do not stop a sequence; the request's own ``stop_token_ids`` still do.
    """
    params, prompt = request.params, list(request.prompt_token_ids)
    seed = derive_seed(context.run_seed, request.id) if params.seed is None else params.seed
    eos = () if params.ignore_eos else context.eos_token_ids
    root, keys = root_key(context.arithmetic_id, request.cache_salt), list[bytes]()
    size = context.block_size
    extend_keys(keys, root, prompt, block_size=size, num_blocks=len(prompt) // size)
    scores = PromptScores(start=1, end=len(prompt)) if params.prompt_logprobs else None
    return [
        Sequence(
            request=request,
            sample=sample,
            seed=sample_seed(seed, sample),
            max_len=longest_sample(request, context.max_model_len),
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            root_key=root,
            block_keys=list(keys),
            prompt_scores=scores,
            stop_texts=_stop_texts(request, context.tokenizer),
        )
        for sample in (range(params.n) if samples is None else samples)
    ]


def longest_sample(request: Request, max_model_len: int) -> int:
    """Most tokens, prompt and output, that a sample of *request* can have."""
    if request.params.max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + request.params.max_tokens, max_model_len)


def completion_of(sequence: Sequence, context: SamplingContext) -> Completion:
    """The flat result of a finished, failed or cancelled sequence."""
    request = sequence.request
    token_ids = np.array(sequence.committed_tokens(), dtype=np.int32)
    logprobs = np.array(sequence.logprobs, dtype=np.float32)
    if len(token_ids) != len(logprobs):
        raise RuntimeError(f"{request.id}: {len(token_ids)} tokens, {len(logprobs)} logprobs")
    first = sequence.weight_version_first
    scores = sequence.prompt_scores
    return Completion(
        id=request.id,
        sample=sequence.sample,
        group=request.id if request.group is None else request.group,
        prompt_token_ids=np.array(request.prompt_token_ids, dtype=np.int32),
        token_ids=token_ids,
        logprobs=logprobs,
        logprob_basis=context.logprob_basis,
        text=_text(sequence, context.tokenizer),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        temperature=request.params.temperature,
        seed=sequence.seed,
        weight_version_first=sequence.weight_version_last if first is None else first,
        weight_version_last=sequence.weight_version_last,
        cached_tokens=sequence.cached_tokens or 0,
        preemptions=sequence.num_preemptions,
        top_logprobs=_top_logprobs(sequence.top, request.params.top_logprobs),
        prompt_logprobs=scores.values() if scores is not None and scores.is_complete else None,
        metadata=request.metadata,
        error=sequence.failure,
    )


def non_finite_failure(sequence: Sequence) -> RequestFailure:
    """Why a request whose logits were not finite has no complete answer."""
    position = sequence.num_prompt_tokens + sequence.num_output_tokens
    return RequestFailure(
        kind="non_finite",
        what="the logits held NaN or +infinity, or no finite value",
        where=f"request {sequence.request.id}, sample {sequence.sample}, position {position}",
        rule="a token is sampled from finite logits only",
        remedy="check the weights and the dtype; other requests were not affected",
    )


def _stop_texts(request: Request, tokenizer: Tokenizer | None) -> StopTexts | None:
    params = request.params
    if not params.stop or tokenizer is None:
        return None
    return StopTexts(
        params.stop,
        tokenizer.text_stream(request.prompt_token_ids),
        include_stop=params.include_stop,
        min_tokens=params.min_tokens,
    )


def _text(sequence: Sequence, tokenizer: Tokenizer | None) -> str | None:
    """The text, without that of the stop token unless it was asked for."""
    if sequence.text is not None or tokenizer is None:
        return sequence.text
    token_ids, params = sequence.committed_tokens(), sequence.request.params
    if sequence.stop_texts is not None and not params.include_stop:
        return sequence.stop_texts.finish()
    if isinstance(sequence.stop_reason, int) and not params.include_stop:
        token_ids.pop()
    return tokenizer.completion_text(sequence.request.prompt_token_ids, token_ids)


def _top_logprobs(top: list[TopTokens], count: int) -> TopLogprobs | None:
    if count == 0:
        return None
    ids = np.array([one for one, _ in top], dtype=np.int32)
    logprobs = np.array([one for _, one in top], dtype=np.float32)
    shape = (len(top), count)  # of none too
    return TopLogprobs(token_ids=ids.reshape(shape), logprobs=logprobs.reshape(shape))
