"""Sequences to score, from lines; scores, to lines."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedctl.engine.completion_lines import completion_line, refusal_line
from pagedctl.engine.input_lines import InputLines
from pagedctl.engine.request import (
    Completion,
    RequestFailure,
    ScoreRequest,
    Scores,
    TopLogprobs,
)
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.engine.score_fields import COMPLETION_FIELDS, SCORE_FIELDS, ScoreLineRules
from pagedctl.engine.score_lines import (
    FoundLine,
    RefusedScoreLine,
    ScoreLine,
    SkippedLine,
    read_score_lines,
    refused_score_line,
    score_line,
)
from pagedctl.errors import Fault, RequestError

RULES = ScoreLineRules(
    source="s.jsonl",
    limits=RequestLimits(input_vocab_size=99, output_vocab_size=99, max_model_len=8),
)
CHECK = replace(RULES, check=True)
COMPLETION: dict[str, Any] = {
    "id": "q",
    "sample": 1,
    "prompt_token_ids": [5, 6, 7],
    "token_ids": [8, 9],
    "logprobs": [-0.5, -1.25],
    "logprob_basis": "scaled",
    "temperature": 0.7,
}


def read(data: bytes, rules: ScoreLineRules = RULES) -> list[FoundLine]:
    return list(read_score_lines(InputLines(io.BytesIO(data), "s.jsonl"), rules))


def read_line(line: Mapping[str, Any] | str, rules: ScoreLineRules = RULES) -> FoundLine:
    (found,) = read((line if isinstance(line, str) else json.dumps(line)).encode(), rules)
    return found


def accepted(line: Mapping[str, Any] | str, rules: ScoreLineRules = RULES) -> ScoreLine:
    found = read_line(line, rules)
    assert isinstance(found, ScoreLine), found
    return found


def refused(line: Mapping[str, Any] | str, rules: ScoreLineRules = RULES) -> RefusedScoreLine:
    found = read_line(line, rules)
    assert isinstance(found, RefusedScoreLine), found
    return found


def completion(**changes: Any) -> Completion:
    """A completion with every field filled in."""
    whole = Completion(
        id="q",
        sample=1,
        group="g",
        prompt_token_ids=np.array([5, 6, 7], dtype=np.int32),
        token_ids=np.array([8, 9], dtype=np.int32),
        logprobs=np.array([-0.1, -1.3], dtype=np.float32),
        logprob_basis="scaled",
        text="a b",
        finish_reason="stop",
        stop_reason="b",
        temperature=0.7,
        seed=5,
        weight_version_first=2,
        weight_version_last=3,
        cached_tokens=1,
        preemptions=1,
        top_logprobs=TopLogprobs(
            token_ids=np.array([[8], [9]], dtype=np.int32),
            logprobs=np.array([[-0.1], [-np.inf]], dtype=np.float32),
        ),
        prompt_logprobs=np.array([-3.0, -4.0], dtype=np.float32),
        metadata={"answer": "18"},
    )
    return replace(whole, **changes)


FAILURE = RequestFailure(kind="non_finite", what="NaN", where="here", rule="r", remedy="m")


def test_reading_and_writing_score_lines_loads_no_torch() -> None:
    code = (
        "import sys, pagedctl.engine.score_lines, pagedctl.engine.score_fields\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- what is read ----------------------------------------------------------------------------


def test_a_score_line_is_its_whole_sequence_from_start_on() -> None:
    line = {"id": "a", "sample": 3, "token_ids": [1, 2, 3, 4], "start": 2, "temperature": 0.5}
    asked = ScoreRequest(id="a", sample=3, token_ids=(1, 2, 3, 4), start=2, temperature=0.5)
    found = accepted(line)
    assert found.request() == asked
    assert (found.line_number, found.logprobs) == (1, None)
    assert found.where == 's.jsonl, line 1 (id "a", sample 3)'


def test_a_line_without_start_and_temperature_takes_the_runs() -> None:
    rules = replace(RULES, start=2, temperature=0.0)
    assert accepted({"token_ids": [1, 2]}, rules).request() == ScoreRequest(
        id=0, token_ids=(1, 2), start=2, temperature=0.0
    )
    own = accepted({"token_ids": [1, 2], "start": 1, "temperature": 2}, rules).request()
    assert (own.start, own.temperature) == (1, 2.0)


def test_a_completion_line_is_prompt_and_tokens_scored_from_the_prompts_end() -> None:
    """Every field that generate writes is known, null reasons included."""
    line = completion_line(completion())
    assert b'"top_logprobs_reason"' in line
    asked = ScoreRequest(id="q", sample=1, token_ids=(5, 6, 7, 8, 9), start=3, temperature=0.7)
    assert accepted(line.decode(), replace(RULES, start=1, temperature=0.2)).request() == asked
    assert {one.name for one in fields(Completion)} == set(COMPLETION_FIELDS)
    assert {one.name for one in fields(Scores)} - {"error"} <= set(SCORE_FIELDS)


def test_a_failed_sample_that_kept_tokens_is_scored() -> None:
    failed = completion(finish_reason=None, error=FAILURE)
    assert accepted(completion_line(failed).decode()).request().start == 3
    nothing = {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}
    emptied = accepted(completion_line(replace(failed, **nothing)).decode(), CHECK)  # type: ignore[arg-type]
    assert emptied.sequence.num_scored_tokens == 0


def test_error_lines_without_tokens_are_skipped() -> None:
    error = RequestError.of_kind("bad_json", [Fault(what="w", where="x", rule="r", remedy="m")] * 2)
    lines = refusal_line("q", error) + refusal_line(None, error)
    lines += refused_score_line("q", 1, error)
    assert read(lines, CHECK) == [SkippedLine(line_number=number) for number in (1, 2, 3)]


def test_ids_default_to_the_physical_line_number_from_0() -> None:
    found = read(b'\n{"token_ids": [1]}\n\n{"token_ids": [2], "id": null}\n')
    assert [one.id for one in found if isinstance(one, ScoreLine)] == [1, 3]


def test_null_means_absent_for_every_field() -> None:
    line = {**dict.fromkeys(SCORE_FIELDS), "token_ids": [1]}
    assert accepted(line).request() == ScoreRequest(id=0, token_ids=(1,))
    ids = {"prompt_token_ids": [1], "token_ids": [2]}
    completion_of_nulls = {**dict.fromkeys(COMPLETION_FIELDS), **ids}
    assert accepted(completion_of_nulls).request() == ScoreRequest(id=0, token_ids=(1, 2))


@given(st.lists(st.integers(0, 98), min_size=1, max_size=8), st.data())
def test_any_sequence_within_the_rules_is_read_as_it_is(ids: list[int], data: Any) -> None:
    start = data.draw(st.integers(1, len(ids)))
    found = accepted({"id": 4, "token_ids": ids, "start": start})
    assert found.request() == ScoreRequest(id=4, token_ids=tuple(ids), start=start)
    split = accepted({"id": 4, "prompt_token_ids": ids[:start], "token_ids": ids[start:]})
    assert split.request() == found.request()


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "field"),
    [
        ({"token_ids": []}, "empty_prompt", "token_ids"),
        ({"token_ids": [99]}, "out_of_vocabulary", "token_ids"),
        ({"token_ids": [-1]}, "out_of_vocabulary", "token_ids"),
        ({"token_ids": [1.0]}, "bad_field", "token_ids"),
        ({"token_ids": [True]}, "bad_field", "token_ids"),
        ({"token_ids": "12"}, "bad_field", "token_ids"),
        ({"token_ids": [1] * 9}, "too_long", "token_ids"),
        ({"prompt_token_ids": [1] * 5, "token_ids": [1] * 4}, "too_long", "token_ids"),
        ({"prompt_token_ids": [], "token_ids": [1]}, "empty_prompt", "prompt_token_ids"),
        ({"prompt_token_ids": [99], "token_ids": [1]}, "out_of_vocabulary", "prompt_token_ids"),
        ({"token_ids": [1, 2], "start": 0}, "bad_field", "start"),
        ({"token_ids": [1, 2], "start": 3}, "bad_field", "start"),
        ({"token_ids": [1, 2], "start": True}, "bad_field", "start"),
        ({"token_ids": [1, 2], "start": 1.0}, "bad_field", "start"),
        ({"prompt_token_ids": [1], "token_ids": [1], "start": 1}, "unknown_field", "start"),
        ({"token_ids": [1], "temperature": -1}, "bad_field", "temperature"),
        ({"token_ids": [1], "temperature": "1"}, "bad_field", "temperature"),
        ({"token_ids": [1], "temperature": 1e-13}, "bad_field", "temperature"),
        ({"token_ids": [1], "sample": -1}, "bad_field", "sample"),
        ({"token_ids": [1], "id": 1.5}, "bad_field", "id"),
        ({"token_ids": [1], "metadata": {}}, "unknown_field", "metadata"),
        ({"input_ids": [1]}, "unknown_field", "input_ids"),
        ({"error": {"kind": "bad_field"}, "tokens": [1]}, "unknown_field", "tokens"),
    ],
)
def test_a_line_that_breaks_a_rule_is_refused_with_its_field(
    line: dict[str, Any], kind: str, field: str
) -> None:
    found = refused(line)
    assert found.error.kind == kind
    assert found.error.where == f"s.jsonl, line 1, field {field}"


@pytest.mark.parametrize(
    "line", ["nonsense", "[1, 2]", "5", '{"a": 1} {}', '{"id": 1, "id": 1}', '{"id": NaN}']
)
def test_a_line_that_is_no_json_object_has_no_id(line: str) -> None:
    found = refused(line)
    assert (found.id, found.error.kind) == (None, "bad_json")
    assert found.error.where.startswith("s.jsonl, line 1")


def test_a_sequence_may_reach_max_model_len_and_have_nothing_to_score() -> None:
    assert accepted({"token_ids": [1] * 8}).sequence.num_scored_tokens == 7
    assert accepted({"token_ids": [1] * 8, "start": 8}).sequence.num_scored_tokens == 0


def test_a_line_without_ids_is_told_what_a_line_needs() -> None:
    scored = {"id": "a", "sample": 0, "start": 1, "temperature": 1.0, "logprobs": [-1.0]}
    assert refused(scored).error.what == "the line has no token_ids"
    request = {"id": "a", "prompt_token_ids": [1, 2]}
    assert refused(request).error.what == "the line has no token_ids"


def test_all_faults_of_a_line_are_reported_together() -> None:
    line = {"id": "a", "sample": 2, "tokn_ids": 1, "token_ids": [-1], "start": 0, "temperature": -1}
    faults = refused(line).error.faults
    assert [fault.where.rpartition(" ")[2] for fault in faults] == [
        "tokn_ids",
        "token_ids",
        "start",
        "temperature",
    ]
    assert faults[0].remedy == "did you mean token_ids?"


def test_a_pair_of_id_and_sample_stands_once() -> None:
    """Ids are compared as text, as those of requests are."""
    lines = [
        {"id": 5, "token_ids": [1]},
        {"id": 5, "sample": 1, "token_ids": [1]},
        {"id": "5", "sample": 1, "token_ids": [1]},
        {"id": 6, "sample": -1, "token_ids": [1]},
        {"id": 6, "token_ids": [1]},
    ]
    found = read("\n".join(map(json.dumps, lines)).encode())
    kinds = [one.error.kind if isinstance(one, RefusedScoreLine) else None for one in found]
    assert kinds == [None, None, "duplicate_id", "bad_field", None]


# -- logprobs to compare ---------------------------------------------------------------------


def test_logprobs_are_read_back_to_the_float32_that_was_written() -> None:
    rng = np.random.default_rng(0)
    values = -np.exp(rng.uniform(-40, 4, 2000)).astype(np.float32)
    values[:4] = [-0.0, 0.0, np.float32(-1e-45), np.finfo(np.float32).min]
    for piece in values.reshape(-1, 4):
        ids = np.array([1, 2, 3, 4], dtype=np.int32)
        line = completion_line(completion(token_ids=ids, logprobs=piece, top_logprobs=None))
        found = accepted(line.decode(), CHECK)
        assert found.logprobs is not None
        assert found.logprobs.tobytes() == piece.tobytes()


def test_a_check_scores_as_the_lines_logprobs_were_taken() -> None:
    """basis raw is that of T = 1; vllm's default."""
    raw = {**COMPLETION, "logprob_basis": "raw"}
    raw_engine = replace(CHECK, logprob_basis="raw")
    assert accepted(COMPLETION, CHECK).temperature == 0.7
    assert accepted(raw, CHECK).temperature == 1.0
    assert accepted(raw, RULES).temperature == 0.7
    assert accepted(raw, raw_engine).temperature == 1.0
    assert accepted({**COMPLETION, "temperature": 0}, raw_engine).temperature == 0.0
    assert refused(COMPLETION, raw_engine).error.where.endswith("field logprob_basis")


