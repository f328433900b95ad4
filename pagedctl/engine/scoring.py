"""Teacher-forced scores: from a given sequence to what is scheduled, and to its result.

A score is a sequence whose tokens are all known: steps compute it in chunks like any prompt and
score positions instead of sampling at the end. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Series

import numpy as np

from pagedctl.config.kinds import Number
from pagedctl.engine.completions import SamplingContext
from pagedctl.engine.params_check import check_token_ids, of_kind
from pagedctl.engine.prefix_index import root_key
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.request import (
    Request,
    RequestFailure,
    SamplingParams,
    ScoreRequest,
    Scores,
)
from pagedctl.engine.request_check import check_id
from pagedctl.engine.request_faults import BrokenField, RequestFaults, plain, spelled
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.engine.sequence import Sequence

TEMPERATURE = Number(minimum=1e-12, maximum=1e6, or_zero=True)


def score_requests(
    sequences: Series[Series[int]], start: int | Series[int], temperature: float
) -> list[ScoreRequest]:
    """One request for each of *sequences*, named by its place.

    Raises RequestError if *start* is neither one number nor one for each sequence.
    """
    starts = plain(start)
    if not isinstance(starts, list | tuple):
        starts = [starts] * len(sequences)
    if len(starts) != len(sequences):
        faults = RequestFaults("score")
        what = f"{len(starts)} starts are given for {len(sequences)} sequences"
        faults.add("start", BrokenField(what, rule="one start for all, or one for each sequence"))
        raise faults.error()
    return [
        ScoreRequest(id=place, token_ids=ids, start=first, temperature=temperature)  # type: ignore[arg-type]
        for place, (ids, first) in enumerate(zip(sequences, starts, strict=True))
    ]


def check_score_request(request: ScoreRequest, limits: RequestLimits) -> ScoreRequest:
    """*request* with every value in its own type; RequestError with all its faults."""
    faults = RequestFaults(f"score {spelled(request.id)}")
    ids: tuple[int, ...] = ()
    with faults.collecting("id"):
        check_id("id", request.id)
    with faults.collecting("token_ids"):
        ids = check_token_ids(
            "token_ids", request.token_ids, limits.input_vocab_size, "input vocabulary"
        )
        _check_length(ids, limits)
        with faults.collecting("start"):
            _check_start(request.start, len(ids))
    with faults.collecting("temperature"):
        of_kind("temperature", plain(request.temperature), TEMPERATURE)
    if faults:
        raise faults.error()
    return ScoreRequest(
        id=request.id,
        sample=request.sample,
        token_ids=ids,
        start=int(request.start),
        temperature=float(request.temperature),
    )


def score_sequence(request: ScoreRequest, key: int, context: SamplingContext) -> Sequence:
    """What is scheduled for *request*; *key* stands for its id, which need not be unique."""
    tokens = list(request.token_ids)
    params = SamplingParams(temperature=request.temperature)
    return Sequence(
        request=Request(id=key, prompt_token_ids=request.token_ids, params=params),
        sample=0,
        seed=0,
        max_len=len(tokens),
        stop_token_ids=frozenset(),
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        root_key=root_key(context.arithmetic_id, None),
        prompt_scores=PromptScores(start=request.start, end=len(tokens)),
    )


def scores_of(request: ScoreRequest, sequence: Sequence, context: SamplingContext) -> Scores:
    """The result of a finished or failed *sequence*."""
    scores, failed = sequence.prompt_scores, sequence.failure is not None
    assert scores is not None
    return Scores(
        id=request.id,
        sample=request.sample,
        start=request.start,
        temperature=request.temperature,
        logprob_basis=context.logprob_basis,
        logprobs=np.zeros(0, dtype=np.float32) if failed else scores.values(),
        weight_version_first=sequence.weight_version_last,
        weight_version_last=sequence.weight_version_last,
        error=_failure(request) if failed else None,
    )


def _failure(request: ScoreRequest) -> RequestFailure:
    """Why a sequence whose logits were not finite has no scores."""
    return RequestFailure(
        kind="non_finite",
        what="the logits held NaN or +infinity, or no finite value",
        where=f"score {spelled(request.id)}, sample {request.sample}",
        rule="a token is scored by finite logits only",
        remedy="check the weights and the dtype; other sequences were not affected",
    )


def _check_length(ids: tuple[int, ...], limits: RequestLimits) -> None:
    if not ids:
        raise BrokenField(
            "token_ids is empty",
            rule="a sequence has at least one token",
            remedy="give at least one token",
            kind="empty_prompt",
        )
    if len(ids) > limits.max_model_len:
        raise limits.too_long(f"the sequence has {len(ids)} tokens", len(ids) - 1)


def _check_start(start: object, length: int) -> None:
    value = plain(start)
    if type(value) is not int or not 1 <= value <= length:
        raise BrokenField(
            f"start {spelled(value)} is out of range",
            rule=f"1 <= start <= {length}, the number of tokens: nothing stands before token 0",
        )
