"""config.json to ModelSpec: spellings, absence, and refusals by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pagedctl.errors import ModelError
from pagedctl.models.architecture import FAMILIES
from pagedctl.models.config_json import parse_config
from pagedctl.models.resolve import spec_from_config
from pagedctl.models.spec import ModelSpec

ConfigOf = Callable[..., dict[str, Any]]


def refused(config: dict[str, Any]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        spec_from_config(config)
    return caught.value


def plain(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, warnings=())


def outcome(config: dict[str, Any]) -> object:
    """The spec without its warnings, or the faults: what null and absence must share."""
    try:
        return plain(spec_from_config(config))
    except ModelError as error:
        return [fault.what for fault in error.faults]


def codes(spec: ModelSpec) -> list[str]:
    return [warning.code for warning in spec.warnings]


def test_null_head_dim_plans_as_if_it_were_absent(config_of: ConfigOf) -> None:
    """llm-d/llm-d-benchmark#426: hidden 6144 over 48 heads is 128."""
    shape = {
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_hidden_layers": 56,
    }
    with_null = spec_from_config(config_of(**shape, head_dim=None))
    assert with_null.head_dim == 128
    assert with_null == spec_from_config(config_of(**shape))
    assert with_null.kv_bytes_per_token(dtype="bfloat16") == 2 * 56 * 8 * 128 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_null_means_absent_for_every_key(family: str, config_of: ConfigOf) -> None:
    """llm-d/llm-d-benchmark#426, for the whole kind and not only head_dim."""
    full = config_of(
        family,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 32},
        layer_types=["full_attention"] * 2,
        quantization_config=None,
    )
    for key in full:
        nulled = {**full, key: None}
        removed = {name: value for name, value in full.items() if name != key}
        assert outcome(nulled) == outcome(removed), key
    for key in full["rope_scaling"]:
        nulled = {**full, "rope_scaling": {**full["rope_scaling"], key: None}}
        rest = {name: value for name, value in full["rope_scaling"].items() if name != key}
        assert outcome(nulled) == outcome({**full, "rope_scaling": rest}), key


def test_an_explicit_head_dim_wins_over_hidden_by_heads(config_of: ConfigOf) -> None:
    """LMCache/LMCache#688: Qwen3-4B has 147,456 B of KV per token, not 92,160."""
    spec = spec_from_config(
        config_of(
            "qwen3",
            hidden_size=2560,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=36,
            head_dim=128,
            torch_dtype="bfloat16",
        )
    )
    assert spec.kv_bytes_per_token() == 147_456
    assert (spec.q_size, spec.kv_size) == (4096, 1024)


def test_heads_must_divide_hidden_only_without_head_dim(config_of: ConfigOf) -> None:
    error = refused(config_of(hidden_size=66))
    assert "hidden_size 66" in error.what
    assert "num_attention_heads 4" in error.what
    assert spec_from_config(config_of(hidden_size=66, head_dim=16)).head_dim == 16


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "a bool: true"),
        (5.0, "a float: 5.0"),
        ("4", 'a string: "4"'),
        ([4], "a list: [4]"),
        (0, "num_attention_heads is 0"),
        (-4, "num_attention_heads is -4"),
        (2**40, "num_attention_heads is 1099511627776"),
    ],
)
def test_an_integer_is_an_integer(value: object, says: str, config_of: ConfigOf) -> None:
    error = refused(config_of(num_attention_heads=value))
    assert says in error.what
    assert error.where == "config.json, key num_attention_heads"


@pytest.mark.parametrize("value", [True, "1e-5", 0.0, -1e-5, 10**400])
def test_the_norm_epsilon_is_a_positive_finite_number(value: object, config_of: ConfigOf) -> None:
    assert "rms_norm_eps" in refused(config_of(rms_norm_eps=value)).what


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", [0, 1, "false"])
def test_a_switch_is_true_or_false(key: str, value: object, config_of: ConfigOf) -> None:
    assert f"{key} is" in refused(config_of(**{key: value})).what


def test_all_faults_of_a_config_are_reported_together(config_of: ConfigOf) -> None:
    error = refused(
        config_of(
            without=("vocab_size",),
            num_hidden_layers=2.0,
            hidden_act="gelu",
            clip_qkv=8.0,
            quantization_config={"quant_method": "awq"},
            dtype="bfloat16",
            eos_token_id="2",
        )
    )
    named = " ".join(fault.what for fault in error.faults)
    for word in ("vocab_size", "num_hidden_layers", "gelu", "clip_qkv", "awq", "torch_dtype"):
        assert word in named
    assert "eos_token_id" in named
    assert len(error.faults) == 7


