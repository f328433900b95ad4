"""Edits of logits that cannot be served are refused where they are submitted."""

from __future__ import annotations

from typing import Any

import pytest

from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.request_check import RequestLimits, check_request
from pagedctl.errors import RequestError

LIMITS = RequestLimits(
    input_vocab_size=99, output_vocab_size=90, max_model_len=40, eos_token_ids=(0, 7)
)


def checked(**params: Any) -> SamplingParams:
    asked = Request(id=1, prompt_token_ids=(5, 6), params=SamplingParams(**params))
    return check_request(asked, LIMITS).params


def refusal(**params: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        checked(**params)
    assert len(caught.value.faults) == 1
    return caught.value


@pytest.mark.parametrize("bias", [3.5e38, -1e39, float("nan"), float("inf")])
def test_a_bias_is_finite_in_float32(bias: float) -> None:
    error = refusal(logit_bias=[[5, 1.0], [6, bias]])
    assert error.where.endswith("field logit_bias")
    assert "logit_bias[1][1]" in error.what


def test_a_token_has_one_bias() -> None:
    error = refusal(logit_bias=[[5, 1.0], [6, 2.0], [5, 1.0]])
    assert error.what == "logit_bias[2][0] is 5, which has a bias already"
    assert checked(logit_bias=[[5, 1.0], [6, 1.0]]).logit_bias == ((5, 1.0), (6, 1.0))


@pytest.mark.parametrize("penalty", [0, -1, 1e-39, 1e39])
def test_a_repetition_penalty_is_positive_and_finite_in_float32(penalty: float) -> None:
    assert refusal(repetition_penalty=penalty).where.endswith("field repetition_penalty")


def test_min_tokens_is_at_most_max_tokens() -> None:
    error = refusal(min_tokens=9, max_tokens=8)
    assert error.what == "min_tokens 9 is above max_tokens 8"
    assert error.where.endswith("field min_tokens")
    assert checked(min_tokens=8, max_tokens=8).min_tokens == 8
    assert checked(min_tokens=8).min_tokens == 8


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [0, 7]},
        {"allowed_token_ids": [0, 5], "stop_token_ids": [5]},
        {"allowed_token_ids": [5], "stop_token_ids": [5], "ignore_eos": True},
    ],
)
def test_a_row_whose_every_allowed_token_is_barred_is_refused(params: dict[str, Any]) -> None:
    error = refusal(min_tokens=1, **params)
    assert error.where.endswith("field allowed_token_ids")
    assert checked(**params).min_tokens == 0


def test_end_tokens_that_do_not_end_may_be_the_only_ones() -> None:
    assert checked(min_tokens=1, allowed_token_ids=[0, 7], ignore_eos=True).min_tokens == 1
    assert checked(min_tokens=1, allowed_token_ids=[0, 8]).min_tokens == 1
