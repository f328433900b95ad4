"""A case is judged by its answers first, then by what it exercised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pagedctl.verify.case_legs import Subject, plain
from pagedctl.verify.case_result import CaseResult
from pagedctl.verify.cases import CASES
from pagedctl.verify.comparison import Answer
from pagedctl.verify.judgement import CaseJudge
from pagedctl.verify.legs import Leg, LegTrace
from tests.verify.invariance_harness import subject


def traced(made: Subject, leg: Leg, rows: int, **counters: int) -> LegTrace:
    """What *leg* gives on an engine without a fault, with these counters."""
    counts = dict.fromkeys(("chunk_splits", "overshoots", "preemptions", "prefix_hit_tokens"), 0)
    return LegTrace(
        answers={(one.request.id, 0): made.reference.expected(one, 0) for one in leg.probes},
        cached_tokens={},
        rows={rows: 8},
        **{**counts, **counters},
    )


def judged(
    made: Subject, case: str, runs: Iterable[tuple[Leg, LegTrace]], wall_s: float = 1.0
) -> CaseResult:
    judge = CaseJudge(CASES[case], made.config, made.reference)
    for leg, trace in runs:
        judge.add(leg, trace)
    return judge.result(wall_s)


def one_ulp(answer: Answer, place: int) -> Answer:
    logprobs = answer.logprobs.copy()
    logprobs[place] = np.nextafter(logprobs[place], np.float32(-9))
    return replace(answer, logprobs=logprobs)


def test_equal_answers_in_enough_rows_hold(tmp_path: Path) -> None:
    with subject(tmp_path, requests=3) as (made, _):
        leg = Leg(name="leg", probes=plain(made.requests), rows=48)
        found = judged(made, "packed", [(leg, traced(made, leg, 48, overshoots=2))])
    assert (found.holds, found.text()) == (True, "equal (2 overshoots)")
    assert (found.runs, found.requests, found.tokens) == (1, 3, 24)
    assert (found.rows_p50, found.rows_max) == (48, 48)


def test_one_ulp_at_one_position_of_one_request_is_a_no(tmp_path: Path) -> None:
    """vllm-project/vllm#32480: equal tokens with other logprobs are not equal."""
    with subject(tmp_path, requests=3) as (made, _):
        leg = Leg(name="leg", probes=plain(made.requests))
        trace = traced(made, leg, 64, overshoots=1)
        answers = dict(trace.answers)
        answers[1, 0] = one_ulp(answers[1, 0], 5)
        found = judged(made, "packed", [(leg, trace), (leg, replace(trace, answers=answers))])
        start = len(made.requests[1].prompt_token_ids)
    assert (found.holds, found.text()) == (False, "1 of 3 requests differ")
    (divergence,) = found.divergences
    assert (divergence.request_id, divergence.sample) == (1, 0)
    assert (divergence.difference.kind, divergence.difference.ulps) == ("logprob", 1)
    assert divergence.difference.position == start + 5


@pytest.mark.parametrize(
    ("case", "counters", "lack"),
    [
        ("chunks", {}, "no prompt was split; give longer prompts"),
        (
            "pools",
            {},
            "no request was preempted; give more --max-tokens, --requests or longer prompts",
        ),
        ("prefix", {}, "no prefix was found; give a larger --kv-cache-memory-bytes"),
        ("chunks", {"chunk_splits": 1}, None),
        ("pools", {"preemptions": 1}, None),
        ("prefix", {"prefix_hit_tokens": 16}, None),
    ],
)
def test_a_counter_of_zero_is_no_power(
    tmp_path: Path, case: str, counters: dict[str, int], lack: str | None
) -> None:
    with subject(tmp_path, requests=2, max_tokens=4) as (made, _):
        leg = Leg(name="leg", probes=plain(made.requests))
        found = judged(made, case, [(leg, traced(made, leg, 9, **counters))])
    assert found.lacks == (() if lack is None else (lack,))
    assert found.holds is (True if lack is None else None)
    assert found.text().startswith("equal" if lack is None else "no verdict")


