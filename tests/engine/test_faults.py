"""A value that is not finite fails the requests that meet it, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams
from tests.engine.harness import (
    POISON,
    Key,
    Trace,
    assert_prefix_bits,
    assert_same_bits,
    run,
    tiny_engine,
)
from tests.reference.tiny_models import FAMILIES, tiny_model

CLEAN = tuple(np.random.default_rng(3).integers(1, POISON, 40).tolist())
PLACES = {"first chunk": 1, "chunk end": 4, "later chunk": 9, "last token": 15}
lags = pytest.mark.parametrize("lag", [0, 1])


def asked(name: int | str, prompt: tuple[int, ...], **params: Any) -> Request:
    chosen = {"seed": 5, "max_tokens": 8, "ignore_eos": True, **params}
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**chosen))


def with_poison(prompt: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*prompt[:place], POISON, *prompt[place + 1 :])


def build(folder: Path, family: str = "qwen3", **options: Any) -> Engine:
    chosen = {"dtype": torch.float32, "block_size": 4, "chunk_size": 5, **options}
    model = tiny_model(family, tie_word_embeddings=False)  # else the head would be poisoned too
    return tiny_engine(model, folder, **chosen)


def healthy(folder: Path, requests: list[Request], family: str = "qwen3") -> Trace:
    """The answers of an engine whose weights are whole."""
    with build(folder, family) as engine:
        return run(engine, requests)


def assert_failed(done: Completion, num_tokens: int = 0) -> None:
    """Failed as not finite, with the tokens that were committed before."""
    assert done.error is not None
    assert done.error.kind == "non_finite"
    assert f"request {done.id}, sample {done.sample}" in done.error.where
    assert (done.finish_reason, done.stop_reason) == (None, None)
    assert len(done.token_ids) == len(done.logprobs) == num_tokens
    assert np.isfinite(done.logprobs).all()


def assert_not_cached(engine: Engine, prompt: tuple[int, ...], others_tokens: int = 0) -> None:
    """Of *prompt*, a new request finds at most what *others_tokens* of healthy ones left."""
    probe = run(engine, [asked("probe", (*prompt, 1), max_tokens=1)])
    assert probe.completions["probe", 0].cached_tokens <= others_tokens // 4 * 4


@lags
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_in_a_prompt_fails_it_alone_and_as_often_as_it_is_asked(
    tmp_path: Path, family: str, place: int, lag: int
) -> None:
    """huggingface/trl#6166, #6693: by id, none of its tokens, the others' bits unchanged."""
    broken = with_poison(CLEAN[:16], place)
    mates = [asked(n, CLEAN[20 + n : 27 + 2 * n], seed=n) for n in range(4)]
    expected = healthy(tmp_path / "good", mates, family)
    with build(tmp_path / "bad", family, poisoned=True, lag=lag) as engine:
        for _ in range(2):
            found = run(engine, [mates[0], asked("bad", broken), *mates[1:]])
            assert found.max_rows > 1
            assert_failed(found.completions.pop(("bad", 0)))
            for key, done in found.completions.items():
                assert_same_bits(done, expected.completions[key])
            assert_not_cached(engine, broken)


@lags
@pytest.mark.parametrize("shared", [4, 12, 16])
def test_followers_of_a_faulty_leader_are_answered_each_for_itself(
    tmp_path: Path, lag: int, shared: int
) -> None:
    """They waited for its blocks: those that meet the fault fail, the others keep their bits."""
    place = 9
    broken = with_poison(CLEAN[:24], place)
    ids = (*broken[:shared], *CLEAN[24:30])
    followers = [asked(n, (*ids, n + 1), seed=n, n=2) for n in range(3)]
    survive = shared <= place
    expected = healthy(tmp_path / "good", followers) if survive else Trace()
    waited = 0
    with build(tmp_path / "bad", poisoned=True, lag=lag, max_num_seqs=8) as engine:
        engine.submit(asked("leader", broken))
        for one in followers:
            engine.submit(one)
        found: dict[Key, Completion] = {}
        while engine.has_unfinished():
            found |= {(one.id, one.sample): one for one in engine.step()}
            waiting = engine.stats().waiting
            waited += waiting if "leader" not in {key[0] for key in found} else 0
            engine.parts.scheduler.audit()
        assert_failed(found.pop(("leader", 0)))
        assert len(found) == 6
        for key, done in found.items():
            if survive:
                assert_same_bits(done, expected.completions[key])
            else:
                assert_failed(done)
        assert_not_cached(engine, broken, min(shared, place))
    assert waited > 0


