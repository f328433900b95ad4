"""The requests of a proof follow from a seed and names, and cover what they are there for."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest

from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import ConfigError
from pagedctl.models.locate import EMBEDDED_FOLDER
from pagedctl.models.tokenizer import load_tokenizer
from pagedctl.models.tokenizer_files import find_tokenizer_files
from pagedctl.rollout.word_problems import stream
from pagedctl.verify.invariance_requests import (
    LONG_LENGTHS,
    MixedPrompts,
    RandomPrompts,
    RequestMaker,
    WordProblemPrompts,
)


def maker(*, max_model_len: int = 2048, max_tokens: int = 64, seed: int = 0) -> RequestMaker:
    return RequestMaker(
        source=RandomPrompts(300),
        max_prompt=max_model_len - max_tokens,
        max_tokens=max_tokens,
        block_size=16,
        seed=seed,
    )


def test_the_same_seed_gives_the_same_requests_and_a_prefix_of_more() -> None:
    assert maker().requests(64)[:20] == maker().requests(20)
    assert maker().requests(8) != maker(seed=1).requests(8)


def test_requests_do_not_follow_the_hash_seed_of_the_process() -> None:
    code = (
        "from tests.verify.test_invariance_requests import maker\n"
        "import hashlib\n"
        "print(hash('a'))\n"
        "print(hashlib.sha256(repr((maker().requests(20), maker().fillers('x', 5)))"
        ".encode()).hexdigest())"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert outputs[0][0] != outputs[1][0]
    assert outputs[0][1] == outputs[1][1]


def test_they_are_greedy_and_seeded_long_short_and_stemmed() -> None:
    asked = maker().requests(64)
    assert {one.params.temperature for one in asked} == {0.0, 1.0}
    assert len({one.params.seed for one in asked}) == 64
    assert all(one.params.ignore_eos and one.params.max_tokens == 64 for one in asked)
    lengths = [len(one.prompt_token_ids) for one in asked]
    assert set(LONG_LENGTHS) <= set(lengths)
    assert min(lengths) <= 8
    starts = [one.prompt_token_ids[:32] for one in asked]
    assert max(starts.count(one) for one in starts) >= 8
    crossing = [one for one in lengths if one < 256 < one + 64]
    assert crossing


def test_a_small_model_gets_prompts_that_fit() -> None:
    small = maker(max_model_len=40, max_tokens=30)
    asked = [*small.requests(32), *small.fillers("a", 20), *small.fillers("b", 9, max_tokens=99)]
    for one in asked:
        assert one.params.max_tokens is not None
        assert 1 <= len(one.prompt_token_ids) <= 40 - one.params.max_tokens
        assert all(0 <= token < 300 for token in one.prompt_token_ids)


def test_fillers_vary_with_their_name_alone() -> None:
    assert maker().fillers("a", 5) == maker().fillers("a", 7)[:5]
    assert maker().fillers("a", 5) != maker().fillers("b", 5)
    assert {one.params.max_tokens for one in maker().fillers("c", 3, max_tokens=80)} == {80}


def test_no_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens 39 leaves no room for a prompt"):
        RequestMaker.of(RandomPrompts(9), max_model_len=40, max_tokens=39, block_size=16)


def test_given_prompts_keep_their_ids_and_the_long_ones_are_all_refused() -> None:
    params = SamplingParams(temperature=0.3)
    given = [
        Request(id=f"q{place}", prompt_token_ids=(5,) * length, params=params, cache_salt="s")
        for place, length in enumerate((3, 10))
    ]
    found = maker(max_model_len=40, max_tokens=30).of_prompts(given)
    assert [one.id for one in found] == ["q0", "q1"]
    assert [one.cache_salt for one in found] == ["s", "s"]
    assert [one.params.temperature for one in found] == [0.0, 1.0]
    with pytest.raises(ConfigError) as caught:
        maker(max_model_len=32, max_tokens=30).of_prompts(given)
    assert [one.where for one in caught.value.faults] == [
        "option prompts, request q0",
        "option prompts, request q1",
    ]


def test_a_mixture_draws_from_both_sources_and_keeps_lengths() -> None:
    mixed = MixedPrompts(RandomPrompts(10), RandomPrompts(10_000))
    prompts = [mixed.draw(Random(place), 8) for place in range(40)]
    small = sum(max(one) < 10 for one in prompts)
    assert 10 <= small <= 30
    assert {len(one) for one in prompts} == {8}
    assert mixed.draw(Random(1), 8) == prompts[1]


def test_the_embedded_model_is_asked_word_problems() -> None:
    tokenizer = load_tokenizer(find_tokenizer_files(EMBEDDED_FOLDER))
    assert tokenizer is not None
    prompts = WordProblemPrompts(tokenizer)
    problem = next(stream(Random(1).getrandbits(48), "heldout"))
    assert prompts.draw(Random(1)) == tuple(tokenizer.encode(problem.prompt))
    assert len(prompts.draw(Random(1), 300)) == 300
    assert prompts.draw(Random(2), 300) != prompts.draw(Random(3), 300)
