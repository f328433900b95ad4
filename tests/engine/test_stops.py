"""Where a sample ends: the end set, lengths, and what is in the result then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams
from pagedctl.errors import RequestError
from tests.engine.harness import run, tiny_engine
from tests.reference.tiny_models import FAMILIES, VOCAB, tiny_model

PROMPT = tuple(range(3, 12))


def greedy(folder: Path, *, config_eos: object = 0, **params: Any) -> Completion:
    """One greedy completion of a fixed prompt, with the end set of *config_eos*."""
    model = tiny_model("qwen3", eos_token_id=config_eos)
    with tiny_engine(model, folder) as engine:
        asked = SamplingParams(temperature=0.0, **params)
        (done,) = engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=asked)])
    return done


@pytest.fixture(scope="module")
def unstopped() -> list[int]:
    return tiny_model("qwen3").reference().greedy(list(PROMPT), 12)[0]


def first_new(ids: list[int], at_least: int) -> int:
    """A place from *at_least* on whose token did not come before."""
    return next(n for n in range(at_least, len(ids)) if ids[n] not in ids[:n])


def test_the_end_set_is_united_from_the_models_files(tmp_path: Path, unstopped: list[int]) -> None:
    """NVIDIA/TensorRT-Model-Connect#640: generation_config.json's ids stop as well."""
    place = first_new(unstopped, 2)
    model = tiny_model("qwen3", eos_token_id=98)
    config_path = Path(model.write_config(tmp_path))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [98, unstopped[place]]})
    )
    config = EngineConfig(model=str(config_path), kv_cache_memory_bytes=4 << 20)
    with Engine(config, weights=model.tensors(torch.float64)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        (done,) = engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=params)])
    assert done.token_ids.tolist() == unstopped[: place + 1]
    assert (done.finish_reason, done.stop_reason) == ("stop", unstopped[place])


def test_a_sampled_stop_token_keeps_its_own_logprob(tmp_path: Path, unstopped: list[int]) -> None:
    """NovaSky-AI/SkyRL#2148: it is in the ids, and nothing synthetic is ever appended."""
    place = first_new(unstopped, 2)
    done = greedy(tmp_path / "a", config_eos=[unstopped[place]], max_tokens=12)
    free = greedy(tmp_path / "b", max_tokens=12, ignore_eos=True)
    assert done.token_ids.tolist() == unstopped[: place + 1]
    assert done.logprobs[-1] == free.logprobs[place] != 0.0


def test_ignore_eos_ignores_the_models_set_and_keeps_the_requests_own(
    tmp_path: Path, unstopped: list[int]
) -> None:
    """vllm-project/vllm#4589."""
    first, later = first_new(unstopped, 1), first_new(unstopped, 4)
    assert first < later
    options = {"config_eos": [unstopped[first]], "max_tokens": 12, "ignore_eos": True}
    assert len(greedy(tmp_path / "a", **options).token_ids) == 12
    done = greedy(tmp_path / "b", **options, stop_token_ids=(unstopped[later],))
    assert len(done.token_ids) == later + 1
    assert done.stop_reason == unstopped[later]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [(151, 81, 81), (151, 200, 105), (151, None, 105), (10, 16, 16), (255, 5, 1)],
)
def test_lengths_are_counted_in_ids_and_end_at_the_cap(
    tmp_path: Path, prompt: int, max_tokens: int | None, expected: int
) -> None:
    """vllm-project/vllm#28172, #19337; an unset max_tokens never becomes 16."""
    rng = np.random.default_rng(0)
    ids = tuple(rng.integers(1, VOCAB, prompt).tolist())
    params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True)
    model = tiny_model("llama")
    with tiny_engine(model, tmp_path, dtype=torch.float32, max_model_len=256) as engine:
        trace = run(engine, [Request(id=0, prompt_token_ids=ids, params=params)])
    done = trace.completions[0, 0]
    assert len(done.token_ids) == len(done.logprobs) == expected
    assert np.isfinite(done.logprobs).all()
    assert (done.finish_reason, done.stop_reason) == ("length", None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lag", [0, 1])
def test_prompt_and_output_together_never_pass_the_cap(
    tmp_path: Path, family: str, lag: int
) -> None:
    """vllm-project/vllm#19337: cap 20, prompts of 1, 8 and 19 tokens, 20 more asked for."""
    asked = [
        Request(
            id=length,
            prompt_token_ids=tuple(range(3, 3 + length)),
            params=SamplingParams(seed=length, max_tokens=20, ignore_eos=True),
        )
        for length in (1, 8, 19)
    ]
    options = {"dtype": torch.float32, "max_model_len": 20, "lag": lag}
    with tiny_engine(tiny_model(family), tmp_path, **options) as engine:
        found = run(engine, asked).completions
    assert {key: len(done.token_ids) for key, done in found.items()} == {
        (1, 0): 19,
        (8, 0): 12,
        (19, 0): 1,
    }
    assert {done.finish_reason for done in found.values()} == {"length"}


def test_a_request_that_never_fits_is_refused_and_the_others_run(tmp_path: Path) -> None:
    """vllm-project/vllm#39734: it neither waits forever nor blocks those behind it.

    The derived max_model_len is lowered to the pool, and the refusal counts blocks.
    """
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    pool = {"block_size": 4, "kv_cache_memory_bytes": 16 * block_bytes}
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32, **pool) as engine:
        assert engine.config.max_model_len == 65
        assert engine.config.origins["max_model_len"] == "derived: pool"
        with pytest.raises(RequestError) as caught:
            engine.submit(Request(id="long", prompt_token_ids=PROMPT * 12, params=params))
        assert caught.value.kind == "never_fits"
        for number in ("108 tokens", "27 blocks", "pool has 16", "max_model_len to 65"):
            assert number in str(caught.value)
        trace = run(engine, [Request(id="short", prompt_token_ids=PROMPT, params=params)])
    assert len(trace.completions["short", 0].token_ids) == 5


def test_a_request_that_ends_at_n_keeps_n_minus_one_in_the_pool(tmp_path: Path) -> None:
    """block 4, prompt 3, 6 new tokens: eight cached tokens are two blocks."""
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    with tiny_engine(
        tiny_model("llama"),
        tmp_path,
        dtype=torch.float32,
        block_size=4,
        kv_cache_memory_bytes=2 * block_bytes,
    ) as engine:
        assert engine.capacity().kv_blocks == 2
        assert engine.config.max_model_len == 9
        assert engine.config.origins["max_model_len"] == "derived: pool"
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        trace = run(engine, [Request(id=0, prompt_token_ids=PROMPT[:3], params=params)])
    assert len(trace.completions[0, 0].token_ids) == 6
    assert trace.preemptions == 0


def test_refusals_concern_one_request_and_come_before_any_runs(tmp_path: Path) -> None:
    with tiny_engine(tiny_model("llama"), tmp_path) as engine:
        good = Request(id=1, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=2))
        bad = Request(id=2, prompt_token_ids=(VOCAB,), params=SamplingParams(max_tokens=2))
        with pytest.raises(RequestError) as caught:
            engine.generate([good, bad])
        assert caught.value.kind == "out_of_vocabulary"
        assert not engine.has_unfinished()
        engine.submit(good)
        with pytest.raises(RequestError) as caught:
            engine.submit(good)
        assert caught.value.kind == "duplicate_id"
        while engine.has_unfinished():
            engine.step()
        assert [one.id for one in engine.generate([good])] == [1]