@lags
@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_sampled_token_that_breaks_the_next_step_keeps_those_before_it(
    tmp_path: Path, lag: int, in_flight: int
) -> None:
    """The token that broke it was sampled from finite logits, and stands in the result."""
    free = asked("x", CLEAN[:9], max_tokens=in_flight, seed=3)
    with build(tmp_path / "good") as engine:
        (start,) = engine.generate([free])
    prompt = (*CLEAN[:9], *start.token_ids.tolist())
    forced = asked("x", prompt, allowed_token_ids=(POISON,))
    mates = [asked(n, CLEAN[n : n + 6], seed=n, max_tokens=12) for n in range(3)]
    expected = healthy(tmp_path / "mates", mates)
    with build(tmp_path / "bad", poisoned=True, lag=lag) as engine:
        for _ in range(2):
            found = run(engine, [forced, *mates])
            done = found.completions.pop(("x", 0))
            assert_failed(done, num_tokens=1)
            assert done.token_ids.tolist() == [POISON]
            assert f"position {len(prompt) + 1}" in done.error.where  # type: ignore[union-attr]
            for key, other in found.completions.items():
                assert_same_bits(other, expected.completions[key])
            assert_not_cached(engine, (*prompt, POISON, 5, 6, 7))


@lags
def test_a_fault_late_in_a_sample_keeps_the_bits_of_what_came_before(
    tmp_path: Path, lag: int
) -> None:
    """The sampler itself chooses the broken token, at a position of its own."""
    requests = [asked(n, CLEAN[n : n + 6], seed=n, max_tokens=60) for n in range(12)]
    expected = healthy(tmp_path / "good", requests)
    late = 0
    with build(tmp_path / "bad", poisoned=True, lag=lag) as engine:
        found = run(engine, requests)
    for key, done in found.completions.items():
        whole = expected.completions[key]
        ids = whole.token_ids.tolist()
        if POISON in ids[:-1]:
            assert_failed(done, num_tokens=ids.index(POISON) + 1)
            assert_prefix_bits(done, whole)
            late += ids.index(POISON) > 3
        else:
            assert_same_bits(done, whole)
    assert 2 <= late < len(requests)


@lags
@pytest.mark.parametrize("interval", [1, 3, -1])
def test_a_fault_and_preemptions_do_not_disturb_each_other(
    tmp_path: Path, lag: int, interval: int
) -> None:
    mates = [asked(n, CLEAN[n : n + 12], seed=n) for n in range(4)]
    broken = [asked(f"bad {n}", with_poison(CLEAN[:20], place)) for n, place in enumerate((2, 18))]
    expected = healthy(tmp_path / "good", mates)
    options = {"lag": lag, "debug_force_preemption_interval": interval, "pool_blocks": 40}
    with build(tmp_path / "bad", poisoned=True, **options) as engine:
        found = run(engine, [*broken, *mates])
    assert found.preemptions > 0
    for key, done in found.completions.items():
        if isinstance(key[0], str):
            assert_failed(done)
        else:
            assert_same_bits(done, expected.completions[key])


@lags
def test_a_faulty_prompt_has_no_logprobs_and_its_samples_fail_each(
    tmp_path: Path, lag: int
) -> None:
    request = asked("x", with_poison(CLEAN[:16], 9), n=3, prompt_logprobs=True, top_logprobs=2)
    with build(tmp_path, poisoned=True, lag=lag) as engine:
        found = run(engine, [request])
    assert len(found.completions) == 3
    for done in found.completions.values():
        assert_failed(done)
        assert done.prompt_logprobs is None
        assert done.top_logprobs is not None
        assert done.top_logprobs.token_ids.shape == (0, 2)


@lags
def test_a_fault_may_be_cancelled_before_it_is_known(tmp_path: Path, lag: int) -> None:
    """Whoever ends first decides; nobody is answered twice, nothing broken is shared."""
    broken = with_poison(CLEAN[:24], 9)
    seen = set()
    with build(tmp_path, poisoned=True, lag=lag) as engine:
        for moment in range(6):
            engine.reset_prefix_cache()
            engine.submit(asked("bad", broken))
            found = [one for _ in range(moment) for one in engine.step()]
            engine.cancel("bad")
            while engine.has_unfinished():
                found += engine.step()
            engine.parts.scheduler.audit()
            (done,) = found
            seen.add("failed" if done.error else done.finish_reason)
            assert_not_cached(engine, broken, 9 if done.error is None else 0)
    assert seen == {"failed", "abort"}


def test_a_token_of_minus_infinity_is_no_fault(tmp_path: Path) -> None:
    """huggingface/trl#6166: -infinity stays legal."""
    request = asked("x", CLEAN[:5], allowed_token_ids=(4,), top_logprobs=3, max_tokens=3)
    with build(tmp_path, logprob_basis="processed") as engine:
        done = run(engine, [request]).completions["x", 0]
    assert done.error is None
    assert done.token_ids.tolist() == [4, 4, 4]
    assert done.logprobs.tolist() == [0.0, 0.0, 0.0]
    assert done.top_logprobs is not None
    assert np.isneginf(done.top_logprobs.logprobs[:, 1:]).all()
