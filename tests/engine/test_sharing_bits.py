"""What is found in the prefix cache is what would have been computed, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams
from tests.engine.harness import Trace, assert_same_bits, drain, run, tiny_engine
from tests.reference.tiny_models import FAMILIES, VOCAB, tiny_model

BASE = tuple(np.random.default_rng(7).integers(1, VOCAB - 1, 64).tolist())
OTHER = VOCAB - 1
"""A token that BASE has not."""

lags = pytest.mark.parametrize("lag", [0, 1])


def asked(name: int | str, prompt: tuple[int, ...], **changes: Any) -> Request:
    salt = changes.pop("cache_salt", None)
    params = {"seed": 5, "max_tokens": 6, "ignore_eos": True, **changes}
    return Request(
        id=name, prompt_token_ids=prompt, params=SamplingParams(**params), cache_salt=salt
    )


def build(folder: Path, family: str = "qwen3", **options: Any) -> Engine:
    chosen = {"dtype": torch.float32, "block_size": 4, **options}
    return tiny_engine(tiny_model(family), folder, **chosen)


def cold(folder: Path, requests: list[Request], family: str = "qwen3") -> dict[Any, Completion]:
    """Each request by itself, without a cache."""
    with build(folder, family, prefix_cache=False) as engine:
        done = [engine.generate([one]) for one in requests]
    return {(one.id, one.sample): one for samples in done for one in samples}


@lags
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_of_any_length_changes_no_bit(
    tmp_path: Path, family: str, block_size: int, lag: int
) -> None:
    """vllm-project/vllm#34683: cold equals warm, a token before, at and behind a block's end."""
    b = block_size
    shared = (b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1)
    requests = [asked(count, (*BASE[:count], OTHER, 3, 4)) for count in shared]
    expected = cold(tmp_path / "cold", [asked("base", BASE[: 3 * b]), *requests], family)
    with build(tmp_path / "warm", family, block_size=b, lag=lag) as engine:
        engine.generate([asked("base", BASE[: 3 * b])])
        for request, count in zip(requests, shared, strict=True):
            warm = run(engine, [request])
            assert warm.hit_tokens == warm.completions[count, 0].cached_tokens == count // b * b
            assert warm.forward_tokens == count + 3 - warm.hit_tokens + 5
            assert_same_bits(warm.completions[count, 0], expected[count, 0])
    with build(tmp_path / "running", family, block_size=b, lag=lag, chunk_size=5) as engine:
        found = run(engine, [asked("base", BASE[: 3 * b]), *requests])
    assert found.hit_tokens == sum(count // b * b for count in shared)
    for key, done in found.completions.items():
        assert_same_bits(done, expected[key])


@lags
@pytest.mark.parametrize("length", [3, 4, 5, 8, 15, 16, 17, 32])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(
    tmp_path: Path, length: int, lag: int
) -> None:
    """vllm-project/vllm#7753, #11186: a prompt of whole blocks, asked for twice."""
    request = asked("x", BASE[:length])
    with build(tmp_path, lag=lag) as engine:
        first, again = run(engine, [request]), run(engine, [request])
    assert first.hit_tokens == 0
    assert again.hit_tokens == (length - 1) // 4 * 4
    assert again.forward_tokens == length - again.hit_tokens + 5
    assert_same_bits(again.completions["x", 0], first.completions["x", 0])


def test_equal_last_blocks_behind_different_prefixes_are_not_shared(tmp_path: Path) -> None:
    """openvinotoolkit/openvino.genai#3722, vllm-project/aibrix#2329: [A][X] and [B][X]."""
    x = BASE[8:12]
    requests = [asked("ax", (*BASE[:4], *x, 1)), asked("bx", (*BASE[4:8], *x, 1))]
    expected = cold(tmp_path / "cold", requests)
    with build(tmp_path / "warm") as engine:
        found = [run(engine, [one]) for one in requests]
    assert [one.hit_tokens for one in found] == [0, 0]
    for one in found:
        for key, done in one.completions.items():
            assert_same_bits(done, expected[key])


@lags
def test_a_conversation_finds_its_last_turn_with_what_was_generated(
    tmp_path: Path, lag: int
) -> None:
    """huggingface/trl#5224: the next prompt is prompt, completion and new ids, exactly."""
    turn = asked(0, BASE[:10], max_tokens=9)
    prompts, hits = [], []
    with build(tmp_path / "warm", lag=lag) as engine:
        for number in range(4):
            (done,) = engine.generate([turn])
            hits.append(done.cached_tokens)
            prompts.append((turn, done))
            ids = (*done.prompt_token_ids.tolist(), *done.token_ids.tolist(), 5, 6)
            turn = asked(number + 1, ids, max_tokens=9)
    expected = cold(tmp_path / "cold", [one for one, _ in prompts])
    for one, done in prompts:
        assert_same_bits(done, expected[one.id, 0])
    # What was fed is in the cache: all but the last token of a turn, in whole blocks.
    assert hits == [0, 16, 28, 40]


def test_salts_keep_their_blocks_apart(tmp_path: Path) -> None:
    salts = (None, "", "a", "b")
    with build(tmp_path) as engine:
        found = [
            [run(engine, [asked("x", BASE[:17], cache_salt=salt)]) for _ in range(2)]
            for salt in salts
        ]
    assert [[one.hit_tokens for one in pair] for pair in found] == [[0, 16]] * len(salts)
    for pair in found:
        for one in pair:
            assert_same_bits(one.completions["x", 0], found[0][0].completions["x", 0])


SCRIPT = """
import sys
from pathlib import Path
from tests.engine.test_sharing_bits import BASE, asked, build
with build(Path(sys.argv[1]), block_size=16) as engine:
    (done,) = engine.generate([asked("x", BASE[:40], max_tokens=12)])
print(done.token_ids.tolist(), done.logprobs.tobytes().hex())
"""


def test_a_prompt_has_the_same_bits_asked_again_and_in_a_new_process(tmp_path: Path) -> None:
    """vllm-project/vllm#34683: 40 ids, block 16; again, after 30 others, and cold elsewhere."""
    request = asked("x", BASE[:40], max_tokens=12)
    others = [asked(n, BASE[n : n + 20], seed=n) for n in range(30)]
    with build(tmp_path / "here", block_size=16) as engine:
        first = engine.generate([request])[0]
        again = engine.generate([request])[0]
        engine.generate(others)
        later = engine.generate([request])[0]
    assert [one.cached_tokens for one in (first, again, later)] == [0, 32, 32]
    assert_same_bits(again, first)
    assert_same_bits(later, first)
    elsewhere = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "elsewhere")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    bits = f"{first.token_ids.tolist()} {first.logprobs.tobytes().hex()}"
    assert elsewhere.stdout.strip() == bits


