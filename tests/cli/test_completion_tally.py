"""What a run of completions amounts to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedctl.cli.completion_tally import Tally
from pagedctl.engine.completed_lines import CompletedLines, OpenRequest
from pagedctl.engine.request import (
    Completion,
    Request,
    RequestFailure,
    SamplingParams,
    Stats,
)
from pagedctl.errors import RequestError


def asked(
    request_id: int, *, prompt: int = 3, n: int = 1, samples: tuple[int, ...] | None = None
) -> OpenRequest:
    params = SamplingParams(n=n)
    request = Request(id=request_id, prompt_token_ids=(1,) * prompt, params=params)
    return OpenRequest(request=request, samples=range(n) if samples is None else samples)


def completion(request_id: int, length: int, **changes: Any) -> Completion:
    plain: dict[str, Any] = {
        "id": request_id,
        "sample": 0,
        "group": request_id,
        "prompt_token_ids": np.zeros(3, dtype=np.int32),
        "token_ids": np.zeros(length, dtype=np.int32),
        "logprobs": np.zeros(length, dtype=np.float32),
        "logprob_basis": "scaled",
        "text": None,
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
        tally.ask(asked(request_id))
        stopped = request_id < 201
        reason = "stop" if stopped else "length"
        tally.finish(completion(request_id, 500, finish_reason=reason))
    tally.wall_s = 41.2
    assert tally.summary(None) == (
        "256 requests x 1 · 128,000 tokens · 41.2 s · 3,107 output tokens/s · "
        "stop 201 length 55 abort 0 · prefix hits 0 · preemptions 0"
    )
    metrics = tally.metrics(None, None, end_to_end_s=50.0)
    assert metrics["requests_completed"] == 256
    assert metrics["prompt_tokens"] == 768
    assert metrics["total_tokens_per_s"] == pytest.approx((128_000 + 768) / 41.2)
    assert metrics["tokens_per_s_end_to_end"] == 2560.0
    assert tally.problems() is None


def test_the_last_line_counts_what_went_wrong() -> None:
    tally = Tally()
    tally.ask(asked(0, prompt=1, n=2))
    tally.ask(asked(1, prompt=1))
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
    metrics = tally.metrics(None, None, end_to_end_s=1.0)
    assert (metrics["len_p50"], metrics["len_max"]) == (2, 3)
    assert (metrics["requests_completed"], metrics["requests_failed"]) == (1, 1)


def test_a_run_that_was_cut_short_counts_what_is_whole() -> None:
    """Two of three samples of request 0 are done, request 1 is, request 2 only waited."""
    tally = Tally()
    for request_id, n in ((0, 3), (1, 1), (2, 1)):
        tally.ask(asked(request_id, prompt=2, n=n))
    for request_id, sample in ((0, 0), (0, 1), (1, 0)):
        tally.finish(completion(request_id, 10, sample=sample))
    tally.wall_s = 2.0
    stats = Stats(
        running=1,
        waiting=1,
        free_blocks=0,
        cached_blocks=0,
        steps=20,
        forward_tokens=40,
        prefix_hit_tokens=0,
        preemptions=0,
        output_tokens=34,
    )
    metrics = tally.metrics(stats, None, end_to_end_s=4.0)
    assert metrics["requests_completed"] == 1
    assert metrics["requests_per_s"] == 0.5
    assert metrics["prompt_tokens"] == 2
    assert (metrics["output_tokens"], metrics["output_tokens_unfinished"]) == (34, 4)
    assert metrics["output_tokens_per_s"] == 17.0
    assert metrics["total_tokens_per_s"] is None
    assert tally.summary(stats).startswith("3 requests x 1..3 · 34 tokens · ")


def test_a_part_counts_its_own_work_and_the_lines_before_it() -> None:
    """Two of request 0's three samples are kept, one of them failed; request 1 is new."""
    kept = CompletedLines(
        num_lines=3,
        num_errors=2,
        samples={0: frozenset({0, 1})},
        failed=frozenset({0}),
        refusals={None: 1},
    )
    tally = Tally(kept)
    tally.ask(asked(0, n=3, samples=(2,)))
    tally.ask(asked(1, prompt=5, n=2))
    tally.finish(completion(0, 10, sample=2))
    for sample in range(2):
        tally.finish(completion(1, 20, sample=sample))
    tally.wall_s = 2.0
    metrics = tally.metrics(None, None, end_to_end_s=4.0)
    assert (metrics["lines_kept"], metrics["error_lines_kept"]) == (3, 2)
    assert (metrics["requests_completed"], metrics["prompt_tokens"]) == (1, 5)
    assert (metrics["requests_failed"], metrics["requests_refused"]) == (0, 0)
    assert (metrics["output_tokens"], metrics["output_tokens_per_s"]) == (50, 25.0)
    assert tally.summary(None).startswith("2 requests x 1..2 · 50 tokens · ")
    assert tally.summary(None).endswith("· kept 3 lines, 2 errors among them")
    assert tally.has_errors


@pytest.mark.parametrize("kept", [CompletedLines(), CompletedLines(num_lines=2)])
def test_a_whole_answer_has_no_errors_in_any_part(kept: CompletedLines) -> None:
    tally = Tally(kept)
    tally.ask(asked(0))
    tally.finish(completion(0, 1))
    assert not tally.has_errors
    tally.refuse()
    assert tally.has_errors


def test_generate_has_the_keys_of_a_bench() -> None:
    metrics = Tally().metrics(None, None, end_to_end_s=0.0)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "peak_device_mib", "kv_tokens"):
        assert metrics[name] is None
