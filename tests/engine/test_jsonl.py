"""Request lines in, completion lines out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedctl.engine.completion_lines import completion_line, refusal_line
from pagedctl.engine.input_lines import InputLines
from pagedctl.engine.jsonl import KNOWN_FIELDS, LineRules, RefusedLine, read_prompts, read_requests
from pagedctl.engine.request import (
    Completion,
    Request,
    RequestFailure,
    SamplingParams,
    TopLogprobs,
)
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import Fault, RequestError
from pagedctl.manifest import strict_json

BOM = b"\xef\xbb\xbf"
RULES = LineRules(
    source="prompts.jsonl",
    limits=RequestLimits(input_vocab_size=99, output_vocab_size=99, max_model_len=64),
    defaults=SamplingParams(),
)


class LettersEncoder:
    """Token ids are the letters' places in the alphabet; a chat begins with 90."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[0]["role"] == "system":
            fault = Fault(what="no system role", where="template", rule="user", remedy="drop it")
            raise RequestError.of_kind("bad_field", [fault])
        return [90, *(token for one in messages for token in self.encode(one["content"]))]


TEXT_RULES = replace(RULES, encoder=LettersEncoder())


def lines_of(data: bytes) -> list[tuple[int, bytes]]:
    return list(InputLines(io.BytesIO(data), "prompts.jsonl"))


def read(data: bytes, rules: LineRules = RULES) -> list[Request | RefusedLine]:
    return list(read_requests(lines_of(data), rules))


def read_line(line: Mapping[str, Any] | str, rules: LineRules = RULES) -> Request | RefusedLine:
    text = line if isinstance(line, str) else json.dumps(line)
    (found,) = read(text.encode(), rules)
    return found


def served(line: Mapping[str, Any] | str, rules: LineRules = RULES) -> Request:
    found = read_line(line, rules)
    assert isinstance(found, Request), found
    return found


def refused(line: Mapping[str, Any] | str, rules: LineRules = RULES) -> RefusedLine:
    found = read_line(line, rules)
    assert isinstance(found, RefusedLine), found
    return found


def test_reading_and_writing_lines_loads_no_torch() -> None:
    names = "completion_lines input_lines jsonl params_check request_check request_limits scoring"
    imported = "; ".join(f"import pagedctl.engine.{name}" for name in names.split())
    heavy = "('torch', 'transformers', 'tokenizers', 'jinja2')"
    code = f"{imported}; import sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- one line --------------------------------------------------------------------------------


def test_a_bom_is_dropped_at_the_start_of_the_file_only() -> None:
    """microsoft/promptflow#4188: the same result as without; on line 2 it is an error."""
    line = b'{"prompt_token_ids": [1, 2]}'
    first, second = read(BOM + line + b"\n" + BOM + line)
    assert first == read(line)[0]
    assert isinstance(second, RefusedLine)
    assert (second.id, second.line_number) == (None, 2)
    assert second.failure.kind == "bad_json"
    assert second.failure.where == "prompts.jsonl, line 2, column 1"
    (twice,) = read(BOM + BOM + line)
    assert isinstance(twice, RefusedLine)


def test_ids_default_to_the_physical_line_number_from_0() -> None:
    found = read(b'\n{"prompt_token_ids": [1]}\n\n{"prompt_token_ids": [2], "id": null}\n')
    assert [one.id for one in found] == [1, 3]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[1, 2]", "5", '{"a": 1} {}', '{"a": 1, "a": 2}', '{"a": NaN}', '"\\ud800"'],
)
def test_a_line_that_is_no_json_object_has_no_id(line: str) -> None:
    found = refused(line)
    assert (found.id, found.error.kind) == (None, "bad_json")
    assert found.error.where.startswith("prompts.jsonl, line 1")


def test_bytes_that_are_no_utf8_are_refused_and_the_next_line_is_served() -> None:
    first, second = read(b'{"id": "\xff"}\n{"prompt_token_ids": [1]}')
    assert isinstance(first, RefusedLine)
    assert isinstance(second, Request)


def test_null_means_absent_for_every_field() -> None:
    line: dict[str, Any] = dict.fromkeys(KNOWN_FIELDS)
    rules = replace(RULES, defaults=SamplingParams(max_tokens=9, temperature=0.5))
    found = served({**line, "prompt_token_ids": [1]}, rules)
    plain = Request(id=0, prompt_token_ids=(1,), params=rules.defaults)
    assert found == plain