def test_few_rows_are_told_once_with_the_option_that_helps(tmp_path: Path) -> None:
    """vllm-project/vllm-omni#5512: equal answers without batches are no pass."""
    with subject(tmp_path, requests=2, max_tokens=4, max_num_seqs=20) as (made, _):
        leg = Leg(name="leg", probes=plain(made.requests), rows=17)
        one, some = (traced(made, leg, rows, overshoots=1) for rows in (1, 16))
        assert judged(made, "packed", [(leg, one)]).lacks == (
            "no batches formed; give --max-num-seqs 65 or more",
        )
        assert judged(made, "packed", [(leg, some)]).lacks == (
            "at most 16 rows were resident, fewer than 48; give --max-num-seqs 65 or more",
        )


def test_a_number_of_rows_that_was_not_met_is_told(tmp_path: Path) -> None:
    with subject(tmp_path, requests=2, max_tokens=4, max_num_batched_tokens=63) as (made, _):
        legs = [Leg(name=f"{rows}", probes=plain(made.requests), rows=rows) for rows in (49, 64)]
        runs = [(leg, traced(made, leg, 63, overshoots=1)) for leg in legs]
        found = judged(made, "packed", runs)
    assert found.lacks == (
        "64: at most 63 of 64 rows were resident; give --max-num-batched-tokens 65 or more",
    )


def test_a_leg_that_missed_what_it_needs_is_told(tmp_path: Path) -> None:
    with subject(tmp_path, requests=2, max_tokens=4) as (made, _):
        needing = Leg(name="a", probes=plain(made.requests), needs=("chunk_splits",))
        other = replace(needing, name="b", needs=())
        runs = [
            (needing, traced(made, needing, 9)),
            (other, traced(made, other, 9, chunk_splits=3)),
        ]
        found = judged(made, "chunks", runs)
    assert found.lacks == ("a: no prompt was split; give longer prompts",)


def test_missing_hits_name_the_request(tmp_path: Path) -> None:
    with subject(tmp_path, requests=1, max_tokens=4) as (made, _):
        probe = replace(plain(made.requests)[0], cached_tokens=32)
        leg = Leg(name="ask", probes=(probe,))
        trace = traced(made, leg, 1, prefix_hit_tokens=16)
        found = judged(made, "prefix", [(leg, replace(trace, cached_tokens={(0, 0): 16}))])
    assert found.lacks == (
        "ask: 16 of 32 tokens of request 0 were found in the prefix cache; give a larger "
        "--kv-cache-memory-bytes",
    )


def test_a_divergence_outweighs_a_lack(tmp_path: Path) -> None:
    with subject(tmp_path, requests=2, max_tokens=4) as (made, _):
        leg = Leg(name="leg", probes=plain(made.requests))
        trace = traced(made, leg, 1)
        answers = {**trace.answers, (0, 0): one_ulp(trace.answers[0, 0], 0)}
        found = judged(made, "chunks", [(leg, replace(trace, answers=answers))])
    assert found.lacks
    assert found.holds is False


def test_rows_of_a_case_are_the_middle_and_the_most() -> None:
    found = CaseResult(name="packed", rows={1: 2, 7: 2, 65: 1})
    assert (found.rows_p50, found.rows_max) == (7, 65)
    assert (CaseResult(name="packed").rows_p50, CaseResult(name="packed").rows_max) == (0, 0)


def test_a_case_without_a_run_proves_nothing(tmp_path: Path) -> None:
    with subject(tmp_path, requests=3) as (made, _):
        none = judged(made, "rescore", [])
        empty = Leg(name="leg", probes=())
        unasked = judged(made, "rescore", [(empty, traced(made, empty, 9))])
    for found in (none, unasked):
        assert found.holds is None
        assert found.lacks == ("nothing was compared; give a larger --max-tokens",)
