"""Every rule of a request: what is served, and what is refused with its field and its kind."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedctl.config.groups import SamplingOptions
from pagedctl.config.options import options_of
from pagedctl.engine.params_check import RULES, params_of_options
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.request_check import check_request
from pagedctl.engine.request_limits import PoolBound, RequestLimits
from pagedctl.errors import ConfigError, RequestError

LIMITS = RequestLimits(input_vocab_size=99, output_vocab_size=90, max_model_len=20)


def request(**changes: Any) -> Request:
    return Request(**{"id": "q17", "prompt_token_ids": (5, 6, 7), **changes})


def checked(**params: Any) -> SamplingParams:
    return check_request(request(params=SamplingParams(**params)), LIMITS).params


def refusal(asked: Request) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_request(asked, LIMITS)
    return caught.value


def refused_params(**params: Any) -> RequestError:
    return refusal(request(params=SamplingParams(**params)))


def test_a_plain_request_comes_back_equal() -> None:
    asked = request(params=SamplingParams(n=4, seed=7), group="g", metadata={"answer": "18"})
    assert check_request(asked, LIMITS) == asked


def test_lists_and_arrays_become_tuples_of_int() -> None:
    for ids in ([5, 6], np.array([5, 6], dtype=np.int32), (np.int64(5), 6)):
        found = check_request(request(prompt_token_ids=ids), LIMITS).prompt_token_ids
        assert found == (5, 6)
        assert [type(one) for one in found] == [int, int]
    params = checked(stop_token_ids=[3], temperature=np.float32(0.5), n=np.int64(2))
    assert (params.stop_token_ids, params.temperature, params.n) == ((3,), 0.5, 2)


@pytest.mark.parametrize("top_k", [None, 0, -1, 90, 10**30])
def test_top_k_that_keeps_every_token_is_off(top_k: int | None) -> None:
    """vllm-project/vllm#17553: None, 0 and -1 all mean no truncation."""
    assert checked(top_k=top_k).top_k == 0


def test_top_k_below_the_vocabulary_is_kept() -> None:
    assert [checked(top_k=k).top_k for k in (1, 89)] == [1, 89]


@pytest.mark.parametrize(
    ("field", "value"), [("min_p", 0.0), ("temperature", 0), ("presence_penalty", 0)]
)
def test_a_legal_zero_stays_zero(field: str, value: float) -> None:
    """hiyouga/LlamaFactory#10710: zero is a value, not an absent one."""
    assert getattr(checked(**{field: value}), field) == 0


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.5, math.nan, math.inf, "0.9", True, None])
def test_top_p_outside_its_range_is_refused_by_name(top_p: object) -> None:
    """NVIDIA-NeMo/RL#2053, hiyouga/LlamaFactory#10710: neither 0.0 nor 1.5 passes."""
    error = refused_params(top_p=top_p)
    assert error.kind == "bad_field"
    assert error.where == 'request "q17", field top_p'
    assert "> 0 and <= 1" in error.rule


@pytest.mark.parametrize("top_p", [1e-9, 1, 1.0])
def test_top_p_inside_its_range_is_served(top_p: float) -> None:
    assert checked(top_p=top_p).top_p == top_p


@pytest.mark.parametrize("min_p", [-0.1, 1.0000001, 2, math.nan])
def test_min_p_outside_zero_to_one_is_refused(min_p: float) -> None:
    """NVIDIA/TensorRT-LLM#16590: min_p above 1 would empty the row."""
    assert refused_params(min_p=min_p).where.endswith("field min_p")


@pytest.mark.parametrize("min_p", [0, 0.5, 1.0])
def test_min_p_from_zero_to_one_is_served(min_p: float) -> None:
    assert checked(min_p=min_p).min_p == min_p


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-12, 1e6])
def test_temperature_is_zero_or_between_its_bounds(temperature: float) -> None:
    """vllm-project/vllm#3063: very small temperatures are served, not rewritten."""
    assert checked(temperature=temperature).temperature == temperature


