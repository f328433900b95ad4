"""Scores of given tokens: the bits that generation reported, however they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams, ScoreRequest
from pagedctl.errors import ConfigError, RequestError
from tests.engine.harness import (
    POISON,
    assert_all_free,
    assert_same_bits,
    assert_same_floats,
    drain,
    run,
    tiny_engine,
)
from tests.reference.tiny_models import FAMILIES, VOCAB, TinyModel, tiny_model
from tests.reference.transformer import log_softmax

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 5},
    {"temperature": 1.3, "min_p": 0.2},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"logit_bias": ((7, 3.0), (9, -4.0))},
    {"allowed_token_ids": tuple(range(20, 50)), "top_logprobs": 3},
    {"n": 3, "temperature": 0.9},
    {"stop_token_ids": tuple(range(1, 40)), "min_tokens": 4},
    {"stop": ("k",), "temperature": 1.1},
)
PIECES = ["<unk>", *(chr(ord("a") + place % 26) * (place // 26 + 1) for place in range(VOCAB - 1))]
PROMPTS = [
    tuple(np.random.default_rng(place).integers(1, POISON, length).tolist())
    for place, length in enumerate((1, 3, 4, 5, 8, 9, 17, 33, 16, 2, 12))
]


def build(folder: Path, *, model: TinyModel | None = None, **options: Any) -> Engine:
    chosen = {"dtype": torch.float32, "block_size": 4, "pieces": PIECES, **options}
    return tiny_engine(model or tiny_model("qwen3"), folder, **chosen)


def sampled(engine: Engine) -> list[Completion]:
    """One request of every kind of sampling."""
    return engine.generate(
        Request(
            id=place,
            prompt_token_ids=prompt,
            params=SamplingParams(**{"seed": place, "max_tokens": 12, "ignore_eos": True, **how}),
        )
        for place, (prompt, how) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    )


def request_of(done: Completion, key: int = 0) -> ScoreRequest:
    return ScoreRequest(
        id=key,
        token_ids=(*done.prompt_token_ids.tolist(), *done.token_ids.tolist()),
        start=len(done.prompt_token_ids),
        temperature=done.temperature,
    )


def scored(engine: Engine, asked: Sequence[ScoreRequest]) -> list[NDArray[np.float32]]:
    """The scores in the order of *asked*; audits the books after every one."""
    found = {}
    for one in engine.scores(asked):
        engine.parts.scheduler.audit()
        assert one.error is None
        found[one.id] = one.logprobs
    assert_all_free(engine)
    return [found[one.id] for one in asked]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    with build(tmp_path_factory.mktemp("generated")) as engine:
        done = sampled(engine)
    assert {one.finish_reason for one in done} == {"stop", "length"}
    assert any(isinstance(one.stop_reason, str) for one in done)
    return done


LEGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "no cache": {"prefix_cache": False},
    "chunks": {"chunk_size": 3},
    "tiny budget": {"max_num_batched_tokens": 5},
    "one at a time": {"max_num_seqs": 1},
    "block 1": {"block_size": 1},
    "block 16": {"block_size": 16},
    "lag": {"lag": 1, "chunk_size": 5},
    "forced preemption": {"debug_force_preemption_interval": 2, "chunk_size": 4},
    "forced preemption, lag": {"debug_force_preemption_interval": -2, "chunk_size": 4, "lag": 1},
    "small pool": {"pool_blocks": 12, "chunk_size": 6},
}


@pytest.mark.parametrize("leg", LEGS)
def test_a_score_has_the_bits_that_generation_reported(
    tmp_path: Path, leg: str, generated: list[Completion]
) -> None:
    """vllm-project/vllm#32480, #34683: equality of float32, cold and warm."""
    asked = [request_of(done, key) for key, done in enumerate(generated)]
    with build(tmp_path, **LEGS[leg]) as engine:
        cold = scored(engine, asked)
        hits = engine.stats().prefix_hit_tokens
        warm = scored(engine, asked[::-1])[::-1]
        stats = engine.stats()
    for done, one, again in zip(generated, cold, warm, strict=True):
        assert_same_floats(one, done.logprobs)
        assert_same_floats(again, done.logprobs)
    if "preemption" in leg:
        assert stats.preemptions > 0
    assert (stats.prefix_hit_tokens > hits) == (leg != "no cache")


