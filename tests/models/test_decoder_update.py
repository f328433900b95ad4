"""Weights replaced in place: bitwise the engine that was built with them, or nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams
from pagedctl.errors import ModelError
from pagedctl.models import decoder_weights
from pagedctl.models.decoder import Decoder
from tests.engine.harness import assert_same_bits, tiny_engine
from tests.kernels.harness import bits
from tests.reference.tiny_models import FAMILIES, TinyModel, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Weights = dict[str, torch.Tensor]

PROMPTS = ((5, 9, 11, 3, 7, 2, 60, 31, 8), (17,), tuple(range(1, 36)))


@contextmanager
def engine_of(model: TinyModel, folder: Path, **options: Any) -> Iterator[Engine]:
    chosen = {"dtype": torch.float32, "block_size": 4, "unverified": True, **options}
    with tiny_engine(model, folder, **chosen) as engine:
        yield engine


def answers(engine: Engine, *, prompt_logprobs: bool = True) -> list[Completion]:
    return engine.generate(
        Request(
            id=place,
            prompt_token_ids=prompt,
            params=SamplingParams(
                seed=place,
                max_tokens=6,
                ignore_eos=True,
                prompt_logprobs=prompt_logprobs,
                temperature=0.9,
            ),
        )
        for place, prompt in enumerate(PROMPTS)
    )


def updated(engine: Engine, weights: Weights) -> list[Completion]:
    engine.parts.model.decoder.update(weights)
    engine.reset_prefix_cache()
    return answers(engine)


def same(some: list[Completion], others: list[Completion]) -> bool:
    """Equal in every bit; the prompts' logprobs alone tell any two sets of weights apart."""
    try:
        for one, other in zip(some, others, strict=True):
            assert_same_bits(one, other)
    except AssertionError:
        return False
    return True


def held_tensors(decoder: Decoder) -> list[torch.Tensor]:
    """Every tensor that the decoder reads weights from."""
    found = [decoder.embedding, decoder.final_norm, decoder.head.weight]
    for layer in decoder.layers:
        for one in vars(layer).values():
            tensors = (one.weight, one.bias) if hasattr(one, "weight") else (one,)
            found.extend(tensor for tensor in tensors if tensor is not None)
    return found


def shown(tensors: list[torch.Tensor]) -> list[tuple[int, int | None]]:
    """Identity, and the address of what is not opaque."""
    return [(id(one), None if one.is_mkldnn else one.data_ptr()) for one in tensors]