@pytest.mark.parametrize(
    "temperature", [-1, 1e-13, 1.1e6, math.nan, math.inf, 10**400, "1", False, None]
)
def test_other_temperatures_are_refused(temperature: object) -> None:
    assert refused_params(temperature=temperature).where.endswith("field temperature")


@pytest.mark.parametrize("seed", [None, 0, 2**53 - 1])
def test_seeds_below_two_to_the_53_are_served(seed: int | None) -> None:
    assert checked(seed=seed).seed == seed


@pytest.mark.parametrize("max_tokens", [None, 1, 16, 10**12])
def test_max_tokens_is_kept_as_given(max_tokens: int | None) -> None:
    """PrimeIntellect-ai/prime-rl: unset stays unset and an explicit 16 is kept."""
    assert checked(max_tokens=max_tokens).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", 2**53),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("n", 0),
        ("n", 1.0),
        ("n", None),
        ("n", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", False),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        ("stop_token_ids", 5),
        ("stop_token_ids", [True]),
        ("stop_token_ids", ["5"]),
        ("min_tokens", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", False),
        ("stop", [5]),
        ("include_stop", 0),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", [[5]]),
        ("logit_bias", [[5, math.inf]]),
        ("allowed_token_ids", "5"),
        ("top_logprobs", 91),
        ("top_logprobs", True),
        ("prompt_logprobs", 1),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(field: str, value: object) -> None:
    error = refused_params(**{field: value})
    assert error.kind == "bad_field"
    assert error.where == f'request "q17", field {field}'
    assert "not available" not in error.what


@pytest.mark.parametrize("stop", ["", [""], ["", "END"]])
def test_an_empty_stop_text_is_refused(stop: object) -> None:
    """ModelTC/LightLLM#1456: it neither matches everywhere nor hides the others."""
    error = refused_params(stop=stop)
    assert error.what == "stop holds an empty text"


@pytest.mark.parametrize(
    ("field", "ids", "index", "value"),
    [
        ("stop_token_ids", [3, -1], 1, -1),
        ("stop_token_ids", [99], 0, 99),
        ("allowed_token_ids", [90], 0, 90),
    ],
)
def test_ids_outside_the_vocabulary_name_index_and_value(
    field: str, ids: list[int], index: int, value: int
) -> None:
    error = refused_params(**{field: ids})
    assert error.kind == "out_of_vocabulary"
    assert error.what.startswith(f"{field}[{index}] is {value}, outside the ")


@pytest.mark.parametrize("token", [-1, 99, 128, 2**31, 5279552648203111001])
def test_a_prompt_id_outside_the_vocabulary_is_refused(token: int) -> None:
    """vllm-project/vllm#51795, vllm-project/vllm#26797: refused by range, never wrapped."""
    error = refusal(request(prompt_token_ids=[1, token, 5, token]))
    assert error.kind == "out_of_vocabulary"
    assert error.what.startswith(f"prompt_token_ids[1] is {token}, outside the input vocabulary")
    assert "1 more" in error.what
    assert error.rule == "0 <= id < 99"


def test_the_last_id_of_the_vocabulary_is_served() -> None:
    """vllm-project/vllm#51795: 98 is an id of a vocabulary of 99."""
    assert check_request(request(prompt_token_ids=(98,)), LIMITS).prompt_token_ids == (98,)


@pytest.mark.parametrize("token", [5.0, True, "7", None, [1]])
def test_a_prompt_id_that_is_no_integer_is_refused(token: object) -> None:
    """vllm-project/vllm#26797: 5.0, true and "7" are not ids."""
    error = refusal(request(prompt_token_ids=[1, token]))
    assert error.kind == "bad_field"
    assert error.what.startswith("prompt_token_ids[1] is ")
    assert "not an integer" in error.what


def test_an_empty_prompt_is_refused() -> None:
    """vLLM's generate protocol asks for at least one id."""
    error = refusal(request(prompt_token_ids=[]))
    assert (error.kind, error.what) == ("empty_prompt", "prompt_token_ids is empty")


@pytest.mark.parametrize("length", [20, 21])
def test_a_prompt_without_room_for_a_token_is_refused_with_both_numbers(length: int) -> None:
    error = refusal(request(prompt_token_ids=(1,) * length))
    assert error.kind == "too_long"
    assert f"{length} tokens" in error.what
    assert "max_model_len is 20" in error.what


def test_a_prompt_one_token_below_the_cap_is_served() -> None:
    """vllm-project/vllm#19337: prompts of 1, 8 and 19 tokens fit a cap of 20."""
    for length in (1, 8, 19):
        check_request(request(prompt_token_ids=(1,) * length), LIMITS)


@pytest.mark.parametrize("value", [1.0, True, None, "\ud800", 2**63, (1,)])
def test_an_id_is_text_or_a_64_bit_integer(value: object) -> None:
    assert refusal(request(id=value)).where.endswith("field id")
    if value is not None:
        assert refusal(request(group=value)).where.endswith("field group")


@pytest.mark.parametrize("metadata", [[1], "text", {"a": object()}, {1: "a"}])
def test_metadata_that_no_line_can_echo_is_refused(metadata: object) -> None:
    assert refusal(request(metadata=metadata)).where.endswith("field metadata")


def test_metadata_nested_too_deep_to_write_is_refused() -> None:
    metadata: dict[str, object] = {}
    for _ in range(250):
        metadata = {"a": metadata}
    assert refusal(request(metadata=metadata)).where.endswith("field metadata")


def test_all_faults_of_a_request_are_reported_together() -> None:
    params = SamplingParams(top_p=1.5, n=0, seed=-1, stop_token_ids=(99,))
    error = refusal(request(prompt_token_ids=(), id=True, params=params, metadata=5))
    places = [fault.where.rpartition("field ")[2] for fault in error.faults]
    assert places == [
        "id",
        "prompt_token_ids",
        "metadata",
        "n",
        "top_p",
        "seed",
        "stop_token_ids",
    ]
    assert all(fault.rule and fault.remedy for fault in error.faults)
    assert pickle.loads(pickle.dumps(error)).kind == error.kind == "bad_field"


def test_an_integer_too_long_to_print_is_refused() -> None:
    for error in (refused_params(seed=10**5000), refused_params(stop_token_ids=[10**5000])):
        assert "too long to print" in error.what


def test_something_else_than_params_is_refused() -> None:
    assert refusal(request(params={"n": 1})).where.endswith("field params")


# -- fields over logits, texts and scores --------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("min_tokens", 1, 1),
        ("repetition_penalty", 1.1, 1.1),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 0.5, 0.5),
        ("stop", "END", ("END",)),
        ("stop", ["a", "END"], ("a", "END")),
        ("include_stop", True, True),
        ("logit_bias", [[5, -1], (6, 2.5)], ((5, -1.0), (6, 2.5))),
        ("allowed_token_ids", np.array([5, 89]), (5, 89)),
        ("top_logprobs", 90, 90),
        ("prompt_logprobs", True, True),
    ],
)
def test_a_field_that_is_asked_for_comes_back_in_its_own_type(
    field: str, value: object, found: object
) -> None:
    given = getattr(checked(**{field: value}), field)
    assert given == found
    assert type(given) is type(found)


