"""Rope: parameters from every spelling, and the fp64 numbers against two independent sources."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pagedctl.errors import ModelError
from pagedctl.models.resolve import spec_from_config
from pagedctl.models.rope import RopeSpec

ConfigOf = Callable[..., dict[str, Any]]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 64, "original_max_position_embeddings": 4096}


def rope_of(config: dict[str, Any]) -> RopeSpec:
    return spec_from_config(config).rope


def refused(config: dict[str, Any]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        spec_from_config(config)
    return caught.value


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {"rope_parameters": {"type": "default", "rope_theta": 1000000}},
        {"rope_theta": 1000000, "rope_scaling": None},
        {"rope_theta": 1000000, "rope_scaling": {}},
        {"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1000000.0}},
        {"rope_scaling": {"rope_theta": 1000000.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 1e6, "type": "default"},
            }
        },
    ],
)
def test_theta_is_found_wherever_the_config_carries_it(
    keys: dict[str, Any], config_of: ConfigOf
) -> None:
    """deepspeedai/DeepSpeed#8345, #8341; sgl-project/sglang#14745; mini-sglang#13."""
    spec = spec_from_config({**config_of("qwen3", without=("rope_theta",)), **keys})
    assert spec.rope == RopeSpec(theta=1e6, rotary_dim=16)
    assert spec.warnings == ()


def test_an_absent_theta_is_the_stated_family_default(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(without=("rope_theta",)))
    assert spec.rope.theta == 10000.0
    assert "the llama default 10000 is used" in spec.warnings[0].text


def test_two_thetas_that_differ_are_refused_with_both(config_of: ConfigOf) -> None:
    """deepspeedai/DeepSpeed#8345: no reader may pick one of them silently."""
    error = refused(config_of(rope_theta=500000.0, rope_parameters={"rope_theta": 1e6}))
    assert "500000.0" in error.what
    assert "1000000.0" in error.what


def test_both_blocks_are_one_and_differences_are_refused(config_of: ConfigOf) -> None:
    both = config_of(
        rope_parameters={"rope_type": "linear"}, rope_scaling={"type": "linear", "factor": 2.0}
    )
    assert rope_of(both).factor == 2.0
    error = refused(config_of(rope_parameters=LLAMA3, rope_scaling={**LLAMA3, "factor": 8}))
    assert "rope_parameters.factor is 32 but rope_scaling.factor is 8" in error.what
    error = refused(config_of(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2}))
    assert "linear" in error.what
    assert "yarn" in error.what


def test_llama3_scaling_by_wavelength(config_of: ConfigOf) -> None:
    """jmaczan/tiny-vllm#1: Llama-3.2-1B, of 32 pairs 0-14 kept, 15-17 blended, 18-31 over 32."""
    config = config_of(
        num_attention_heads=4, head_dim=64, rope_theta=500000.0, rope_scaling=dict(LLAMA3)
    )
    found = rope_of(config).inverse_frequencies()
    base = [500000.0 ** (-2.0 * pair / 64.0) for pair in range(32)]
    assert len(found) == 32
    assert found[:15] == pytest.approx(base[:15], rel=1e-14)
    for pair in (15, 16, 17):
        assert base[pair] / 32 < found[pair] < base[pair]
    assert found[18:] == pytest.approx([value / 32 for value in base[18:]], rel=1e-14)
    assert found[15] == pytest.approx(1.29055e-3, rel=1e-5)
    assert found[17] == pytest.approx(9.70829e-5, rel=1e-5)
    assert found[31] == pytest.approx(9.41831e-8, rel=1e-5)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"attention_factor": 1.0}, 1.0),
        ({"attention_factor": 1}, 1.0),
        ({"attention_factor": 1.25, "mscale": 0.707, "mscale_all_dim": 1.0}, 1.25),
        ({}, 1.4158883083359672),
        ({"attention_factor": None}, 1.4158883083359672),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.707, "mscale_all_dim": 1.5},
            (1 + 0.0707 * math.log(64)) / (1 + 0.15 * math.log(64)),
        ),
        ({"mscale": 1.0}, 1.4158883083359672),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 1.4158883083359672),
    ],
)
def test_yarn_attention_factor_and_mscale_are_honoured(
    extra: dict[str, Any], expected: float, config_of: ConfigOf
) -> None:
    """vllm-project/vllm#46280, #48351: an explicit 1.0 is not replaced by 0.1 ln(64) + 1."""
    rope = rope_of(config_of(rope_scaling={**YARN, **extra}))
    assert rope.attention_scaling == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    "extra",
    [
        {"mscale": 0.707},
        {"mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 0.0},
        {"mscale": 0.0, "mscale_all_dim": 0.0},
    ],
)
def test_an_mscale_that_readers_disagree_about_is_refused(
    extra: dict[str, Any], config_of: ConfigOf
) -> None:
    assert "mscale" in refused(config_of(rope_scaling={**YARN, **extra})).what