@lags
@pytest.mark.parametrize("interval", [None, 1, 3, -1])
def test_samples_that_share_a_prompt_survive_the_preemption_of_any(
    tmp_path: Path, lag: int, interval: int | None
) -> None:
    """vllm-project/vllm#8844: n 3, prompt 12, block 4, six blocks, 12 new tokens each."""
    request = asked("x", BASE[:12], n=3, max_tokens=12)
    expected = cold(tmp_path / "cold", [request])
    options = {"pool_blocks": 6, "lag": lag, "debug_force_preemption_interval": interval}
    with build(tmp_path / "six", **options, chunk_size=7) as engine:
        found = run(engine, [request])
    assert found.preemptions > 0 or interval is None
    assert found.hit_tokens > 0
    assert len(found.completions) == 3
    for key, done in found.completions.items():
        assert len(done.token_ids) == 12
        assert_same_bits(done, expected[key])


@lags
def test_tokens_count_once_over_preemptions(tmp_path: Path, lag: int) -> None:
    """vllm-project/vllm-gaudi#524: prompt 3, 20 tokens, a preemption, 20 more are 40."""
    request = asked("x", BASE[:3], max_tokens=40)
    expected = cold(tmp_path / "cold", [request])
    with build(tmp_path / "warm", lag=lag, debug_force_preemption_interval=20) as engine:
        found = run(engine, [request])
        assert engine.stats().output_tokens == 40
    assert found.preemptions >= 1
    assert len(found.completions["x", 0].token_ids) == 40
    assert_same_bits(found.completions["x", 0], expected["x", 0])


@lags
def test_blocks_that_are_evicted_and_found_again_change_no_bit(tmp_path: Path, lag: int) -> None:
    """A pool too small for all prefixes at once, visited again and again."""
    rng = np.random.default_rng(1)
    requests = [asked(n, (*BASE[: 4 * (n % 5)], *BASE[40:44], n + 1), seed=n) for n in range(12)]
    expected = cold(tmp_path / "cold", requests)
    trace = Trace()
    with build(tmp_path / "warm", lag=lag, pool_blocks=9, max_num_seqs=3) as engine:
        for _ in range(4):
            order = [requests[place] for place in rng.permutation(len(requests))]
            once = run(engine, order)
            trace.hit_tokens += once.hit_tokens
            for key, done in once.completions.items():
                assert_same_bits(done, expected[key])
        assert engine.stats().cached_blocks <= 9
    assert trace.hit_tokens > 0


@lags
def test_a_cache_that_is_reset_in_the_middle_changes_no_bit(tmp_path: Path, lag: int) -> None:
    requests = [asked(n, BASE[: 13 + n % 3], seed=n, n=2) for n in range(6)]
    expected = cold(tmp_path / "cold", requests)
    dropped = 0
    with build(tmp_path / "warm", lag=lag, chunk_size=5, max_num_seqs=4) as engine:
        for one in requests:
            engine.submit(one)
        found: dict[Any, Completion] = {}
        while engine.has_unfinished():
            found |= {(one.id, one.sample): one for one in engine.step()}
            dropped += engine.reset_prefix_cache()
            assert engine.stats().cached_blocks == 0
            engine.parts.scheduler.audit()
        found |= drain(engine)
    assert dropped > 0
    assert set(found) == set(expected)
    for key, done in found.items():
        assert_same_bits(done, expected[key])
