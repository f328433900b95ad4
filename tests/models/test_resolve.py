"""All files of a model together: end tokens, tied heads, dtype, and faults in one report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedctl.errors import ModelError
from pagedctl.models.locate import ModelLocation, locate_model
from pagedctl.models.resolve import ResolvedModel, WeightsPolicy, resolve_model, resolve_spec

Make = Callable[..., Any]
HEAD = "lm_head.weight"


def resolve(path: Path, **options: Any) -> ResolvedModel:
    return resolve_model(locate_model(str(path)), **options)


def refused(path: Path, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve(path, **options)
    return caught.value


def codes(model: ResolvedModel) -> list[str]:
    return [warning.code for warning in model.spec.warnings]


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_end_tokens_are_the_union_of_all_files_with_their_sources(
    tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    """NVIDIA/TensorRT-Model-Connect#640: 151643 stops although config.json names 151645 only."""
    folder = write_model(
        tmp_path,
        config_of(
            "qwen3", vocab_size=151936, eos_token_id=151645, hidden_size=8, intermediate_size=8
        ),
    )
    write_json(folder / "generation_config.json", {"eos_token_id": [151645, 151643]})
    decoder = {"7": {"content": "<x>"}, "151645": {"content": "<|im_end|>"}}
    write_json(
        folder / "tokenizer_config.json",
        {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder},
    )
    spec = resolve(folder).spec
    assert list(spec.eos_token_ids.items()) == [
        (151645, ("config.json", "generation_config.json", "tokenizer_config.json")),
        (151643, ("generation_config.json",)),
    ]


@pytest.mark.parametrize(
    ("tokenizer_config", "tokenizer", "expected"),
    [
        ({"eos_token": "</s>"}, {"added_tokens": [{"id": 5, "content": "</s>"}]}, [5]),
        ({"eos_token": {"content": "</s>"}}, {"added_tokens": [{"id": 5, "content": "</s>"}]}, [5]),
        ({"eos_token": "</s>"}, {"model": {"vocab": {"</s>": 6}}}, [6]),
        (
            {"eos_token": "</s>", "added_tokens_decoder": {"4": {"content": "</s>"}}},
            {"added_tokens": [{"id": 5, "content": "</s>"}]},
            [4],
        ),
        ({"eos_token": None}, {}, []),
        ({}, {}, []),
    ],
)
def test_the_tokenizers_end_token_is_found_by_its_text(
    tokenizer_config: object,
    tokenizer: object,
    expected: list[int],
    tmp_path: Path,
    config_of: Make,
    write_model: Make,
) -> None:
    folder = write_model(tmp_path, config_of(eos_token_id=None))
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "tokenizer.json", tokenizer)
    model = resolve(folder)
    assert list(model.spec.eos_token_ids) == expected
    assert codes(model) == ([] if expected else ["no_eos"])
    assert model.tokenizer.tokenizer_json == folder / "tokenizer.json"
    assert model.tokenizer.chat_template is None


@pytest.mark.parametrize("decoder", [{}, {"99": {"content": "</s>"}}])
def test_a_tokenizer_end_token_that_the_model_cannot_emit_is_left_out(
    decoder: object, tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    folder = write_model(tmp_path, config_of())
    write_json(
        folder / "tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": decoder}
    )
    model = resolve(folder)
    assert list(model.spec.eos_token_ids) == [2]
    assert codes(model) == ["eos_unresolved"]


def test_user_stop_tokens_are_not_part_of_the_models_end_tokens(
    tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    """vllm-project/vllm#4589: only eos keys count, so ignore_eos can switch off exactly these."""
    folder = write_model(tmp_path, config_of())
    keys = {
        "eos_token_id": [2, 3],
        "stop_token_ids": [7],
        "forced_eos_token_id": 8,
        "pad_token_id": 9,
        "temperature": 0.6,
    }
    write_json(folder / "generation_config.json", keys)
    assert list(resolve(folder).spec.eos_token_ids) == [2, 3]


def test_a_tied_model_without_a_stored_head_is_complete(
    tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    """sgl-project/sglang#1508, vllm-project/vllm#53019."""
    model = resolve(write_model(tmp_path, config_of(tie_word_embeddings=True)))
    assert model.spec.tie_word_embeddings
    assert model.checkpoint is not None
    assert HEAD not in model.checkpoint.by_name
    assert codes(model) == []


def tied_with_head(config_of: Make, tensors_of: Make) -> tuple[dict[str, Any], dict[str, Any]]:
    config = config_of(tie_word_embeddings=True)
    tensors = tensors_of(config)
    return config, {**tensors, HEAD: tensors["model.embed_tokens.weight"]}


def test_a_tied_head_that_is_stored_with_equal_bytes_is_noted_once(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """vllm-project/vllm#6758, ml-explore/mlx-lm#1298."""
    model = resolve(write_model(tmp_path, *tied_with_head(config_of, tensors_of)))
    assert model.spec.tie_word_embeddings
    assert model.checkpoint is not None
    assert HEAD not in model.checkpoint.by_name
    assert codes(model) == ["tied_head_stored"]


@pytest.mark.parametrize("change", ["last byte", "dtype"])
def test_a_tied_head_that_differs_is_untied_with_a_warning(
    change: str, tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    config, tensors = tied_with_head(config_of, tensors_of)
    dtype, shape, data = tensors[HEAD]
    if change == "last byte":
        tensors[HEAD] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))
    else:
        tensors[HEAD] = ("BF16", shape, data[::2])
    model = resolve(write_model(tmp_path, config, tensors))
    assert not model.spec.tie_word_embeddings
    assert model.checkpoint is not None
    assert HEAD in model.checkpoint.by_name
    assert codes(model)[0] == "head_untied"
    assert HEAD in model.spec.warnings[0].text


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ((), "tie_word_embeddings is false"),
        (("tie_word_embeddings",), "tie_word_embeddings is absent, and false is the llama default"),
    ],
)
def test_an_untied_model_without_a_head_is_refused(
    without: tuple[str, ...],
    says: str,
    tmp_path: Path,
    config_of: Make,
    tensors_of: Make,
    write_model: Make,
) -> None:
    """QwenLM/Qwen3-VL-Embedding#89: names the tensor and the flag, stated or defaulted."""
    config = config_of(without=without)
    tensors = tensors_of(config)
    del tensors[HEAD]
    error = refused(write_model(tmp_path, config, tensors))
    assert f"{HEAD} is missing" in error.what
    assert says in error.what


