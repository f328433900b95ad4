"""The engine's surface: the embedded model, several samples a step, capacity, manifest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.completions import sequences_of
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.scheduler import key_of
from pagedctl.engine.step_plan import ScheduledRow, StepPlan
from pagedctl.errors import CapacityError, ConfigError, ModelError
from pagedctl.models.locate import EMBEDDED_FOLDER
from tests.engine.harness import tiny_engine
from tests.reference.tiny_models import tiny_model

PROMPT = tuple(range(3, 17))


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
def test_greedy_ids_of_the_embedded_model_equal_transformers(numerics: str) -> None:
    transformers = pytest.importorskip("transformers")
    from pagedctl.rollout.word_problems import generate

    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER)
    prompts = [tokenizer(one.prompt).input_ids for one in generate(5, 6, "heldout")]
    prompts += [tokenizer(one.prompt).input_ids for one in generate(5, 6, "hard")]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with Engine(EngineConfig(model="embedded", numerics=numerics)) as engine:
        done = engine.generate(
            Request(id=number, prompt_token_ids=tuple(ids), params=params)
            for number, ids in enumerate(prompts)
        )
    for ids, one in zip(prompts, done, strict=True):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                do_sample=False,
                max_new_tokens=64,
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert one.token_ids.tolist() == out.sequences[0, len(ids) :].tolist()
        rows = torch.cat(out.logits).double().log_softmax(-1)
        expected = rows.gather(1, torch.from_numpy(one.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(one.logprobs, expected.numpy(), rtol=0, atol=1e-5)


def test_several_positions_of_one_request_are_sampled_in_one_step(tmp_path: Path) -> None:
    """Each equals the token that a prompt cut there would sample: the seam for speculation."""
    model = tiny_model("qwen3")
    params = SamplingParams(seed=11, max_tokens=1, ignore_eos=True)
    with tiny_engine(model, tmp_path / "cut", dtype=torch.float32) as engine:
        cut = {
            length: engine.generate(
                [Request(id=length, prompt_token_ids=PROMPT[:length], params=params)]
            )[0]
            for length in (9, 12, 14)
        }
    with tiny_engine(model, tmp_path / "whole", dtype=torch.float32) as engine:
        request = Request(id="whole", prompt_token_ids=PROMPT, params=params)
        (sequence,) = sequences_of(request, run_seed=0, max_model_len=64, eos_token_ids=())
        row = ScheduledRow(
            request_id="whole",
            sample=0,
            row=0,
            start=0,
            num_tokens=len(PROMPT),
            sample_offsets=(8, 11, 13),
            new_blocks=(0, 1),
            admitted=True,
        )
        runner = engine.parts.runner
        launched = runner.launch(StepPlan(step=1, rows=(row,)), {key_of(sequence): sequence})
        tokens = launched.wait()
        assert tokens.token_ids == [int(cut[length].token_ids[0]) for length in (9, 12, 14)]
        logprobs = np.array(tokens.logprobs, dtype=np.float32)
        assert logprobs.tolist() == [float(cut[length].logprobs[0]) for length in (9, 12, 14)]
        assert int(runner.rows.last_token[0]) == tokens.token_ids[-1]


def test_the_pool_is_whole_blocks_of_the_bytes_given(tmp_path: Path) -> None:
    token_bytes = 2 * 2 * 2 * 16 * 4
    with tiny_engine(
        tiny_model("llama"),
        tmp_path,
        dtype=torch.float32,
        kv_cache_memory_bytes=100 * 16 * token_bytes + 7,
    ) as engine:
        capacity = engine.capacity()
    assert (capacity.kv_blocks, capacity.kv_tokens) == (100, 1600)
    assert capacity.terms["kv"] == 101 * 16 * token_bytes  # the null block is on top
    assert capacity.max_concurrency_at_cap == 1600 / 512


def test_an_explicit_length_that_cannot_fit_is_refused_at_construction(tmp_path: Path) -> None:
    options = {"max_model_len": 400, "kv_cache_memory_bytes": 16 * 4 * 2 * 2 * 2 * 16 * 4}
    with pytest.raises(CapacityError, match="max_model_len 400 needs"):
        tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"device": "cuda"},
        {"topology_invariant": True},
        {"gpu_memory_utilization": 0.5},
        {"debug_force_preemption_interval": 4},
        {"kv_dtype": "float16"},
    ],
    ids=lambda one: next(iter(one)),
)
def test_what_this_version_lacks_is_refused_and_never_ignored(
    tmp_path: Path, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_engine(tiny_model("llama"), tmp_path, dtype=torch.float32, **options)
    assert next(iter(options)) in caught.value.where


def test_given_weights_must_be_exactly_the_models(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = EngineConfig(model=model.write_config(tmp_path), dtype="float32")
    tensors = model.tensors(torch.float32)
    broken = {
        "missing": {k: v for k, v in tensors.items() if k != "model.norm.weight"},
        "unknown": {**tensors, "model.extra.weight": torch.zeros(1)},
        "shape": {**tensors, "model.norm.weight": torch.zeros(3)},
        "dtype": {**tensors, "model.norm.weight": torch.zeros(48, dtype=torch.float16)},
    }
    for weights in broken.values():
        with pytest.raises(ModelError, match="1 given tensors"):
            Engine(config, weights=weights)


def test_random_weights_need_no_files_and_repeat(tmp_path: Path) -> None:
    path = tiny_model("qwen3").write_config(tmp_path)
    request = Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(seed=1, max_tokens=4))
    runs = []
    for seed in (3, 3, 4):
        config = EngineConfig(model=path, random_weights=seed, kv_cache_memory_bytes=1 << 20)
        with Engine(config) as engine:
            runs.append(engine.generate([request])[0].logprobs.tolist())
    assert runs[0] == runs[1] != runs[2]


def test_the_manifest_holds_contract_leaves_and_arithmetic(tmp_path: Path) -> None:
    with tiny_engine(tiny_model("qwen3"), tmp_path, dtype=torch.float32) as engine:
        engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=SamplingParams(n=2))])
        manifest = engine.manifest()
    assert manifest.numerics is not None
    assert manifest.numerics.arithmetic_id == engine.parts.plans.arithmetic_id
    assert manifest.numerics.leaves["gemm o_proj 64x48"] == "torch.gemm_row_blocks"
    assert manifest.config_origin["max_model_len"] == "derived: model positions"
    assert manifest.metrics["output_tokens"] == engine.stats().output_tokens > 0
    json.dumps(manifest.to_json_object())


def test_the_arithmetic_id_names_switches_and_not_the_batch(tmp_path: Path) -> None:
    def identity(name: str, **options: object) -> str:
        model = tiny_model("qwen3")
        folder = tmp_path / name
        with tiny_engine(model, folder, dtype=torch.float32, **options) as engine:
            return engine.parts.plans.arithmetic_id

    plain = identity("plain")
    assert identity("batch", max_num_seqs=3, chunk_size=5, block_size=4, lag=1) == plain
    for name, options in {
        "contract": {"numerics": "fast"},
        "norm": {"norm_cast": "after"},
        "order": {"logprob_order": "blockwise-direct-64"},
        "temperature": {"temperature_form": "multiply"},
    }.items():
        assert identity(name, **options) != plain