@pytest.mark.parametrize("basis", ["scaled", "raw"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_after_generation_on_one_engine_are_its_logprobs(
    tmp_path: Path, family: str, basis: str
) -> None:
    """thinking-machines-lab/tinker-feedback#148: of the basis that both results name."""
    model = tiny_model(family)
    with build(tmp_path, model=model, logprob_basis=basis, lag=1, chunk_size=7) as engine:
        done = sampled(engine)
        found = scored(engine, [request_of(one, key) for key, one in enumerate(done)])
        (named,) = engine.scores([request_of(done[0])])
        assert engine.stats().prefix_hit_tokens > 0
    assert named.logprob_basis == done[0].logprob_basis == basis
    for one, logprobs in zip(done, found, strict=True):
        assert_same_floats(logprobs, one.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.0])
def test_scores_equal_a_float64_transformer(
    tmp_path: Path, family: str, temperature: float
) -> None:
    model = tiny_model(family)
    sequences = [list(prompt) for prompt in PROMPTS]
    with build(tmp_path, model=model, dtype=torch.float64, chunk_size=5) as engine:
        found = engine.score(sequences, temperature=temperature)
    for ids, one in zip(sequences, found, strict=True):
        rows = log_softmax(model.reference().logits(ids)[:-1] / (temperature or 1.0))
        expected = rows[np.arange(len(ids) - 1), ids[1:]]
        assert one.logprobs.dtype == np.float32
        assert (one.start, one.temperature) == (1, temperature)
        np.testing.assert_allclose(one.logprobs, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cache", [False, True])
def test_a_start_anywhere_gives_the_last_of_the_same_bits(tmp_path: Path, cache: bool) -> None:
    ids = PROMPTS[7]
    with build(tmp_path, chunk_size=6, prefix_cache=cache) as engine:
        (whole,) = engine.score([ids])
        hits = set()
        for start in range(1, len(ids) + 1):
            before = engine.stats().prefix_hit_tokens
            (part,) = engine.score([ids], start=start)
            assert_same_floats(part.logprobs, whole.logprobs[start - 1 :])
            hits.add(engine.stats().prefix_hit_tokens - before)
        parts = engine.score([ids] * 4, start=[1, 9, 17, 33])
    assert hits == ({0, 4, 8, 12, 16, 20, 24, 28} if cache else {0})
    assert [len(one.logprobs) for one in parts] == [32, 24, 16, 0]


def test_a_sequence_may_be_as_long_as_the_cap(tmp_path: Path) -> None:
    """A prompt must leave room for one token, a sequence that is scored need not."""
    ids = tuple(np.random.default_rng(0).integers(1, VOCAB, 40).tolist())
    with build(tmp_path, max_model_len=40, chunk_size=16) as engine:
        (whole,) = engine.score([ids])
        assert len(whole.logprobs) == 39
        (none,) = engine.score([ids], start=40)
        assert none.logprobs.shape == (0,)
        (single,) = engine.score([ids[:1]])
        assert single.logprobs.shape == (0,)
        with pytest.raises(RequestError) as caught:
            engine.score([ids, (*ids, 1)])
        assert caught.value.kind == "too_long"
        assert "41 tokens" in caught.value.what
        assert_all_free(engine)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_sequence_may_fill_the_pool_that_sets_the_cap(tmp_path: Path, lag: int) -> None:
    """Its last token is never fed: 17 tokens need the keys and values of 16."""
    ids = tuple(np.random.default_rng(0).integers(1, VOCAB, 17).tolist())
    with build(tmp_path / "small", pool_blocks=4, lag=lag) as engine:
        assert engine.config.max_model_len == 17
        (full,) = engine.score([ids])
        with pytest.raises(RequestError) as caught:
            engine.score([(*ids, 1)])
        assert caught.value.kind == "never_fits"
        assert_all_free(engine)
    with build(tmp_path / "ample") as engine:
        assert_same_floats(engine.score([ids])[0].logprobs, full.logprobs)


def test_equal_prompts_are_scored_side_by_side(tmp_path: Path) -> None:
    """Nobody waits for keys and values that he must compute himself for his scores."""
    prompt = PROMPTS[7]
    sequences = [(*prompt, token) for token in range(1, 9)]
    with build(tmp_path) as engine:
        engine.score(sequences)
        assert engine.stats().steps == 1


def test_equal_prompts_are_computed_once_where_only_what_follows_is_scored(
    tmp_path: Path,
) -> None:
    prompt = PROMPTS[7]
    sequences = [(*prompt, token, 5, 6) for token in range(1, 9)]
    with build(tmp_path) as engine:
        found = engine.score(sequences, start=len(prompt))
        assert engine.stats().forward_tokens == 35 + 7 * 3
        alone = [engine.score([ids], start=len(prompt))[0] for ids in sequences]
    for one, other in zip(found, alone, strict=True):
        assert_same_floats(one.logprobs, other.logprobs)


def test_processed_scores_are_refused(tmp_path: Path) -> None:
    with (
        build(tmp_path, logprob_basis="processed") as engine,
        pytest.raises(ConfigError, match="no logprobs of basis processed"),
    ):
        engine.score([[1, 2]])


@pytest.mark.parametrize(
    ("arguments", "where", "words"),
    [
        ({"sequences": [[]]}, "score 0, field token_ids", "empty"),
        ({"sequences": [[1], [1, VOCAB]]}, "score 1, field token_ids", "token_ids[1] is 99"),
        ({"sequences": [[1, True]]}, "score 0, field token_ids", "not an integer"),
        ({"sequences": [[1, 2]], "start": 0}, "score 0, field start", "start 0"),
        ({"sequences": [[1, 2]], "start": 3}, "score 0, field start", "start 3"),
        ({"sequences": [[1, 2]], "start": True}, "score 0, field start", "start true"),
        ({"sequences": [[1, 2]], "start": 1.0}, "score 0, field start", "start 1.0"),
        ({"sequences": [[1, 2]], "start": [1, 1]}, "score, field start", "2 starts"),
        ({"sequences": [[1, 2]], "temperature": -1}, "score 0, field temperature", "-1"),
        ({"sequences": [[1, 2]], "temperature": "1"}, "score 0, field temperature", "1"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_runs(
    tmp_path: Path, arguments: dict[str, Any], where: str, words: str
) -> None:
    with build(tmp_path) as engine:
        with pytest.raises(RequestError) as caught:
            engine.score(**arguments)
        assert caught.value.where == where
        assert words in caught.value.what
        assert engine.stats().steps == 0
        assert not engine.has_unfinished()


def test_arrays_are_taken_for_ids_and_starts(tmp_path: Path) -> None:
    ids = np.array([PROMPTS[6], PROMPTS[6][::-1]], dtype=np.int64)
    with build(tmp_path) as engine:
        plain = engine.score(ids.tolist(), start=3)
        for given, start in ((ids, np.int64(3)), (torch.from_numpy(ids), np.array([3, 3]))):
            for one, other in zip(engine.score(given, start=start), plain, strict=True):  # type: ignore[arg-type]
                assert_same_floats(one.logprobs, other.logprobs)


def test_a_stream_of_scores_reads_two_batches_ahead_and_no_more(tmp_path: Path) -> None:
    read = 0

    def requests() -> Iterator[ScoreRequest]:
        nonlocal read
        for number in range(40):
            read += 1
            yield ScoreRequest(id=f"s{number}", sample=number % 3, token_ids=PROMPTS[number % 11])

    with build(tmp_path, max_num_seqs=4) as engine:
        answered = 0
        for one in engine.scores(requests()):
            answered += 1
            number = int(str(one.id)[1:])
            assert one.sample == number % 3
            assert len(one.logprobs) == len(PROMPTS[number % 11]) - 1
            assert read <= answered + 8
        assert answered == read == 40
        assert list(engine.scores([])) == []


@pytest.mark.parametrize("lag", [0, 1])
def test_a_sequence_that_is_not_finite_fails_by_its_id_alone(tmp_path: Path, lag: int) -> None:
    """huggingface/trl#6166: others keep their bits, and a score is never made up."""
    good = [ScoreRequest(id=place, token_ids=ids) for place, ids in enumerate(PROMPTS)]
    bad = ScoreRequest(id="bad", sample=2, token_ids=(1, 2, POISON, 3))
    untouched = ScoreRequest(id="last", token_ids=(1, 2, 3, POISON))  # its last token is not fed
    with build(tmp_path / "good", lag=lag) as engine:
        expected = scored(engine, good)
    with build(tmp_path / "bad", lag=lag, poisoned=True, chunk_size=2) as engine:
        for _ in range(2):
            found = {one.id: one for one in engine.scores([bad, *good, untouched])}
            assert_all_free(engine)
            error = found["bad"].error
            assert error is not None
            assert (error.kind, error.where) == ("non_finite", 'score "bad", sample 2')
            assert found["bad"].logprobs.shape == (0,)
            assert found["last"].error is None
            for place, logprobs in enumerate(expected):
                assert_same_floats(found[place].logprobs, logprobs)


# -- the logprobs of a prompt --------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("chunk_size", [7, 128])
def test_prompt_logprobs_asked_for_again_equal_the_first_answer(
    tmp_path: Path, length: int, chunk_size: int
) -> None:
    """vllm-project/vllm#3251, #8268, #17251: block 32, prompts of 31, 32 and 33; cache warm."""
    ids = tuple(np.random.default_rng(length).integers(1, VOCAB, length).tolist())
    params = SamplingParams(seed=1, max_tokens=3, prompt_logprobs=True, temperature=0.8)
    request = Request(id=0, prompt_token_ids=ids, params=params)
    without = Request(id=0, prompt_token_ids=ids, params=SamplingParams(seed=1, max_tokens=3))
    with build(tmp_path, block_size=32, chunk_size=chunk_size) as engine:
        engine.generate([without])
        (first,) = engine.generate([request])
        (second,) = engine.generate([request])
        hits = engine.stats().prefix_hit_tokens
        engine.generate([without])
        assert engine.stats().prefix_hit_tokens - hits == (length - 1) // 32 * 32
        (scores,) = engine.score([ids], temperature=0.8)
    assert_same_bits(first, second)
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs.shape == (length - 1,)
    assert (first.prompt_logprobs < 0).all()
    assert_same_floats(first.prompt_logprobs, scores.logprobs)


@pytest.mark.parametrize("lag", [0, 1])
def test_samples_share_the_logprobs_of_their_prompt(tmp_path: Path, lag: int) -> None:
    """The prompt is computed and scored by one of them, in steps of one chunk each."""
    ids = PROMPTS[7]
    params = SamplingParams(n=4, seed=3, max_tokens=2, prompt_logprobs=True, ignore_eos=True)
    request = Request(id="x", prompt_token_ids=ids, params=params)
    with build(tmp_path, lag=lag, chunk_size=8) as engine:
        found = run(engine, [request])
        (scores,) = engine.score([ids])
    for sample in range(4):
        logprobs = found.completions["x", sample].prompt_logprobs
        assert logprobs is not None
        assert_same_floats(logprobs, scores.logprobs)
    assert found.forward_tokens <= 33 + 3 * 1 + 4 * 2
    assert found.hit_tokens == 3 * 32


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("length", [2, 15, 32])
def test_a_prompt_is_scored_once_whatever_its_blocks_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, prefix_cache: bool, lag: int
) -> None:
    """Eight samples, a prompt whose end fills no block: its rows pass the head once."""
    params = SamplingParams(n=8, seed=3, max_tokens=2, prompt_logprobs=True, ignore_eos=True)
    request = Request(id="x", prompt_token_ids=PROMPTS[7][:length], params=params)
    scored: list[int] = []
    with build(tmp_path, lag=lag, chunk_size=6, prefix_cache=prefix_cache) as engine:
        sampler = engine.parts.runner.sampler
        plain = sampler.score

        def counted(hidden: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            scored.append(len(hidden))
            return plain(hidden, *rest)

        monkeypatch.setattr(sampler, "score", counted)
        found = run(engine, [request])
    assert sum(scored) == length - 1
    logprobs = [found.completions["x", sample].prompt_logprobs for sample in range(8)]
    for one in logprobs:
        assert one is not None
        assert logprobs[0] is not None
        assert_same_floats(one, logprobs[0])


def test_prompt_logprobs_of_mates_are_each_their_own(tmp_path: Path) -> None:
    asked = [
        Request(
            id=place,
            prompt_token_ids=ids,
            params=SamplingParams(seed=place, max_tokens=4, prompt_logprobs=place % 2 == 0),
        )
        for place, ids in enumerate(PROMPTS)
    ]
    options = {"debug_force_preemption_interval": 2, "chunk_size": 3, "lag": 1}
    with build(tmp_path, **options) as engine:
        for one in asked:
            engine.submit(one)
        found = drain(engine)
        assert engine.stats().preemptions > 0
        expected = engine.score(PROMPTS)
    for place in range(len(PROMPTS)):
        logprobs = found[place, 0].prompt_logprobs
        assert (logprobs is not None) == (place % 2 == 0)
        if logprobs is not None:
            assert_same_floats(logprobs, expected[place].logprobs)
