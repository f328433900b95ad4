"""The runs of the case sampled: every way to draw and to report, in two packings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pagedctl.engine.request import Request
from pagedctl.verify.case_legs import CUT_TOKENS, Subject, plain
from pagedctl.verify.legs import Leg, Probe

SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 12},
    {"temperature": 1.0, "min_p": 0.05, "top_logprobs": 2},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.8, "top_logprobs": 4},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.7},
    {"temperature": 0.0, "frequency_penalty": -0.6, "top_logprobs": 3},
    {"temperature": 0.9, "n": 2, "prompt_logprobs": True},
    {"temperature": 0.0, "prompt_logprobs": True},
    {"temperature": 1.0, "seed": None},
    {"temperature": 0.8, "n": 2, "seed": None},
)
OF_EACH = 2
ROWS_UNSEEDED = 17
PACKINGS: tuple[tuple[str, int, Mapping[str, object]], ...] = (
    ("33 rows", 33, {}),
    ("65 rows, chunks of 5, lag 1", 65, {"chunk_size": 5, "lag": 1}),
)


def sampled_requests(subject: Subject) -> list[Request]:
    """Two prompts for each way to sample; a prompt has no logprobs of basis ``processed``."""
    random = subject.maker.random("sampled")
    processed = subject.config.contract["logprob_basis"] == "processed"
    tokens = min(subject.maker.max_tokens, CUT_TOKENS)
    found = []
    for place in range(OF_EACH * len(SAMPLINGS)):
        sampling = dict(SAMPLINGS[place % len(SAMPLINGS)])
        if processed:
            sampling.pop("prompt_logprobs", None)
        if "top_logprobs" in sampling:
            sampling["top_logprobs"] = min(sampling["top_logprobs"], subject.vocab_size)
        ids = subject.maker.prompt(random)
        params = subject.maker.params(place, max_tokens=tokens, **sampling)
        found.append(Request(id=f"sampled {place}", prompt_token_ids=ids, params=params))
    return found


def sampled_legs(subject: Subject) -> Iterator[Leg]:
    """All of them at once, twice, with other mates, rows, chunks and lag."""
    probes = plain(sampled_requests(subject))
    for name, number, options in PACKINGS:
        rows = subject.rows(number)
        yield _leg(subject, name, probes, rows, options)


def unseeded_leg(subject: Subject) -> Leg:
    """Those that have no seed of their own."""
    requests = [one for one in sampled_requests(subject) if one.params.seed is None]
    rows = subject.rows(ROWS_UNSEEDED)
    return _leg(subject, "without seeds", plain(requests), rows, {})


def _leg(
    subject: Subject, name: str, probes: tuple[Probe, ...], rows: int, options: Mapping[str, object]
) -> Leg:
    return Leg(
        name=name,
        probes=probes,
        fillers=subject.mates(name, len(probes), rows),
        options={"max_num_seqs": rows, **options},
        arrivals=subject.arrivals,
    )