@pytest.mark.parametrize(
    ("line", "max_tokens"), [({}, None), ({"max_tokens": None}, None), ({"max_tokens": 16}, 16)]
)
def test_max_tokens_is_never_filled_in(line: dict[str, Any], max_tokens: int | None) -> None:
    """PrimeIntellect-ai/prime-rl: unset is not silently 16; an explicit 16 is kept."""
    assert served({"prompt_token_ids": [1], **line}).params.max_tokens == max_tokens


def test_the_lines_own_values_win_over_the_runs_defaults() -> None:
    rules = replace(RULES, defaults=SamplingParams(temperature=0.5, top_p=0.9, n=8))
    params = served({"prompt_token_ids": [1], "temperature": 0, "n": 2}, rules).params
    assert (params.temperature, params.top_p, params.n, params.seed) == (0.0, 0.9, 2, None)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ({}, "bad_field"),
        ({"prompt": "ab", "prompt_token_ids": [1]}, "bad_field"),
        ({"prompt": "ab", "messages": []}, "bad_field"),
        ({"prompt_token_ids": []}, "empty_prompt"),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": 5}, "bad_field"),
        ({"prompt": ["ab"]}, "bad_field"),
        ({"prompt_token_ids": "ab"}, "bad_field"),
        ({"prompt_token_ids": [1, 2**31]}, "out_of_vocabulary"),
        ({"prompt_token_ids": [1, 5.0]}, "bad_field"),
        ({"prompt_token_ids": [1, True]}, "bad_field"),
        ({"prompt_token_ids": [1] * 64}, "too_long"),
        ({"prompt": "a" * 64}, "too_long"),
        ({"messages": []}, "bad_field"),
        ({"messages": [{"role": "user"}]}, "bad_field"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_field"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "bad_field"),
        ({"messages": "ab"}, "bad_field"),
        ({"messages": [{"role": "system", "content": "a"}]}, "bad_field"),
    ],
)
def test_a_line_has_exactly_one_prompt_of_the_right_form(prompt: dict[str, Any], kind: str) -> None:
    found = refused({"id": "q17", **prompt}, TEXT_RULES)
    assert (found.id, found.error.kind) == ("q17", kind)
    assert found.error.where.startswith('prompts.jsonl, line 1 (id "q17")')
    assert len(found.error.faults) == 1


@pytest.mark.parametrize("prompt", [{"prompt": "ab"}, {"messages": [{"role": "user"}]}])
def test_text_for_a_model_without_a_tokenizer_is_refused(prompt: dict[str, Any]) -> None:
    found = refused(prompt, RULES)
    assert found.error.kind == "bad_field"
    assert "no tokenizer" in found.error.what


def test_an_empty_prompt_in_a_file_is_refused_with_its_line_number() -> None:
    """vLLM's generate protocol asks for at least one id; the other lines are served."""
    lines = [b'{"prompt_token_ids": [1]}'] * 5
    lines[2] = b'{"prompt_token_ids": []}'
    found = read(b"\n".join(lines))
    assert [isinstance(one, RefusedLine) for one in found] == [False, False, True, False, False]
    assert isinstance(found[2], RefusedLine)
    assert found[2].error.where == "prompts.jsonl, line 3, field prompt_token_ids"


def test_text_and_messages_become_ids() -> None:
    assert served({"prompt": "ab"}, TEXT_RULES).prompt_token_ids == (0, 1)
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert served(chat, TEXT_RULES).prompt_token_ids == (90, 0, 1)
    chat_rules = replace(TEXT_RULES, chat=True)
    assert served({"prompt": "ab"}, chat_rules).prompt_token_ids == (90, 0, 1)
    assert served({"prompt_token_ids": [5]}, chat_rules).prompt_token_ids == (5,)


def test_prompts_as_texts_are_numbered_from_1_and_named_from_0() -> None:
    rules = replace(TEXT_RULES, source="--prompt")
    first, second = read_prompts(["ab", ""], rules)
    assert first == Request(id=0, prompt_token_ids=(0, 1))
    assert isinstance(second, RefusedLine)
    assert second.error.where == "--prompt 2, field prompt"


@pytest.mark.parametrize("second", [{"id": "0"}, {"id": 0}])
def test_an_id_that_stands_earlier_is_refused(second: dict[str, Any]) -> None:
    """5 and "5" would name one random stream, so they count as the same id."""
    lines = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [1], **second}]
    first, other = read("\n".join(map(json.dumps, lines)).encode())
    assert isinstance(first, Request)
    assert isinstance(other, RefusedLine)
    assert (other.id, other.error.kind) == (second["id"], "duplicate_id")