def updates_to_the_bits_of_a_fresh_engine(
    family: str, folder: Path, dtype: torch.dtype, **options: Any
) -> None:
    old, new = tiny_model(family, seed=1), tiny_model(family, seed=2)
    with (
        engine_of(old, folder / "updated", dtype=dtype, **options) as engine,
        engine_of(new, folder / "fresh", dtype=dtype, **options) as fresh,
    ):
        before, want = answers(engine), answers(fresh)
        assert not same(before, want)
        places = shown(held_tensors(engine.parts.model.decoder))
        given = new.tensors(dtype)
        got = updated(engine, given)
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)
        assert shown(held_tensors(engine.parts.model.decoder)) == places
        for tensor in given.values():
            tensor.fill_(torch.nan)
        assert same(answers(engine), want)
        assert same(updated(engine, old.tensors(dtype)), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_updated_engine_is_bitwise_one_that_was_built_with_the_weights(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Biases, QK-norm and a tied head included; the given tensors may change afterwards."""
    updates_to_the_bits_of_a_fresh_engine(family, tmp_path, dtype)


@pytest.mark.parametrize("leaf", ["row_blocks", "per_row", "library"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_it_is_with_every_other_leaf_as_well(family: str, leaf: str, tmp_path: Path) -> None:
    """Also where a tied head reads the embedding's own memory: 99 columns, and 96."""
    options = {"numerics": "fast", "leaf": (f"gemm=torch.gemm_{leaf}", f"head=torch.head_{leaf}")}
    updates_to_the_bits_of_a_fresh_engine(family, tmp_path, torch.float32, **options)


@pytest.mark.parametrize("leaf", ["row_blocks", "packed"])
def test_a_tied_head_follows_the_embedding_whose_memory_it_may_share(
    leaf: str, tmp_path: Path
) -> None:
    old, new = (tiny_model("qwen2", seed=seed, vocab_size=96) for seed in (1, 2))
    options = {"leaf": (f"head=torch.head_{leaf}",)}
    with (
        engine_of(old, tmp_path / "updated", **options) as engine,
        engine_of(new, tmp_path / "fresh", **options) as fresh,
    ):
        decoder = engine.parts.model.decoder
        shares = leaf == "row_blocks"
        if shares:
            assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()
        assert same(updated(engine, new.tensors(torch.float32)), answers(fresh))
        assert not shares or decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()


def test_parameters_of_a_trainer_are_read_and_no_gradient_is_kept(tmp_path: Path) -> None:
    old, new = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    with (
        engine_of(old, tmp_path / "updated") as engine,
        engine_of(new, tmp_path / "fresh") as fresh,
    ):
        given = {name: torch.nn.Parameter(one) for name, one in new.tensors(torch.float32).items()}
        assert same(updated(engine, dict(given)), answers(fresh))
        assert not any(one.requires_grad for one in held_tensors(engine.parts.model.decoder))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_of_an_update_counts(family: str, tmp_path: Path) -> None:
    """The power of the tests above: with any one tensor left as it was, bits differ."""
    old, new = tiny_model(family, seed=1), tiny_model(family, seed=2)
    kept, given = old.tensors(torch.float32), new.tensors(torch.float32)
    with engine_of(old, tmp_path) as engine:
        want = updated(engine, given)
        for name in given:
            assert not same(updated(engine, {**given, name: kept[name]}), want), name
        assert same(updated(engine, given), want)


SITES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "head")


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_update_that_forgets_a_projection_is_seen(
    family: str, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tiny_model(family, seed=1), tiny_model(family, seed=2)
    given, skipped = new.tensors(torch.float32), 0
    with engine_of(old, tmp_path) as engine:
        want = updated(engine, given)
        updated(engine, old.tensors(torch.float32))
        honest: Callable[..., None] = getattr(engine.parts.plans, site).run.refresh

        def forgetful(*arguments: Any) -> None:
            nonlocal skipped
            skipped += 1
            if skipped > 1:
                honest(*arguments)

        with monkeypatch.context() as mutant:
            mutant.setattr(getattr(engine.parts.plans, site).run, "refresh", forgetful)
            assert not same(updated(engine, given), want)
        assert skipped == (1 if site == "head" else old.config["num_hidden_layers"])
        assert same(updated(engine, given), want)


@pytest.mark.parametrize("field", decoder_weights.VECTORS)
def test_an_update_that_forgets_a_norm_is_seen(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
    given = new.tensors(torch.float32)
    with engine_of(old, tmp_path) as engine:
        want = updated(engine, given)
        updated(engine, old.tensors(torch.float32))
        others = {one: name for one, name in decoder_weights.VECTORS.items() if one != field}
        with monkeypatch.context() as mutant:
            mutant.setattr(decoder_weights, "VECTORS", others)
            assert not same(updated(engine, given), want)
        assert same(updated(engine, given), want)


def test_a_step_after_the_update_needs_an_emptied_prefix_cache(tmp_path: Path) -> None:
    """What was cached is of the old weights: the control of ``reset_prefix_cache`` above."""
    old, new = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
    with engine_of(old, tmp_path) as engine:
        decoder = engine.parts.model.decoder
        answers(engine)
        decoder.update(new.tensors(torch.float32))
        stale = answers(engine, prompt_logprobs=False)
        assert engine.stats().prefix_hit_tokens > 0
        engine.reset_prefix_cache()
        assert not same(answers(engine, prompt_logprobs=False), stale)


def test_a_wrong_update_is_refused_with_every_name_and_nothing_is_written(tmp_path: Path) -> None:
    old, new = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
    given = new.tensors(torch.float32)
    at = "model.layers.1"
    wrong = {
        **given,
        f"{at}.self_attn.k_norm.weight": torch.ones(15),
        f"{at}.mlp.down_proj.weight": given[f"{at}.mlp.down_proj.weight"].t(),
        "model.norm.weight": given["model.norm.weight"].bfloat16(),
        "model.layers.2.input_layernorm.weight": torch.ones(48),
    }
    del wrong["lm_head.weight"]
    with engine_of(old, tmp_path) as engine:
        decoder, before = engine.parts.model.decoder, answers(engine)
        held = [bits(one.to_dense() if one.is_mkldnn else one) for one in held_tensors(decoder)]
        held = [one.clone() for one in held]
        with pytest.raises(ModelError) as caught:
            decoder.update(wrong)
        told = {fault.what: fault.rule.partition(";")[0] for fault in caught.value.faults}
        assert told == {
            f"{at}.self_attn.k_norm.weight is float32 [15]": (
                f"{at}.self_attn.k_norm.weight is float32 [16]"
            ),
            f"{at}.mlp.down_proj.weight is float32 [80, 48]": (
                f"{at}.mlp.down_proj.weight is float32 [48, 80]"
            ),
            "model.norm.weight is bfloat16 [48]": "model.norm.weight is float32 [48]",
            "model.layers.2.input_layernorm.weight is float32 [48]": (
                "model.layers.2.input_layernorm.weight is not in the model"
            ),
            "lm_head.weight is missing": "lm_head.weight is float32 [99, 48]",
        }
        assert all(fault.where == "argument weights" for fault in caught.value.faults)
        now = [bits(one.to_dense() if one.is_mkldnn else one) for one in held_tensors(decoder)]
        assert all(torch.equal(one, other) for one, other in zip(held, now, strict=True))
        engine.reset_prefix_cache()
        assert same(answers(engine), before)
