"""Scores of given tokens: which positions a step scores, and what has been delivered."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedctl.engine.prompt_scores import PromptScores


def right(scores: PromptScores) -> list[float]:
    """The score of a token is its index."""
    return [float(index) for index in range(scores.start, scores.end)]


def deliver(scores: PromptScores, start: int, offsets: tuple[int, int]) -> None:
    first, end = offsets
    position = start + first
    values = np.arange(position + 1, position + 1 + end - first, dtype=np.float32)
    scores.deliver(position, values)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
@pytest.mark.parametrize(("start", "end"), [(1, 2), (1, 9), (4, 9), (8, 9), (3, 7)])
def test_chunks_score_every_token_once_and_none_before_the_start(
    start: int, end: int, chunk: int
) -> None:
    scores = PromptScores(start=start, end=end)
    scored: list[int] = []
    for first in range(0, 12, chunk):
        offsets = scores.offsets(first, chunk)
        assert 0 <= offsets[0] <= offsets[1] <= chunk
        scored += range(first + offsets[0], first + offsets[1])
        if offsets != (0, 0):
            deliver(scores, first, offsets)
    assert scored == list(range(start - 1, end - 1))
    assert scores.is_complete
    assert scores.values().tolist() == right(scores)


def test_what_is_known_is_not_scored_again_and_what_is_in_flight_is() -> None:
    scores = PromptScores(start=1, end=9)
    assert scores.offsets(0, 4) == (0, 4)
    assert scores.offsets(4, 4) == (0, 4)
    deliver(scores, 0, (0, 4))
    assert scores.first_position == 4
    assert scores.offsets(0, 4) == (0, 0)
    assert scores.offsets(2, 4) == (2, 4)
    deliver(scores, 4, (0, 4))
    assert scores.is_complete
    assert scores.offsets(7, 4) == scores.offsets(0, 64) == (0, 0)


def test_nothing_to_score_is_complete_from_the_start() -> None:
    scores = PromptScores(start=5, end=5)
    assert scores.is_complete
    assert scores.offsets(0, 64) == scores.offsets(4, 1) == (0, 0)
    assert scores.values().shape == (0,)


def test_the_same_scores_may_come_twice_but_never_with_a_gap() -> None:
    scores = PromptScores(start=3, end=9)
    deliver(scores, 2, (0, 3))
    deliver(scores, 2, (0, 2))
    assert scores.num_scored == 3
    with pytest.raises(RuntimeError, match="from 4 on, but only 3"):
        deliver(scores, 6, (0, 2))
    assert scores.values().tolist() == [3.0, 4.0, 5.0, 0.0, 0.0, 0.0]


def test_values_are_a_copy() -> None:
    scores = PromptScores(start=1, end=3)
    scores.values()[0] = 7
    assert scores.values().tolist() == [0.0, 0.0]
    assert scores.values().dtype == np.float32


@pytest.mark.parametrize("seed", range(20))
def test_samples_that_share_scores_complete_them_in_any_order(seed: int) -> None:
    """Each computes from where it may skip to, in chunks of its own, one step behind or not."""
    rng = random.Random(seed)
    scores = PromptScores(start=rng.randint(1, 6), end=20)
    places = [0, 0, 0]
    in_flight: list[tuple[int, tuple[int, int]]] = []
    for _ in range(200):
        one = rng.randrange(3)
        if rng.random() < 0.1:
            places[one] = rng.randint(0, scores.first_position)
        count = min(rng.randint(1, 6), 20 - places[one])
        offsets = scores.offsets(places[one], count)
        if offsets != (0, 0):
            in_flight.append((places[one], offsets))
        places[one] += count
        while len(in_flight) > rng.randint(0, 2):
            deliver(scores, *in_flight.pop(0))
    for waiting in in_flight:
        deliver(scores, *waiting)
    assert scores.is_complete
    assert scores.values().tolist() == right(scores)