@pytest.mark.parametrize("value", [5.0, True, [1], 2**70])
def test_an_id_of_another_type_is_refused_and_not_echoed(value: object) -> None:
    found = refused({"id": value, "prompt_token_ids": [1]})
    assert found.id is None
    assert found.error.where == "prompts.jsonl, line 1, field id"


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("temprature", "did you mean temperature?"),
        ("max_new_tokens", "use max_tokens"),
        ("prompt_ids", "use prompt_token_ids"),
        ("answer", "remove it, or give --keep answer"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(field: str, remedy: str) -> None:
    found = refused({"prompt_token_ids": [1], field: 1})
    assert (found.error.kind, found.error.remedy) == ("unknown_field", remedy)
    assert found.error.where == f"prompts.jsonl, line 1, field {field}"


def test_all_faults_of_a_line_are_reported_together() -> None:
    found = refused({"id": 1, "temprature": 1, "top_p": 0, "prompt_token_ids": [-1]})
    assert [fault.where.rpartition(" ")[2] for fault in found.error.faults] == [
        "temprature",
        "prompt_token_ids",
        "top_p",
    ]
    assert found.failure == RequestFailure(
        kind="unknown_field",
        what='"temprature" is not a field of a request',
        where="prompts.jsonl, line 1 (id 1), field temprature",
        rule="unknown fields are refused, unless --keep names them",
        remedy="did you mean temperature?",
    )


def test_a_kept_field_is_copied_into_the_metadata() -> None:
    rules = replace(RULES, keep=("answer", "n"))
    line = {"prompt_token_ids": [1], "answer": "18", "n": 2, "metadata": {"a": [1, None]}}
    found = served(line, rules)
    assert found.metadata == {"a": [1, None], "answer": "18", "n": 2}
    assert found.params.n == 2
    assert served({"prompt_token_ids": [1]}, rules).metadata is None
    clash = refused({**line, "metadata": {"answer": "19"}}, rules)
    assert clash.error.where.endswith("field metadata")


def test_another_tools_prompt_ids_are_taken_only_where_asked_for() -> None:
    rules = replace(RULES, peer_ids=True)
    line = {"id": 0, "group": 3, "prompt_ids": [1, 2], "max_tokens": 7, "seed": 17}
    found = served(line, rules)
    assert (found.prompt_token_ids, found.group, found.params.seed) == ((1, 2), 3, 17)
    both = refused({**line, "prompt_token_ids": [1]}, rules)
    assert both.error.what == "prompt_token_ids and prompt_ids stand together"
    empty = refused({**line, "prompt_ids": []}, rules)
    assert empty.error.where.endswith("field prompt_ids")


# -- completion lines ------------------------------------------------------------------------


def completion(**changes: Any) -> Completion:
    plain: dict[str, Any] = {
        "id": "q17",
        "sample": 0,
        "group": "q17",
        "prompt_token_ids": np.array([5, 6], dtype=np.int32),
        "token_ids": np.array([7, 2], dtype=np.int32),
        "logprobs": np.array([-0.1, -1e-7], dtype=np.float32),
        "logprob_basis": "scaled",
        "text": None,
        "finish_reason": "stop",
        "stop_reason": 2,
        "temperature": 1.0,
        "seed": 2**53 - 1,
        "weight_version_first": 0,
        "weight_version_last": 0,
        "cached_tokens": 0,
        "preemptions": 0,
        "metadata": {"answer": "18"},
    }
    return Completion(**{**plain, **changes})


def test_a_completion_line_has_its_fields_in_order() -> None:
    line = completion_line(completion(text="text"))
    assert line.endswith(b"}\n")
    assert b'"logprobs":[-0.1,-1e-7]' in line
    assert list(json.loads(line)) == [
        "id",
        "sample",
        "group",
        "prompt_token_ids",
        "token_ids",
        "logprobs",
        "logprob_basis",
        "text",
        "finish_reason",
        "stop_reason",
        "temperature",
        "seed",
        "weight_version_first",
        "weight_version_last",
        "cached_tokens",
        "preemptions",
        "metadata",
    ]


def test_text_is_null_without_a_tokenizer() -> None:
    assert json.loads(completion_line(completion()))["text"] is None


def test_top_and_prompt_logprobs_follow_only_where_they_were_asked_for() -> None:
    top = TopLogprobs(
        token_ids=np.array([[7, 5], [2, 7]], dtype=np.int32),
        logprobs=np.array([[-0.1, -2.5], [-1e-7, -np.inf]], dtype=np.float32),
    )
    asked = completion(top_logprobs=top, prompt_logprobs=np.array([-0.5], dtype=np.float32))
    line = json.loads(completion_line(asked))
    assert list(line)[-3:] == ["top_logprobs", "top_logprobs_reason", "prompt_logprobs"]
    assert line["prompt_logprobs"] == [-0.5]
    assert line["top_logprobs"][0] == [[7, -0.1], [5, -2.5]]
    assert line["top_logprobs"][1] == [[2, -1e-7], [7, None]]
    nothing = TopLogprobs(
        token_ids=np.zeros((0, 2), dtype=np.int32), logprobs=np.zeros((0, 2), dtype=np.float32)
    )
    empty = completion(top_logprobs=nothing, prompt_logprobs=np.zeros(0, dtype=np.float32))
    line = json.loads(completion_line(empty))
    assert (line["top_logprobs"], line["prompt_logprobs"]) == ([], [])


def test_a_failed_request_keeps_its_tokens_beside_the_error() -> None:
    failure = RequestFailure(kind="non_finite", what="w", where="x", rule="r", remedy="m")
    found = json.loads(completion_line(completion(finish_reason=None, error=failure)))
    assert found["token_ids"] == [7, 2]
    assert len(found["logprobs"]) == 2
    assert found["finish_reason"] is None
    assert found["error"]["kind"] == "non_finite"


def test_a_value_without_a_json_form_is_null_with_a_reason() -> None:
    """vllm-project/vllm#19661: no NaN or Infinity token ever stands in a line."""
    broken = completion(logprobs=np.array([np.nan, -np.inf], dtype=np.float32))
    line = completion_line(broken)
    found = strict_json.loads(line, where="line")
    assert isinstance(found, dict)
    assert found["logprobs"] == [None, None]
    assert found["logprobs_reason"] == "[0]: NaN; [1]: -Infinity"


def test_an_error_line_says_kind_where_rule_and_remedy() -> None:
    found = refused({"id": "q18", "prompt_token_ids": [99], "top_p": 2})
    line = json.loads(refusal_line(found.id, found.error))
    assert (line["id"], line["sample"]) == ("q18", 0)
    assert {"kind", "where", "rule", "remedy"} < set(line["error"])
    assert len(line["error"]["faults"]) == 2
    assert json.loads(refusal_line(None, refused("x").error))["id"] is None


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    logprobs=st.lists(floats32, max_size=5),
    text=st.text(max_size=8),
    metadata=st.dictionaries(st.text(max_size=3), st.integers(-(2**63), 2**64 - 1), max_size=3),
)
def test_a_completion_line_reads_back_to_the_same_bits(
    logprobs: list[float], text: str, metadata: dict[str, Any]
) -> None:
    array = np.array(logprobs, dtype=np.float32)
    ids = np.arange(len(array), dtype=np.int32)
    done = completion(logprobs=array, token_ids=ids, text=text, metadata=metadata)
    line = completion_line(done)
    assert line.count(b"\n") == 1
    found = strict_json.loads(line, where="line")
    assert isinstance(found, dict)
    assert np.array(found["logprobs"], dtype=np.float32).tobytes() == array.tobytes()
    assert (found["text"], found["metadata"]) == (text, metadata)


requests = st.builds(
    lambda **values: values,
    id=st.text(max_size=4) | st.integers(-(2**63), 2**63 - 1),
    prompt_token_ids=st.lists(st.integers(0, 98), min_size=1, max_size=5),
    n=st.integers(1, 9),
    temperature=st.just(0) | st.floats(1e-12, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**53 - 1),
)


@given(values=requests, end=st.sampled_from([b"\n", b"\r\n", b""]))
def test_a_request_line_reads_back_to_the_same_values(values: dict[str, Any], end: bytes) -> None:
    (found,) = read(strict_json.dumps(values) + end)
    assert isinstance(found, Request)
    assert found.id == values["id"]
    assert list(found.prompt_token_ids) == values["prompt_token_ids"]
    for name in ("n", "temperature", "top_p", "seed"):
        assert getattr(found.params, name) == values[name]


@given(data=st.binary(max_size=40))
def test_no_bytes_can_stop_the_reader(data: bytes) -> None:
    for number, line in enumerate(data.split(b"\n"), start=1):
        for found in read_requests([(number, line)], TEXT_RULES):
            assert isinstance(found, Request | RefusedLine)
