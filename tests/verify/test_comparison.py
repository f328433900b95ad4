"""Answers are compared bit for bit, and the first place where they differ is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagedctl.engine.request import TopLogprobs
from pagedctl.verify.comparison import Answer, Difference, Divergence, first_difference
from pagedctl.verify.float_bits import bits, ulps


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def top(*rows: tuple[int, float]) -> TopLogprobs:
    return TopLogprobs(
        token_ids=ids(*(token for token, _ in rows))[:, None],
        logprobs=floats(*(value for _, value in rows))[:, None],
    )


ANSWER = Answer(
    start=4,
    token_ids=ids(7, 8, 9),
    logprobs=floats(-1.0, -0.0, -2.5),
    prompt_logprobs=floats(-3.0, -4.0, -5.0),
    top=top((7, -1.0), (8, -0.0), (1, -0.5)),
)
NEXT = np.nextafter(np.float32(-2.5), np.float32(0))


def test_equal_answers_have_no_difference() -> None:
    again = replace(ANSWER, token_ids=ids(7, 8, 9), logprobs=floats(-1.0, -0.0, -2.5))
    assert first_difference(ANSWER, again) is None


def test_minus_zero_is_not_zero() -> None:
    found = first_difference(ANSWER, replace(ANSWER, logprobs=floats(-1.0, 0.0, -2.5)))
    assert found is not None
    assert (found.kind, found.position, found.ulps) == ("logprob", 5, 1)
    assert found.sentence() == "position 5, logprob -0.0 became 0.0, 1 ulp"


def test_a_nan_equals_itself_and_no_other_nan() -> None:
    one = floats(-1.0, np.nan, -2.5)
    other = one.copy()
    assert first_difference(replace(ANSWER, logprobs=one), replace(ANSWER, logprobs=other)) is None
    other.view(np.int32)[1] ^= 1
    found = first_difference(replace(ANSWER, logprobs=one), replace(ANSWER, logprobs=other))
    assert found is not None
    assert (found.position, found.ulps) == (5, 1)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token_ids": ids(7, 3, 9)}, ("token", 5, 8, 3, None)),
        ({"logprobs": floats(-1.0, -0.0, NEXT)}, ("logprob", 6, np.float32(-2.5), NEXT, 1)),
        (
            {"prompt_logprobs": floats(-3.0, -8.0, -5.0)},
            ("prompt logprob", 2, np.float32(-4), np.float32(-8), 1 << 23),
        ),
        ({"top": top((7, -1.0), (8, -0.0), (2, -0.5))}, ("top token", 6, 1, 2, None)),
        (
            {"top": top((7, -2.0), (8, -0.0), (1, -0.5))},
            ("top logprob", 4, np.float32(-1), np.float32(-2), 1 << 23),
        ),
        ({"token_ids": ids(7, 8), "logprobs": floats(-1, -0.0)}, ("length", 6, 3, 2, None)),
        ({"failure": "non_finite"}, ("failure", 7, None, "non_finite", None)),
        ({"prompt_logprobs": None}, ("prompt logprob", 1, 3, None, None)),
        ({"top": None}, ("top token", 4, 1, None, None)),
    ],
)
def test_each_kind_of_difference_is_told_with_its_place(
    change: dict[str, Any], expected: tuple[object, ...]
) -> None:
    found = first_difference(ANSWER, replace(ANSWER, **change))
    assert found is not None
    assert (found.kind, found.position, found.expected, found.found, found.ulps) == expected


def test_the_first_place_wins_and_there_the_id_before_its_logprob() -> None:
    """vllm-project/vllm#32480: the first divergent position, of ids or of logprobs."""
    late = replace(ANSWER, token_ids=ids(7, 8, 1), logprobs=floats(-1.0, -0.5, -9.0))
    found = first_difference(ANSWER, late)
    assert found is not None
    assert (found.kind, found.position) == ("logprob", 5)
    both = replace(ANSWER, token_ids=ids(1, 8, 9), logprobs=floats(-9.0, -0.0, -2.5))
    found = first_difference(ANSWER, both)
    assert found is not None
    assert (found.kind, found.position) == ("token", 4)


def test_a_part_is_compared_at_its_own_positions() -> None:
    part = ANSWER.part(1, 2)
    assert (part.start, part.token_ids.tolist(), part.prompt_logprobs) == (5, [8], None)
    other = Answer(start=5, token_ids=ids(6), logprobs=floats(-0.0), top=top((8, -0.0)))
    found = first_difference(part, other)
    assert found is not None
    assert (found.kind, found.position) == ("token", 5)
    assert first_difference(ANSWER.part(0, None), ANSWER) is None


def test_random_bits_are_equal_only_to_themselves() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-(2**31), 2**31, 4000, dtype=np.int64).astype(np.int32)
    one = values.view(np.float32)
    for place in rng.integers(0, len(one), 50):
        other = one.copy()
        other.view(np.uint32)[place] ^= np.uint32(1 << int(rng.integers(0, 32)))
        base = Answer(start=3, token_ids=np.zeros(len(one), np.int32), logprobs=one)
        found = first_difference(base, replace(base, logprobs=other))
        assert found is not None
        assert found.position == 3 + place
        assert found.ulps is not None
        assert found.ulps > 0


def test_ulps_count_neighbours_over_zero() -> None:
    tiny = np.float32(2.0**-149)
    assert ulps(floats(-tiny), floats(tiny)).tolist() == [3]
    assert bits(floats(1.0)).tolist() == [0x3F800000]


def test_a_divergence_names_case_run_request_and_place() -> None:
    difference = Difference(
        kind="logprob", position=41, expected=np.float32(-1.25), found=NEXT, ulps=1234
    )
    found = Divergence(
        case="packed",
        run="33 rows",
        request_id="q17",
        asked_id="q17",
        sample=1,
        difference=difference,
    )
    assert found.sentence() == (
        'case packed, run 33 rows: request "q17", sample 1, position 41, logprob -1.25 became '
        f"{NEXT!s}, 1,234 ulps"
    )
    assert found.to_json_object() == {
        "case": "packed",
        "run": "33 rows",
        "id": "q17",
        "sample": 1,
        "kind": "logprob",
        "position": 41,
        "expected": np.float32(-1.25),
        "found": NEXT,
        "ulps": 1234,
    }
