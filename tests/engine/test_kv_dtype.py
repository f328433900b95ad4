"""Keys and values in a narrower dtype than the model's: half the bytes, the same promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.request import Request, SamplingParams
from pagedctl.errors import ConfigError
from tests.engine.harness import assert_same_bits, run, tiny_engine
from tests.reference.tiny_models import tiny_model

PROMPTS = (tuple(range(3, 24)), tuple(range(3, 16)), tuple(range(40, 70)))


def asked(**sampling: Any) -> list[Request]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    return [
        Request(id=number, prompt_token_ids=prompt, params=params)
        for number, prompt in enumerate(PROMPTS)
    ]


def test_bfloat16_keys_and_values_halve_a_float32_models_pool_bytes(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    tokens = {}
    for kv_dtype in ("auto", "bfloat16"):
        options: dict[str, Any] = {"dtype": torch.float32, "kv_dtype": kv_dtype}
        with tiny_engine(model, tmp_path / kv_dtype, **options) as engine:
            tokens[kv_dtype] = engine.capacity().kv_tokens
            assert engine.parts.arena.memory.dtype == (
                torch.float32 if kv_dtype == "auto" else torch.bfloat16
            )
    assert tokens["bfloat16"] == 2 * tokens["auto"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_keys_and_values_stay_near_the_models_own(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    rows = {}
    for kv_dtype in ("auto", "bfloat16"):
        options: dict[str, Any] = {"dtype": torch.float32, "kv_dtype": kv_dtype}
        with tiny_engine(model, tmp_path / kv_dtype, **options) as engine:
            trace = run(engine, asked(temperature=0.0))
        rows[kv_dtype] = torch.stack([trace.logits[number, 0][0] for number in range(3)])
    difference = (rows["auto"] - rows["bfloat16"]).abs().max().item()
    assert 0 < difference < 0.02 * rows["auto"].std().item()


def test_bits_depend_on_the_request_alone(tmp_path: Path) -> None:
    """Alone, packed, in chunks, behind a prefix hit and after preemptions."""
    model = tiny_model("qwen3")
    requests = asked(seed=5)
    plain: dict[str, Any] = {"dtype": torch.float32, "kv_dtype": "bfloat16", "block_size": 4}
    with tiny_engine(model, tmp_path / "alone", **plain) as engine:
        alone = {}
        for request in requests:
            engine.reset_prefix_cache()
            alone[request.id, 0] = engine.generate([request])[0]
    for name, more in (
        ("packed", {}),
        ("chunks", {"chunk_size": 3}),
        ("preempted", {"debug_force_preemption_interval": 2, "prefix_cache": False}),
    ):
        with tiny_engine(model, tmp_path / name, **plain, **more) as engine:
            cold = run(engine, requests)
            warm = run(engine, requests)
            stats = engine.stats()
        assert stats.preemptions > 0 if name == "preempted" else stats.prefix_hit_tokens > 0
        for trace in (cold, warm):
            for key, done in trace.completions.items():
                assert_same_bits(done, alone[key])


def test_scores_equal_what_generation_reported(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "kv_dtype": "bfloat16"}
    with tiny_engine(tiny_model("llama"), tmp_path, **options) as engine:
        done = engine.generate(asked(seed=9))
        scores = engine.score(
            [[*one.prompt_token_ids, *one.token_ids] for one in done],
            start=[len(one.prompt_token_ids) for one in done],
        )
    for one, scored in zip(done, scores, strict=True):
        assert np.array_equal(one.logprobs.view("int32"), scored.logprobs.view("int32"))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, "float16"),
        (torch.bfloat16, "float32"),
        (torch.bfloat16, "float16"),
        (torch.float16, "bfloat16"),
    ],
)
def test_another_dtype_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, kv_dtype: str
) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype {kv_dtype} does not go with"):
        tiny_engine(tiny_model("llama"), tmp_path, dtype=dtype, kv_dtype=kv_dtype)