def test_without_a_dtype_key_most_matrices_decide(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """huggingface/transformers#21524: norms F32, matrices BF16, embedding F16."""
    config = config_of(without=("torch_dtype",))
    tensors = tensors_of(config, "BF16")
    tensors.update((name, value) for name, value in tensors_of(config).items() if "norm" in name)
    tensors["model.embed_tokens.weight"] = tensors_of(config, "F16")["model.embed_tokens.weight"]
    folder = write_model(tmp_path, config, tensors)
    model = resolve(folder)
    assert (model.spec.dtype, model.spec.dtype_origin) == (
        "bfloat16",
        "derived: most matrix tensors",
    )
    assert sorted(warning.text.split(":")[0] for warning in model.spec.warnings) == [
        "1 tensors stored as float16 are cast to bfloat16",
        "5 tensors stored as float32 are cast to bfloat16",
    ]
    flagged = resolve(folder, dtype="float32").spec
    assert (flagged.dtype, flagged.dtype_origin) == ("float32", "flag")
    write_json(folder / "config.json", config_of(torch_dtype="float16"))
    assert resolve(folder).spec.dtype == "float16"
    assert 'dtype "int8"' in refused(folder, dtype="int8").what


def test_faults_of_all_files_are_reported_together(
    tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    folder = write_model(tmp_path, config_of(hidden_act="gelu"))
    (folder / "model.safetensors").write_bytes(b"")
    write_json(folder / "generation_config.json", {"eos_token_id": True})
    named = [Path(fault.where.split(",")[0]).name for fault in refused(folder).faults]
    assert named == ["config.json", "model.safetensors", "generation_config.json"]
    write_json(folder / "config.json", config_of(without=("torch_dtype",)))
    named = [Path(fault.where.split(",")[0]).name for fault in refused(folder).faults]
    assert named == ["model.safetensors", "generation_config.json"]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_broken_side_file_is_refused(
    name: str, tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    folder = write_model(tmp_path, config_of())
    (folder / name).write_text('{"eos_token_id": 1, "eos_token_id": 2}')
    error = refused(folder)
    assert error.where == f"{folder / name}, line 1, column 21"


@pytest.mark.parametrize(
    ("weights", "has_checkpoint"), [("auto", True), ("required", True), ("ignore", False)]
)
def test_the_weights_policy_decides_what_is_looked_at(
    weights: WeightsPolicy, has_checkpoint: bool, tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    folder = write_model(tmp_path, config_of())
    assert (resolve(folder, weights=weights).checkpoint is not None) is has_checkpoint
    (folder / "model.safetensors").write_bytes(b"")
    if weights == "ignore":
        assert resolve(folder, weights=weights).spec.dtype == "float32"
    else:
        assert "truncated" in refused(folder, weights=weights).what


def test_a_model_without_weights_plans_but_does_not_sample(
    tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    folder = write_model(tmp_path, config_of())
    (folder / "model.safetensors").unlink()
    assert resolve(folder).checkpoint is None
    assert "no .safetensors file" in refused(folder, weights="required").what
    assert resolve(folder / "config.json").spec.name == tmp_path.name
    assert "no weights" in refused(folder / "config.json", weights="required").what
    with pytest.raises(ModelError, match="no weights"):
        resolve_spec(locate_model("qwen3-8b"), weights="required")


def test_a_config_file_alone_never_reads_weights(
    tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    folder = write_model(tmp_path, config_of())
    (folder / "model.safetensors").write_bytes(b"")
    write_json(folder / "generation_config.json", {"eos_token_id": [3]})
    model = resolve(folder / "config.json")
    assert model.checkpoint is None
    assert list(model.spec.eos_token_ids) == [2, 3]
    (folder / "config.json").rename(folder / "tiny.json")
    alone = resolve(folder / "tiny.json")
    assert (alone.spec.name, list(alone.spec.eos_token_ids)) == ("tiny", [2])


def test_a_resolved_spec_survives_pickling(
    tmp_path: Path, config_of: Make, write_model: Make
) -> None:
    """Ranks are handed the spec of rank 0."""
    import pickle

    model = resolve(write_model(tmp_path, config_of()))
    assert model.spec.parameters > 0
    assert pickle.loads(pickle.dumps(model)) == model
    assert hash(model.spec) == hash(resolve(tmp_path).spec)


def test_a_location_of_a_vanished_folder_is_a_typed_refusal(tmp_path: Path) -> None:
    gone = ModelLocation(kind="folder", name="x", path=tmp_path / "gone", source="gone")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        resolve_model(gone)