def test_faults_that_need_the_sizes_are_reported_together_too(config_of: ConfigOf) -> None:
    error = refused(
        config_of(rope_scaling={"type": "dynamic"}, layer_types=["x"], bos_token_id=True)
    )
    named = " ".join(fault.what for fault in error.faults)
    for word in ("dynamic", "layer types x", "layer_types has 1", "bos_token_id"):
        assert word in named


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"],
)
def test_a_size_has_no_default(key: str, config_of: ConfigOf) -> None:
    assert refused(config_of(without=(key,))).what == f"{key} is missing"


@pytest.mark.parametrize(
    "key",
    ["max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings"],
)
def test_a_default_is_always_stated(key: str, config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(without=(key,)))
    (warning,) = spec.warnings
    assert warning.code == "default_applied"
    assert warning.where == f"config.json, key {key}"
    assert f"{key} is absent" in warning.text
    assert not spec_from_config(config_of()).warnings


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_both_dtype_keys_are_one_setting(
    keys: dict[str, Any], expected: str, config_of: ConfigOf
) -> None:
    """huggingface/transformers#36567, ModelCloud/GPTQModel#1804."""
    spec = spec_from_config({**config_of(without=("torch_dtype",)), **keys})
    assert (spec.dtype, spec.dtype_origin) == (expected, "config.json")


def test_two_dtype_keys_that_differ_are_refused_even_with_a_flag(config_of: ConfigOf) -> None:
    """huggingface/transformers#36567: the third trigger."""
    config = config_of(dtype="bfloat16", torch_dtype="float16")
    with pytest.raises(ModelError, match="dtype is bfloat16 but torch_dtype is float16"):
        spec_from_config(config, dtype="float32")


def test_the_dtype_flag_wins_and_no_dtype_is_ever_assumed(config_of: ConfigOf) -> None:
    """huggingface/transformers#21524: never a global default."""
    spec = spec_from_config(config_of(), dtype="float16")
    assert (spec.dtype, spec.dtype_origin) == ("float16", "flag")
    assert "not stated" in refused(config_of(without=("torch_dtype",))).what
    assert 'dtype "float8_e4m3fn"' in refused(config_of(torch_dtype="float8_e4m3fn")).what


@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        (151643, (151643,)),
        ([198, 151643], (198, 151643)),
        ([151643], (151643,)),
        ([151643, 198, 151643], (151643, 198)),
        (None, ()),
        ([], ()),
    ],
)
def test_end_tokens_are_a_set_however_they_are_spelled(
    eos: object, expected: tuple[int, ...], config_of: ConfigOf
) -> None:
    """alibaba/ChatLearn#263, QwenLM/Qwen#1001."""
    spec = spec_from_config(config_of(vocab_size=151936, eos_token_id=eos))
    assert tuple(spec.eos_token_ids) == expected
    assert set(spec.eos_token_ids.values()) <= {("config.json",)}


@pytest.mark.parametrize("eos", [True, 2.0, "2", -1, 99, [2, None], [2, True], [[2]], [2, 99]])
def test_an_end_token_is_an_id_of_the_vocabulary(eos: object, config_of: ConfigOf) -> None:
    assert "eos_token_id" in refused(config_of(eos_token_id=eos)).what


def test_the_output_vocabulary_fits_in_the_input_vocabulary(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(output_vocab_size=64))
    assert (spec.input_vocab_size, spec.output_vocab_size) == (99, 64)
    for absent in (config_of(), config_of(output_vocab_size=None)):
        assert spec_from_config(absent).output_vocab_size == 99
    error = refused(config_of(output_vocab_size=100))
    assert "input_vocab_size is 99 and output_vocab_size is 100" in error.what
    assert "tied" in refused(config_of(output_vocab_size=64, tie_word_embeddings=True)).what


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method: fp8"),
        ({"load_in_8bit": True}, "quant_method: not named"),
    ],
)
def test_a_quantised_checkpoint_is_refused_by_its_method(
    block: dict[str, Any], says: str, config_of: ConfigOf
) -> None:
    """huggingface/transformers#35963, #35471."""
    for key in ("quantization_config", "compression_config", "quantization"):
        error = refused(config_of(**{key: block}))
        assert says in error.what
        assert error.where.endswith(key)


