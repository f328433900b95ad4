"""The exact tensor set of each family, and how it is split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest

from pagedctl.errors import ModelError
from pagedctl.models.architecture import FAMILIES
from pagedctl.models.builtin import BUILTIN
from pagedctl.models.locate import locate_model
from pagedctl.models.resolve import resolve_spec, spec_from_config
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tensor_parallel import local_shape, shard_bounds, tp_faults

ConfigOf = Callable[..., dict[str, Any]]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral wide heads": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "head_dim": 32}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
}

# Totals that the publishers' model pages state.
PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize("case", CASES)
def test_the_tensor_set_is_that_of_the_transformers_model(case: str, config_of: ConfigOf) -> None:
    """huggingface/transformers models are the authority for names and shapes.

    sbryngelson/ANEForge#253, vllm-project/vllm#3767 (biases), sgl-project/sglang#1508 (tie).
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family, keys = CASES[case]
    config = config_of(family, **keys)
    with torch.device("meta"):
        theirs = transformers.AutoConfig.for_model(family).from_dict(dict(config))
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        assert expected.pop("lm_head.weight") == expected["model.embed_tokens.weight"]
    spec = spec_from_config(config)
    assert {tensor.name: tensor.shape for tensor in spec.tensors} == expected
    assert spec.parameters == sum(prod(shape) for shape in expected.values())


def test_a_smaller_head_has_its_own_height(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(output_vocab_size=64))
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    assert shapes["model.embed_tokens.weight"] == (99, 64)
    assert shapes["lm_head.weight"] == (64, 64)


def test_every_built_in_architecture_has_the_published_size() -> None:
    found = {name: resolve_spec(locate_model(name)).parameters for name in BUILTIN}
    assert found == PUBLISHED_PARAMETERS


def test_built_in_architectures_leave_nothing_to_defaults() -> None:
    for name in BUILTIN:
        spec = resolve_spec(locate_model(name))
        assert spec.warnings == (), name
        assert spec.eos_sources, name
        assert spec.weight_bytes() == spec.parameters * 2, name


def test_kv_bytes_of_qwen3_8b() -> None:
    """36 layers x 2 x 8 kv heads x 128 x 2 bytes; a quarter of it on each of four ranks."""
    spec = resolve_spec(locate_model("qwen3-8b"))
    assert spec.kv_bytes_per_token() == 147_456
    assert spec.kv_bytes_per_token(tp=4) == 36_864
    assert spec.kv_bytes_per_token(tp=16) == spec.kv_bytes_per_token(tp=8) == 18_432
    assert spec.kv_bytes_per_token(dtype="float32") == 294_912


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_every_element_and_no_more(family: str, tp: int, config_of: ConfigOf) -> None:
    """Rows, columns and biases of all ranks make up the tensor; kv heads repeat in order."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    biases = {"attention_bias": True} if family in ("llama", "qwen3") else {}
    spec = spec_from_config(config_of(family, **heads, **biases))
    total = 0
    for tensor in spec.tensors:
        bounds = [shard_bounds(spec, tensor, tp=tp, rank=rank) for rank in range(tp)]
        axis = 1 if tensor.shard == "columns" else 0
        padded = local_shape(spec, tensor, tp)
        total += prod(padded)
        covered = [index for start, stop in bounds for index in range(start, stop)]
        if tensor.shard == "replicated":
            assert bounds == [(0, tensor.shape[0])] * tp
            assert padded == tensor.shape
            continue
        assert sorted(set(covered)) == list(range(tensor.shape[axis])), tensor.name
        if tensor.role in ("k_proj", "v_proj"):
            copies = max(tp // 4, 1)
            assert len(covered) == tensor.shape[axis] * copies
            query_heads = [rank * 8 // tp // 2 for rank in range(tp)]
            assert [start // 8 for start, _ in bounds] == query_heads
        else:
            assert covered == list(range(tensor.shape[axis])), tensor.name
        assert max(stop - start for start, stop in bounds) == padded[axis]
    assert spec.weight_bytes(tp=tp) == total * 4
    assert spec.weight_bytes(dtype="bfloat16", tp=tp) == total * 2


def test_a_vocabulary_smaller_than_its_padding_leaves_ranks_empty(config_of: ConfigOf) -> None:
    keys = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    spec = spec_from_config(config_of(vocab_size=9, **keys))
    head = spec.tensors[-1]
    bounds = [shard_bounds(spec, head, tp=8, rank=rank) for rank in range(8)]
    assert bounds == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 9), (9, 9), (9, 9), (9, 9)]
    assert local_shape(spec, head, 8) == (2, 64)


def test_shard_rules_by_role(config_of: ConfigOf) -> None:
    """sbryngelson/ANEForge#253: q/k/v biases split with their rows, o_proj's is whole."""
    spec = spec_from_config(config_of(attention_bias=True, mlp_bias=True))
    rules: dict[tuple[str, str], str] = {
        (tensor.role, tensor.part): tensor.shard for tensor in spec.tensors
    }
    rows = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    for role in rows:
        assert rules[role, "weight"] == rules[role, "bias"] == "rows"
    for role in ("o_proj", "down_proj"):
        assert (rules[role, "weight"], rules[role, "bias"]) == ("columns", "replicated")
    assert rules["embed_tokens", "weight"] == rules["lm_head", "weight"] == "rows"
    assert rules["norm", "weight"] == rules["input_layernorm", "weight"] == "replicated"


def divisible(spec: ModelSpec, tp: int) -> list[str]:
    return [fault.what.split()[0] for fault in tp_faults(spec, tp)]


def test_every_violated_divisibility_is_named(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of(num_attention_heads=8, num_key_value_heads=4, head_dim=8))
    assert [tp for tp in range(1, 10) if not tp_faults(spec, tp)] == [1, 2, 4, 8]
    assert divisible(spec, 3) == ["num_attention_heads", "num_key_value_heads"]
    assert divisible(spec, 5) == ["num_attention_heads", "intermediate_size", "num_key_value_heads"]
    assert divisible(spec, 16) == ["num_attention_heads"]
    assert "for example 4" in tp_faults(spec, 5)[0].remedy
    assert tp_faults(spec, 0)[0].what == "tp is 0"


def test_bytes_of_an_impossible_split_are_refused(config_of: ConfigOf) -> None:
    spec = spec_from_config(config_of())
    for ask in (spec.weight_bytes, spec.kv_bytes_per_token):
        with pytest.raises(ModelError) as caught:
            ask(tp=3)
        assert "num_attention_heads 4 cannot be split over 3 ranks" in caught.value.what