@pytest.mark.parametrize(
    ("change", "field", "what"),
    [
        ({"logprobs": None}, "logprobs", "the line has no logprobs"),
        ({"logprobs": [-1.0]}, "logprobs", "1 logprobs meet 2 tokens to score"),
        ({"logprobs": [-1.0, None]}, "logprobs", "logprobs[1] is null"),
        ({"logprobs": [-1.0, True]}, "logprobs", "logprobs[1] is true"),
        ({"logprobs": [-1e39, -1.0]}, "logprobs", "logprobs[0] is -1e+39"),
        ({"logprobs": -1.0}, "logprobs", "logprobs -1.0 is not a list"),
        ({"logprob_basis": "processed"}, "logprob_basis", 'logprob_basis "processed" cannot'),
        ({"logprob_basis": 1}, "logprob_basis", "logprob_basis 1 cannot"),
    ],
)
def test_a_check_refuses_what_cannot_be_compared(
    change: dict[str, Any], field: str, what: str
) -> None:
    found = refused({**COMPLETION, **change}, CHECK)
    assert found.error.where == f's.jsonl, line 1 (id "q", sample 1), field {field}'
    assert found.error.what.startswith(what)
    assert accepted({**COMPLETION, **change}, RULES).logprobs is None


def test_a_score_line_can_carry_logprobs_too() -> None:
    line = {"token_ids": [1, 2, 3], "start": 2, "logprobs": [-1], "logprob_basis": "scaled"}
    found = accepted(line, CHECK)
    assert found.logprobs is not None
    assert list(found.logprobs) == [-1.0]


