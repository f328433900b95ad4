"""The switches of the RoPE table in an engine: what they change, what they do not, and its id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams, ScoreRequest
from tests.engine.harness import assert_same_floats, tiny_engine
from tests.reference.tiny_models import VOCAB, TinyModel, tiny_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PROMPT = tuple(np.random.default_rng(3).integers(1, VOCAB, 40).tolist())
IDS = tuple(np.random.default_rng(5).integers(1, VOCAB, 64).tolist())


def yarn_model() -> TinyModel:
    return tiny_model("qwen3", rope_scaling=YARN)


@contextmanager
def engine_of(
    model: TinyModel, folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[Engine]:
    with tiny_engine(model, folder, dtype=dtype, unverified=True, **options) as engine:
        yield engine


def greedy(engine: Engine) -> tuple[list[int], NDArray[np.float32]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    done = engine.generate([Request(id=0, prompt_token_ids=PROMPT, params=params)])[0]
    return done.token_ids.tolist(), done.logprobs


def cos_sin(engine: Engine) -> torch.Tensor:
    return engine.parts.model.decoder.cos_sin


def rope_order(engine: Engine) -> dict[str, str]:
    return dict(engine.parts.plans.qk_norm_rope_write.order.terms)


def identity(model: TinyModel, folder: Path, **options: Any) -> str:
    with engine_of(model, folder, **options) as engine:
        return engine.parts.plans.arithmetic_id


def test_rl_bitwise_takes_a_yarn_table_from_the_device_and_keeps_greedy_ids(
    tmp_path: Path,
) -> None:
    with (
        engine_of(yarn_model(), tmp_path / "house") as house,
        engine_of(yarn_model(), tmp_path / "trainer", numerics="rl-bitwise") as trainer,
    ):
        assert not torch.equal(cos_sin(house), cos_sin(trainer))
        assert torch.allclose(cos_sin(house), cos_sin(trainer), rtol=0, atol=1e-3)
        (ids, logprobs), (trainer_ids, trainer_logprobs) = greedy(house), greedy(trainer)
        assert ids == trainer_ids
        assert logprobs.tolist() == pytest.approx(trainer_logprobs.tolist(), abs=1e-3)
        assert rope_order(house)["rope_table"].startswith("float64 on the host, ")
        assert rope_order(trainer)["rope_table"] == (
            "YaRN ramp float32 on cpu, frequencies, angles, cos and sin float32 on cpu, "
            "rounded once to float32"
        )


def test_rl_bitwise_leaves_the_table_and_its_order_of_another_rope_alone(tmp_path: Path) -> None:
    with (
        engine_of(tiny_model("qwen3"), tmp_path / "house") as house,
        engine_of(tiny_model("qwen3"), tmp_path / "trainer", numerics="rl-bitwise") as trainer,
    ):
        assert torch.equal(cos_sin(house), cos_sin(trainer))
        assert rope_order(house) == rope_order(trainer)


def test_a_yarn_model_has_an_arithmetic_id_for_every_form_and_others_have_one(
    tmp_path: Path,
) -> None:
    """The prefix cache is keyed by it, so no form reads the keys of another."""
    forms = [
        {"yarn_ramp_mask_device": ramp, "yarn_frequency_device": frequency}
        for ramp in ("host", "cpu")
        for frequency in ("host", "cpu")
    ]

    def identities(model: TinyModel) -> set[str]:
        return {
            identity(model, tmp_path / f"{number}", **form) for number, form in enumerate(forms)
        }

    assert len(identities(yarn_model())) == len(forms)
    assert len(identities(tiny_model("qwen3"))) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda means cpu only without CUDA")
def test_cuda_means_cpu_where_there_is_none(tmp_path: Path) -> None:
    asked, meant = (
        {"yarn_ramp_mask_device": device, "yarn_frequency_device": device}
        for device in ("cuda", "cpu")
    )
    with (
        engine_of(yarn_model(), tmp_path / "cuda", **asked) as one,
        engine_of(yarn_model(), tmp_path / "cpu", **meant) as other,
        engine_of(yarn_model(), tmp_path / "host") as host,
    ):
        assert one.parts.plans.arithmetic_id == other.parts.plans.arithmetic_id
        assert torch.equal(cos_sin(one), cos_sin(other))
        assert not torch.equal(cos_sin(one), cos_sin(host))


def teacher_forced(engine: Engine) -> NDArray[np.float32]:
    (done,) = engine.scores([ScoreRequest(id=0, token_ids=IDS)])
    assert done.error is None
    assert len(done.logprobs) == len(IDS) - 1
    return done.logprobs


@pytest.mark.parametrize("model", [tiny_model("qwen3"), yarn_model()], ids=["default", "yarn"])
def test_a_table_in_bfloat16_on_one_side_shows_in_teacher_forced_logprobs(
    model: TinyModel, tmp_path: Path
) -> None:
    """pytorch/torchtitan: a mixed-precision wrapper casts the RoPE table to bfloat16."""
    scores, identities = {}, {}
    for name, dtype in {"wide": "float32", "again": "float32", "narrow": "model"}.items():
        options = {"dtype": torch.bfloat16, "rope_table_dtype": dtype}
        with engine_of(model, tmp_path / name, **options) as engine:
            scores[name] = teacher_forced(engine)
            identities[name] = engine.parts.plans.arithmetic_id
    assert_same_floats(scores["wide"], scores["again"])
    assert not np.array_equal(scores["wide"], scores["narrow"])
    assert identities["wide"] == identities["again"] != identities["narrow"]


def test_a_rounded_table_planted_in_a_float32_model_shows_as_well(tmp_path: Path) -> None:
    """pytorch/torchtitan: the same cast where nothing declares it."""
    with engine_of(tiny_model("qwen3"), tmp_path) as engine:
        before = teacher_forced(engine)
        engine.reset_prefix_cache()
        assert_same_floats(teacher_forced(engine), before)
        held = cos_sin(engine)
        held.copy_(held.bfloat16().float())
        engine.reset_prefix_cache()
        assert not np.array_equal(teacher_forced(engine), before)
