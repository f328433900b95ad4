"""Completion lines: one JSON line per sample, and error lines. No torch."""

from __future__ import annotations

from dataclasses import asdict

from pagedctl.engine.request import Completion, RequestId, TopLogprobs
from pagedctl.errors import RequestError
from pagedctl.manifest import strict_json


def completion_line(completion: Completion) -> bytes:
    """The line of one sample, line end included.

    float32 logprobs have the fewest digits that read back to the same bits. A request that
    failed mid-run has ``error`` beside the tokens that were committed.
    """
    line: dict[str, object] = {
        "id": completion.id,
        "sample": completion.sample,
        "group": completion.group,
        "prompt_token_ids": completion.prompt_token_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "logprob_basis": completion.logprob_basis,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "temperature": completion.temperature,
        "seed": completion.seed,
        "weight_version_first": completion.weight_version_first,
        "weight_version_last": completion.weight_version_last,
        "cached_tokens": completion.cached_tokens,
        "preemptions": completion.preemptions,
        "metadata": completion.metadata,
    }
    if completion.top_logprobs is not None:
        line["top_logprobs"] = _pairs(completion.top_logprobs)
    if completion.prompt_logprobs is not None:
        line["prompt_logprobs"] = completion.prompt_logprobs
    if completion.error is not None:
        line["error"] = asdict(completion.error)
    return strict_json.dumps(line) + b"\n"


def _pairs(top: TopLogprobs) -> list[list[list[object]]]:
    """[[[id, logprob], ...] per token]."""
    return [
        [[int(token), logprob] for token, logprob in zip(ids, logprobs, strict=True)]
        for ids, logprobs in zip(top.token_ids, top.logprobs, strict=True)
    ]


def refusal_line(request_id: RequestId | None, error: RequestError) -> bytes:
    """The line of a request that was refused, with all its faults if there are several."""
    problem = {"kind": error.kind, **error.as_dict()}
    return strict_json.dumps({"id": request_id, "sample": 0, "error": problem}) + b"\n"
