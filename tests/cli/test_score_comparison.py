"""Bits of logprobs: what counts as a difference, how far it is, and which one is the first."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedctl.cli.score_comparison import Comparison
from pagedctl.engine.request import Scores
from pagedctl.engine.score_fields import GivenSequence
from pagedctl.engine.score_lines import ScoreLine

START = 2
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def line_of(logprobs: list[float], *, number: int = 1) -> ScoreLine:
    ids = array("i", range(10, 10 + START + len(logprobs)))
    return ScoreLine(
        id=f"q{number}",
        sample=0,
        line_number=number,
        where="here",
        sequence=GivenSequence(token_ids=ids, start=START),
        temperature=1.0,
        logprobs=array("f", logprobs),
    )


def scores_of(line: ScoreLine, logprobs: Any) -> Scores:
    return Scores(
        id=line.id,
        sample=line.sample,
        start=START,
        temperature=1.0,
        logprob_basis="scaled",
        logprobs=np.array(logprobs, dtype=np.float32),
        weight_version_first=0,
        weight_version_last=0,
    )


def compared(given_: list[float], scored: list[float]) -> Comparison:
    comparison = Comparison()
    line = line_of(given_)
    comparison.compare(line, scores_of(line, scored))
    return comparison


@given(st.lists(FINITE, min_size=1), st.data())
def test_equal_bits_are_equal_and_a_single_other_one_is_not(values: list[float], data: Any) -> None:
    same = compared(values, values)
    assert (same.num_equal, same.num_differing, same.first) == (1, 0, None)
    place = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(FINITE.filter(lambda one: np.float32(one).tobytes() != bits(values[place])))
    found = compared(values, [*values[:place], other, *values[place + 1 :]])
    assert (found.num_equal, found.num_tokens_differing) == (0, 1)
    assert found.first is not None
    assert found.first.position == START + place
    assert found.first.token_id == 10 + START + place
    assert found.first.ulps == found.max_ulps >= 1


def bits(value: float) -> bytes:
    return np.float32(value).tobytes()


@pytest.mark.parametrize("start", [-1.0, -1.1754944e-38, -0.0, 0.0, -16777216.0, -1e-45])
def test_ulps_count_steps_between_neighbours(start: float) -> None:
    """An independent walk: nextafter, and one more step from -0.0 to 0.0."""
    value = np.float32(start)
    for steps in range(1, 6):
        if value == 0 and np.signbit(value):
            value = np.float32(0.0)
        else:
            value = np.nextafter(value, np.float32(np.inf))
            if value == 0:
                value = np.float32(-0.0)
        assert compared([start], [float(value)]).max_ulps == steps
        assert compared([float(value)], [start]).max_ulps == steps


def test_the_first_difference_is_that_of_the_first_line_whatever_ends_first() -> None:
    comparison = Comparison()
    for number in (7, 3, 5):
        line = line_of([-1.0, -2.0, -3.0], number=number)
        comparison.compare(line, scores_of(line, [-1.0, -2.5, -3.5]))
    assert comparison.first is not None
    assert (comparison.first.id, comparison.first.position) == ("q3", START + 1)
    assert comparison.num_tokens_differing == 6
    assert comparison.verdict(3).holds is False


def test_a_verdict_holds_only_if_every_line_was_compared_and_something_was() -> None:
    one = compared([-1.0], [-1.0])
    assert (one.verdict(1).holds, one.verdict(1).text) == (True, "equal 1 of 1")
    assert (one.verdict(2).holds, one.verdict(2).text) == (None, "equal 1 of 2")
    assert Comparison().verdict(0).holds is None
    assert compared([], []).verdict(1).holds is None


def test_logprobs_of_another_count_are_a_fault_of_ours() -> None:
    with pytest.raises(RuntimeError, match="logprobs"):
        compared([-1.0, -2.0], [-1.0])