@pytest.mark.parametrize("block", [{}, None])
def test_an_empty_quantisation_block_is_no_quantisation(block: object, config_of: ConfigOf) -> None:
    """huggingface/transformers#35963: an empty dict or null is not quantised."""
    assert plain(spec_from_config(config_of(quantization_config=block))) == plain(
        spec_from_config(config_of())
    )


def test_inactive_sliding_window_is_full_attention(config_of: ConfigOf) -> None:
    """Blackwellboy/model-serving-minefield#107, huggingface/transformers#40126."""
    for family in ("qwen2", "qwen3"):
        spec = spec_from_config(
            config_of(
                family,
                use_sliding_window=False,
                sliding_window=32768,
                max_window_layers=28,
                num_hidden_layers=36,
            )
        )
        assert spec.windows == (None,) * 36
        assert not spec.has_windows


def test_qwen_windows_start_at_max_window_layers(config_of: ConfigOf) -> None:
    spec = spec_from_config(
        config_of(
            "qwen2",
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=3,
            num_hidden_layers=5,
        )
    )
    assert spec.windows == (None, None, None, 16, 16)


@pytest.mark.parametrize(("window", "expected"), [(16, (16, 16)), (None, (None, None))])
def test_mistral_windows_are_on_every_layer(
    window: int | None, expected: tuple[int | None, ...], config_of: ConfigOf
) -> None:
    assert spec_from_config(config_of("mistral", sliding_window=window)).windows == expected


def test_use_sliding_window_false_switches_mistral_windows_off(config_of: ConfigOf) -> None:
    config = config_of("mistral", sliding_window=16, use_sliding_window=False)
    assert spec_from_config(config).windows == (None, None)


def test_a_window_that_mistral_leaves_unsaid_is_stated(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of("mistral", without=("sliding_window",)))
    assert spec.windows == (None, None)
    assert codes(spec) == ["default_applied"]
    assert "sliding_window is absent" in spec.warnings[0].text


def test_layer_types_win_over_use_sliding_window(config_of: ConfigOf) -> None:
    kinds = ["sliding_attention", "full_attention"]
    spec = spec_from_config(
        config_of("qwen3", layer_types=kinds, sliding_window=16, use_sliding_window=False)
    )
    assert spec.windows == (16, None)
    assert codes(spec) == ["layer_types_win"]
    full = config_of("mistral", layer_types=["full_attention"] * 2, sliding_window=16)
    assert spec_from_config(full).windows == (None, None)


@pytest.mark.parametrize(
    ("family", "keys", "says"),
    [
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is absent"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window is absent"),
        ("qwen3", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "3 entries for 2 layers"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types is a string"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mistral", {"sliding_window": True}, "sliding_window is a bool"),
        ("llama", {"sliding_window": 16}, "sliding_window 16 is given for llama"),
    ],
)
def test_a_window_that_cannot_be_built_is_refused(
    family: str, keys: dict[str, Any], says: str, config_of: ConfigOf
) -> None:
    assert says in refused(config_of(family, **keys)).what


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("qwen2", {}, (True, False, False)),
        ("qwen2", {"attention_bias": True}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("mistral", {"attention_bias": False, "mlp_bias": False}, (False, False, False)),
    ],
)
def test_biases_follow_the_family_and_its_keys(
    family: str, keys: dict[str, Any], expected: tuple[bool, ...], config_of: ConfigOf
) -> None:
    """sbryngelson/ANEForge#253, vllm-project/vllm#3767, mlc-ai/mlc-llm#3494."""
    spec = spec_from_config(config_of(family, **keys))
    assert (spec.attention_bias, spec.o_proj_bias, spec.mlp_bias) == expected


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("mistral", "attention_bias", True),
        ("qwen2", "attention_bias", False),
        ("qwen3", "mlp_bias", True),
    ],
)
def test_a_bias_key_against_the_family_is_refused(
    family: str, key: str, value: bool, config_of: ConfigOf
) -> None:
    assert (
        f"{key} is {str(value).lower()} for {family}"
        in refused(config_of(family, **{key: value})).what
    )


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_type": "mixtral", "architectures": None}, 'model_type "mixtral"'),
        ({"model_type": "llama4"}, 'model_type "llama4"'),
        ({"model_type": None, "architectures": None}, "model_type is missing"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "model_type is missing"),
        ({"model_type": 3}, "model_type is an integer"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    keys: dict[str, Any], says: str, config_of: ConfigOf
) -> None:
    assert says in refused(config_of(**keys)).what


