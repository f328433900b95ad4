"""What a run of completions amounts to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedctl.cli.completion_tally import Tally
from pagedctl.engine.request import Completion, Request, RequestFailure, SamplingParams
from pagedctl.errors import RequestError


def completion(request_id: int, length: int, **changes: Any) -> Completion:
    plain: dict[str, Any] = {
        "id": request_id,
        "sample": 0,
        "group": request_id,
        "prompt_token_ids": np.zeros(3, dtype=np.int32),
        "token_ids": np.zeros(length, dtype=np.int32),
        "logprobs": np.zeros(length, dtype=np.float32),
        "logprob_basis": "scaled",
        "finish_reason": "stop",
        "stop_reason": 2,
        "temperature": 1.0,
        "seed": 0,
        "weight_version_first": 0,
        "weight_version_last": 0,
        "cached_tokens": 0,
        "preemptions": 0,
    }
    return Completion(**{**plain, **changes})


def test_the_last_line_counts_what_ran() -> None:
    tally = Tally()
    for request_id in range(256):
        tally.ask(Request(id=request_id, prompt_token_ids=(1, 2, 3)))
        stopped = request_id < 201
        reason = "stop" if stopped else "length"
        tally.finish(completion(request_id, 500, finish_reason=reason))
    tally.wall_s = 41.2
    assert tally.summary(None) == (
        "256 requests x 1 · 128,000 tokens · 41.2 s · 3,107 output tokens/s · "
        "stop 201 length 55 abort 0 · prefix hits 0 · preemptions 0"
    )
    metrics = tally.metrics(None, end_to_end_s=50.0)
    assert metrics["requests_completed"] == 256
    assert metrics["prompt_tokens"] == 768
    assert metrics["total_tokens_per_s"] == pytest.approx((128_000 + 768) / 41.2)
    assert metrics["tokens_per_s_end_to_end"] == 2560.0
    assert tally.problems() is None


def test_the_last_line_counts_what_went_wrong() -> None:
    tally = Tally()
    tally.ask(Request(id=0, prompt_token_ids=(1,), params=SamplingParams(n=2)))
    tally.ask(Request(id=1, prompt_token_ids=(1,)))
    failure = RequestFailure(kind="non_finite", what="NaN", where="x", rule="r", remedy="m")
    for sample in range(2):
        tally.finish(completion(0, 2, sample=sample, finish_reason=None, error=failure))
    tally.finish(completion(1, 3))
    tally.refuse()
    tally.refuse(RequestError("late", where="x", rule="r", remedy="m"))
    assert tally.summary(None).endswith("· failed 1 · refused 2")
    problems = tally.problems()
    assert problems is not None
    assert [fault.what for fault in problems.faults] == ["late", "NaN"]
    metrics = tally.metrics(None, end_to_end_s=1.0)
    assert (metrics["len_p50"], metrics["len_max"]) == (2, 3)
    assert (metrics["requests_completed"], metrics["requests_failed"]) == (1, 1)