def test_the_bound_of_top_logprobs_is_a_thousand_or_the_vocabulary() -> None:
    wide = replace(LIMITS, output_vocab_size=5000)
    asked = request(params=SamplingParams(top_logprobs=1000))
    assert check_request(asked, wide).params.top_logprobs == 1000
    with pytest.raises(RequestError, match="top_logprobs 1001"):
        check_request(request(params=SamplingParams(top_logprobs=1001)), wide)
    assert "90" in refused_params(top_logprobs=91).rule


@pytest.mark.parametrize("stop", ["END", ["unknown", "stop2"]])
def test_a_stop_text_needs_a_tokenizer(stop: object) -> None:
    """ModelTC/LightLLM#1456: a stop text that cannot be looked for is not dropped in silence."""
    with pytest.raises(RequestError) as caught:
        check_request(
            request(params=SamplingParams(stop=stop)),  # type: ignore[arg-type]
            replace(LIMITS, has_tokenizer=False),
        )
    assert caught.value.where.endswith("field stop")
    assert "no tokenizer" in caught.value.what
    assert caught.value.remedy == "use stop_token_ids"


def test_a_prompt_has_no_logprobs_after_truncation() -> None:
    """thinking-machines-lab/tinker-feedback#148: a basis that a value lacks is never replaced."""
    processed = replace(LIMITS, logprob_basis="processed")
    with pytest.raises(RequestError) as caught:
        check_request(request(params=SamplingParams(prompt_logprobs=True)), processed)
    assert caught.value.where.endswith("field prompt_logprobs")