def test_architectures_stand_in_for_an_absent_model_type(config_of: ConfigOf) -> None:
    assert spec_from_config(config_of("qwen3", model_type=None)).family == "qwen3"


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_logit_softcapping": 50.0},
        {"clip_qkv": 8.0},
        {"embedding_multiplier": 12.0},
        {"residual_multiplier": 0.22},
        {"logits_scaling": 8.0},
        {"num_local_experts": 8},
        {"rope_interleaved": True},
        {"is_causal": False},
        {"attention_bias_scale": 2},
        {"use_flash_sinks": True},
        {"mup_width": 256},
    ],
)
def test_a_key_that_may_change_the_arithmetic_is_refused_by_name(
    keys: dict[str, Any], config_of: ConfigOf
) -> None:
    ((key, _),) = keys.items()
    error = refused(config_of(**keys))
    assert key in error.what
    assert error.where == f"config.json, key {key}"


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_logit_softcapping": None},
        {"residual_multiplier": 1.0},
        {"residual_multiplier": 1},
        {"rope_interleaved": False},
        {"pruned_heads": {}},
        {"attention_dropout": 0.1, "use_cache": False, "pretraining_tp": 2},
        {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}},
        {"_name_or_path": "x", "_attn_implementation_autoset": True},
    ],
)
def test_a_key_that_changes_nothing_is_ignored(keys: dict[str, Any], config_of: ConfigOf) -> None:
    assert spec_from_config(config_of(**keys)) == spec_from_config(config_of())


def test_a_true_bool_is_not_the_neutral_number_one(config_of: ConfigOf) -> None:
    assert "residual_multiplier true" in refused(config_of(residual_multiplier=True)).what


def test_an_unknown_harmless_key_is_ignored_with_a_warning(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(dataset_note="v3", use_magic_attention=False))
    assert codes(spec) == ["unknown_key", "unknown_key"]
    assert 'dataset_note "v3"' in spec.warnings[0].text


def test_code_that_comes_with_a_model_is_never_run_and_that_is_stated(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(auto_map={"AutoModelForCausalLM": "modeling.Foo"}))
    assert codes(spec) == ["remote_code"]


def test_a_bos_outside_the_vocabulary_is_dropped_with_a_warning(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(bos_token_id=99))
    assert spec.bos_token_id is None
    assert codes(spec) == ["bos_outside_vocabulary"]


def test_absent_kv_heads_are_all_heads(config_of: ConfigOf) -> None:
    llama = spec_from_config(config_of(without=("num_key_value_heads",)))
    assert (llama.num_key_value_heads, codes(llama)) == (4, [])
    mistral = spec_from_config(config_of("mistral", without=("num_key_value_heads",)))
    assert (mistral.num_key_value_heads, codes(mistral)) == (4, ["default_applied"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_config_object_gives_the_same_spec_as_the_file(
    family: str, config_of: ConfigOf
) -> None:
    """sgl-project/sglang#14745, deepspeedai/DeepSpeed#8345."""
    transformers = pytest.importorskip("transformers")
    raw = config_of(family, rope_theta=1_000_000, rope_scaling=None, head_dim=16)
    config_class = type(transformers.AutoConfig.for_model(family))
    as_dict = config_class.from_dict(dict(raw)).to_dict()
    assert "rope_theta" not in as_dict
    from_file, from_object = spec_from_config(raw), spec_from_config(as_dict)
    assert from_file.rope.theta == 1e6
    assert plain(from_object) == plain(from_file)
    assert from_object.spec_digest == from_file.spec_digest


def test_every_class_default_of_transformers_is_understood() -> None:
    """Whatever transformers writes by default is read or ignored, never an unknown key."""
    transformers = pytest.importorskip("transformers")
    for family in FAMILIES:
        spec = spec_from_config(
            transformers.AutoConfig.for_model(family).to_dict(), dtype="float32"
        )
        assert codes(spec) == []


def test_the_digest_is_of_the_architecture_alone(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of())
    same = spec_from_config(config_of(eos_token_id=[3], note="x"), name="other", dtype="float16")
    assert same.spec_digest == spec.spec_digest
    assert spec_from_config(config_of(rope_theta=10000)).spec_digest == spec.spec_digest
    for change in (
        {"rope_theta": 10001.0},
        {"rms_norm_eps": 1e-6},
        {"vocab_size": 100},
        {"tie_word_embeddings": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ):
        assert spec_from_config(config_of(**change)).spec_digest != spec.spec_digest


def test_a_parsed_config_says_whether_the_tie_was_stated(config_of: ConfigOf) -> None:
    assert parse_config(config_of()).tie_is_stated
    assert not parse_config(config_of(without=("tie_word_embeddings",))).tie_is_stated
