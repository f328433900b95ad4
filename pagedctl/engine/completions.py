"""From a request to its sequences, and from a finished sequence to its completion. No torch."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pagedctl.engine.request import Completion, Request, RequestFailure
from pagedctl.engine.sequence import Sequence
from pagedctl.numerics.random_stream import derive_seed, sample_seed


def sequences_of(
    request: Request, *, run_seed: int, max_model_len: int, eos_token_ids: Iterable[int]
) -> list[Sequence]:
    """One sequence per sample, each with its own stream.

    ``max_tokens`` beyond max_model_len is cut there. With ``ignore_eos`` the model's end tokens
    do not stop a sequence; the request's own ``stop_token_ids`` still do.
    """
    params, prompt = request.params, list(request.prompt_token_ids)
    seed = derive_seed(run_seed, request.id) if params.seed is None else params.seed
    eos = () if params.ignore_eos else eos_token_ids
    return [
        Sequence(
            request=request,
            sample=sample,
            seed=sample_seed(seed, sample),
            max_len=longest_sample(request, max_model_len),
            stop_token_ids=frozenset((*eos, *params.stop_token_ids)),
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
        )
        for sample in range(params.n)
    ]


def longest_sample(request: Request, max_model_len: int) -> int:
    """Most tokens, prompt and output, that a sample of *request* can have."""
    if request.params.max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + request.params.max_tokens, max_model_len)


def completion_of(sequence: Sequence, logprob_basis: str) -> Completion:
    """The flat result of a finished, failed or cancelled sequence."""
    request = sequence.request
    token_ids = np.array(sequence.committed_tokens(), dtype=np.int32)
    logprobs = np.array(sequence.logprobs, dtype=np.float32)
    if len(token_ids) != len(logprobs):
        raise RuntimeError(f"{request.id}: {len(token_ids)} tokens, {len(logprobs)} logprobs")
    first = sequence.weight_version_first
    return Completion(
        id=request.id,
        sample=sequence.sample,
        group=request.id if request.group is None else request.group,
        prompt_token_ids=np.array(request.prompt_token_ids, dtype=np.int32),
        token_ids=token_ids,
        logprobs=logprobs,
        logprob_basis=logprob_basis,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        temperature=request.params.temperature,
        seed=sequence.seed,
        weight_version_first=sequence.weight_version_last if first is None else first,
        weight_version_last=sequence.weight_version_last,
        cached_tokens=0,
        preemptions=sequence.num_preemptions,
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