@pytest.mark.parametrize(
    "keys",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5, "rope_scaling": None},
        {"partial_rotary_factor": 0.5, "rotary_dim": None},
        {"partial_rotary_factor": 0.5, "rotary_dim": 64},
    ],
)
def test_a_partial_rotary_factor_counts_exactly_once(
    keys: dict[str, Any], config_of: ConfigOf
) -> None:
    """InternLM/lmdeploy#3861, ml-explore/mlx-lm#1698, vllm-project/vllm#29966, #43770."""
    spec = spec_from_config(config_of(head_dim=128, **keys))
    assert spec.rope.rotary_dim == 64
    frequencies = spec.rope.inverse_frequencies()
    assert frequencies == pytest.approx([10000.0 ** (-2 * i / 64) for i in range(32)], rel=1e-14)
    assert [warning.code for warning in spec.warnings] == ["partial_rotary"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "0.25",
        ),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor is 0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": True}, "a bool"),
        ({"partial_rotary_factor": 0.3}, "38.4"),
        ({"rotary_dim": 64}, "rotary_dim is 64"),
        ({"partial_rotary_factor": 0.5, "rotary_dim": 128}, "rotary_dim is 128"),
        ({"rotary_dim": 64.0}, "rotary_dim is a float"),
        ({"head_dim": 15}, "head_dim 15"),
    ],
)
def test_rotated_dimensions_are_an_even_part_of_the_head(
    keys: dict[str, Any], says: str, config_of: ConfigOf
) -> None:
    assert says in refused(config_of(**{"head_dim": 128, **keys})).what


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 'rope type "dynamic"'),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, 'rope type "longrope"'),
        ({"rope_type": "su"}, 'rope type "su"'),
        ({"rope_type": 3}, "rope_type is an integer"),
        ({"rope_type": "default", "factor": 2.0}, "factor 2.0 has no meaning"),
        ({"mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"rope_type": "linear", "factor": True}, "factor is a bool"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast 32 has no meaning"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5}, "attention_factor 0.5"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor is missing"),
        ({**LLAMA3, "low_freq_factor": 4}, "high_freq_factor is 4"),
        ({**LLAMA3, "original_max_position_embeddings": 8192.0}, "a float: 8192.0"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast is 1"),
        ({**YARN, "beta_slow": 0}, "beta_slow is 0"),
        ({**YARN, "attention_factor": 0}, "attention_factor is 0"),
        ({**YARN, "truncate": 1}, "truncate is an integer"),
        ({**YARN, "attn_factor": 1.0}, "attn_factor"),
        ({"full_attention": {"rope_theta": 1e4}, "rope_type": "default"}, "between layer types"),
        (
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}},
            "between layer types",
        ),
        ({"full_attention": 3}, "full_attention is an integer"),
        ([1], "rope_parameters is a list"),
    ],
)
def test_a_rope_that_is_not_understood_is_refused(
    block: object, says: str, config_of: ConfigOf
) -> None:
    error = refused(config_of(rope_parameters=block))
    assert any(says in fault.what for fault in error.faults)


