"""The runs of the case rescore: a token has one logprob, decoded, prefilled or scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pagedctl.engine.request import Request
from pagedctl.verify.case_legs import Subject
from pagedctl.verify.legs import Leg, Probe

PLACES = 2
"""Tokens of each request that are drawn again behind a prefill."""


def rescore_legs(subject: Subject) -> Iterator[Leg]:
    """Draw some tokens again behind a prefill of all before them; score whole sequences."""
    subject.reference.prepare(subject.requests)
    rows = subject.rows()
    prefilled = [probe for one in subject.requests for probe in _prefilled(subject, one)]
    options = {"max_num_seqs": rows, "prefix_cache": False}
    if prefilled:
        yield Leg(name="prefill of k + 1", probes=tuple(prefilled), options=options)
    if subject.config.contract["logprob_basis"] == "processed":
        return  # given tokens have no logprobs of it
    whole = tuple(_whole(subject, one) for one in subject.requests)
    yield Leg(name="score", probes=whole, options={"max_num_seqs": rows}, scores=True)
    chunks = {"max_num_seqs": subject.rows(9), "chunk_size": 7}
    yield Leg(name="score in chunks of 7", probes=whole, options=chunks, scores=True)


def _prefilled(subject: Subject, request: Request) -> Iterator[Probe]:
    """Requests for one token behind the first k of the answer, for a few k."""
    (answer,) = subject.reference.answers(request)
    ids = tuple(answer.token_ids.tolist())
    random = subject.maker.random(f"rescore {request.id}")
    for k in random.sample(range(1, len(ids)), min(PLACES, len(ids) - 1)):
        shorter = replace(
            request,
            id=f"{request.id} after {k}",
            prompt_token_ids=request.prompt_token_ids + ids[:k],
            params=replace(request.params, max_tokens=1),
        )
        yield Probe(request=shorter, of=request, first=k, end=k + 1)


def _whole(subject: Subject, request: Request) -> Probe:
    """The request's prompt and answer, to be scored."""
    (answer,) = subject.reference.answers(request)
    ids = request.prompt_token_ids + tuple(answer.token_ids.tolist())
    return Probe(request=replace(request, prompt_token_ids=ids), of=request)