# -- what is written -------------------------------------------------------------------------


def scores(**changes: Any) -> Scores:
    made = Scores(
        id="q",
        sample=1,
        start=3,
        temperature=0.7,
        logprob_basis="scaled",
        logprobs=np.array([-0.1, -0.0], dtype=np.float32),
        weight_version_first=2,
        weight_version_last=3,
    )
    return replace(made, **changes)


def test_a_score_line_has_the_documented_fields_and_the_bits() -> None:
    text = score_line(scores()).decode()
    assert '"logprobs":[-0.1,-0.0]' in text
    assert json.loads(text) == {
        "id": "q",
        "sample": 1,
        "start": 3,
        "temperature": 0.7,
        "logprob_basis": "scaled",
        "logprobs": [-0.1, -0.0],
        "weight_version_first": 2,
        "weight_version_last": 3,
    }


def test_a_failed_or_refused_sequence_is_an_error_line_of_its_sample() -> None:
    failed = json.loads(score_line(scores(error=FAILURE, logprobs=np.zeros(0, np.float32))))
    assert set(failed) == {"id", "sample", "error"}
    assert (failed["sample"], failed["error"]["kind"]) == (1, "non_finite")
    found = refused({**COMPLETION, "temperature": -1})
    line = json.loads(refused_score_line(found.id, found.sample, found.error))
    assert (line["id"], line["sample"], line["error"]["kind"]) == ("q", 1, "bad_field")
    assert line["error"]["where"] == 's.jsonl, line 1 (id "q", sample 1), field temperature'