@pytest.mark.parametrize("theta", [0, 1, -10000.0, True, "10000", 10**400])
def test_theta_is_a_finite_number_above_one(theta: object, config_of: ConfigOf) -> None:
    assert "rope_theta" in refused(config_of(rope_theta=theta)).what


def test_inert_keys_of_a_block_are_accepted(config_of: ConfigOf) -> None:
    block = {
        "type": "yarn",
        "factor": 16.0,
        "finetuned": True,
        "original_max_position_embeddings": 4096,
    }
    assert rope_of(config_of(rope_scaling=block)).factor == 16.0
    block = {"rope_type": "default", "factor": 1.0, "original_max_position_embeddings": 8192}
    assert rope_of(config_of(rope_scaling=block)) == RopeSpec(theta=10000.0, rotary_dim=16)


def test_the_context_of_pretraining_may_stand_outside_the_block(config_of: ConfigOf) -> None:
    block = {"rope_type": "yarn", "factor": 4.0}
    outside = config_of(rope_scaling=block, original_max_position_embeddings=128)
    assert rope_of(outside).original_max_position_embeddings == 128
    both = config_of(
        rope_scaling={**block, "original_max_position_embeddings": 64},
        original_max_position_embeddings=128,
    )
    assert "128" in refused(both).what
    assert "64" in refused(both).what
    neither = spec_from_config(config_of(rope_scaling=block))
    assert neither.rope.original_max_position_embeddings == 512
    assert neither.warnings[0].code == "default_applied"


def test_an_absent_yarn_factor_is_the_stated_ratio_of_contexts(config_of: ConfigOf) -> None:
    block = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    spec = spec_from_config(config_of(rope_scaling=block))
    assert spec.rope.factor == 4.0
    assert "= 4 is used" in spec.warnings[0].text
    too_long = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert "below" in refused(config_of(rope_scaling=too_long)).what


TRANSFORMERS_CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear partial": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "llama3": LLAMA3,
    "llama3 early": {**LLAMA3, "factor": 8.0, "low_freq_factor": 2, "high_freq_factor": 16},
    "yarn": YARN,
    "yarn short": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn tiny": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
    "yarn long": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072},
    "yarn vast": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2**30},
    "yarn smooth": {**YARN, "truncate": False},
    "yarn betas": {**YARN, "beta_fast": 8, "beta_slow": 0.5},
    "yarn singular": {**YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn explicit": {**YARN, "attention_factor": 0.75},
    "yarn mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn partial": {**YARN, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("case", TRANSFORMERS_CASES)
def test_frequencies_and_scaling_equal_transformers(
    case: str, theta: float, config_of: ConfigOf
) -> None:
    """An independent implementation, in fp32, of every scaled type."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    block = {**TRANSFORMERS_CASES[case], "rope_theta": theta}
    rope = rope_of(config_of(head_dim=64, without=("rope_theta",), rope_parameters=dict(block)))
    theirs = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters=dict(block),
    )
    frequencies, scaling = utils.ROPE_INIT_FUNCTIONS[block["rope_type"]](theirs, "cpu")
    assert rope.attention_scaling == pytest.approx(scaling, rel=1e-12)
    assert rope.inverse_frequencies() == pytest.approx(frequencies.tolist(), rel=3e-6)


def test_default_frequencies_equal_transformers(config_of: ConfigOf) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    theirs = transformers.Qwen3Config(head_dim=32, rope_parameters={"rope_theta": 1e6})
    frequencies, scaling = modeling.Qwen3RotaryEmbedding.compute_default_rope_parameters(theirs)
    rope = rope_of(config_of("qwen3", head_dim=32, rope_theta=1e6))
    assert rope.attention_scaling == scaling == 1.0
    assert rope.inverse_frequencies() == pytest.approx(frequencies.tolist(), rel=3e-6)


def test_a_rope_spec_without_what_its_type_needs_is_an_error() -> None:
    for kind in ("llama3", "yarn"):
        with pytest.raises(ValueError, match=kind):
            RopeSpec(type=kind, theta=1e4, rotary_dim=8).inverse_frequencies()