@pytest.mark.parametrize("value", [{"prompt_token_ids": [1]}, [1, 2], None])
def test_what_is_no_request_is_refused_by_name(value: object) -> None:
    with pytest.raises(RequestError, match="is not a Request"):
        check_request(value, LIMITS)  # type: ignore[arg-type]


def test_a_cache_salt_is_text() -> None:
    for salt in (None, "", "tenant 7"):
        assert check_request(request(cache_salt=salt), LIMITS).cache_salt == salt
    for broken in (5, ["a"], True, "\ud800"):
        assert refusal(request(cache_salt=broken)).where.endswith("field cache_salt")


def test_a_prompt_that_no_pool_holds_is_refused_in_blocks() -> None:
    """vllm-project/vllm#39734: needed and available blocks, where the pool sets the length."""
    limits = replace(LIMITS, pool=PoolBound(num_blocks=4, block_size=5), max_model_len=21)
    check_request(request(prompt_token_ids=(1,) * 20), limits)
    with pytest.raises(RequestError) as caught:
        check_request(request(prompt_token_ids=(1,) * 21), limits)
    assert caught.value.kind == "never_fits"
    assert "5 blocks" in caught.value.what
    assert "the KV pool has 4" in caught.value.what


def test_defaults_are_served_in_any_spelling() -> None:
    spelled = {"stop": [], "logit_bias": [], "repetition_penalty": 1, "presence_penalty": 0}
    assert checked(**spelled) == SamplingParams()


def test_every_sampling_field_has_a_rule() -> None:
    assert set(RULES) == {one.name for one in fields(SamplingParams)}


def test_the_runs_defaults_are_the_requests_defaults() -> None:
    defaults = {name: one.default for name, one in options_of(SamplingOptions).items()}
    assert params_of_options(defaults) == SamplingParams()
    changed = params_of_options({**defaults, "n": 8, "temperature": 0.5, "seed": 3})
    assert changed == replace(SamplingParams(), n=8, temperature=0.5)


def test_an_empty_stop_text_among_the_runs_defaults_is_refused_as_an_option() -> None:
    defaults = {name: one.default for name, one in options_of(SamplingOptions).items()}
    served = params_of_options({**defaults, "stop": ("END",)})
    assert served == replace(SamplingParams(), stop=("END",))
    with pytest.raises(ConfigError) as caught:
        params_of_options({**defaults, "stop": ("", "END")})
    assert caught.value.where == "option stop"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(
    params=st.dictionaries(st.sampled_from(sorted(RULES)), json_values, max_size=4),
    prompt=json_values,
)
def test_any_values_are_served_or_refused_and_never_crash(
    params: dict[str, Any], prompt: Any
) -> None:
    asked = request(prompt_token_ids=prompt, params=SamplingParams(**params))
    try:
        found = check_request(asked, LIMITS)
    except RequestError:
        return
    assert all(type(one) is int and 0 <= one < 99 for one in found.prompt_token_ids)
    assert 0 < found.params.top_p <= 1
    assert check_request(found, LIMITS) == found
