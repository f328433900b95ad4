"""Safetensors headers, indexes and tensor sets: what is read, ignored and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedctl.errors import ModelError
from pagedctl.models.architecture import FAMILIES
from pagedctl.models.checkpoint_index import CheckpointIndex, majority_dtype, read_checkpoint
from pagedctl.models.checkpoint_match import match_checkpoint
from pagedctl.models.resolve import spec_from_config
from pagedctl.models.safetensors_header import read_header

Make = Callable[..., Any]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def whats(error: ModelError) -> str:
    return "\n".join(fault.what for fault in error.faults)


def read_refused(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_checkpoint(folder)
    return caught.value


def match_refused(folder: Path, config: dict[str, Any]) -> ModelError:
    with pytest.raises(ModelError) as caught:
        matched(folder, config)
    return caught.value


def matched(folder: Path, config: dict[str, Any]) -> CheckpointIndex:
    return match_checkpoint(read_checkpoint(folder), spec_from_config(config))


def codes(index: CheckpointIndex) -> list[str]:
    return [warning.code for warning in index.warnings]


@pytest.fixture
def sharded(
    tmp_path: Path, config_of: Make, tensors_of: Make, halves: Make, write_sharded: Make
) -> Path:
    """A llama checkpoint in two shards with an index."""
    first, second = halves(tensors_of(config_of()))
    write_sharded(tmp_path, dict(zip(SHARDS, (first, second), strict=True)))
    return tmp_path


def test_headers_are_read_as_the_safetensors_library_reads_them(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors")
    save = pytest.importorskip("safetensors.numpy").save_file
    arrays = {
        "b": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
        "a": numpy.arange(5, dtype=numpy.float16),
        "scalar": numpy.array(7, dtype=numpy.int64),
        "empty": numpy.zeros((0, 4), dtype=numpy.float32),
    }
    path = tmp_path / "x.safetensors"
    save(arrays, str(path), metadata={"format": "np"})
    tensors = {tensor.name: tensor for tensor in read_header(path, file=path.name)}
    assert tensors.keys() == arrays.keys()
    content = path.read_bytes()
    with library.safe_open(str(path), framework="numpy") as theirs:
        for name, tensor in tensors.items():
            view = theirs.get_slice(name)
            assert (tensor.dtype, tensor.shape) == (view.get_dtype(), tuple(view.get_shape()))
            stored = content[tensor.start_bytes : tensor.end_bytes]
            assert stored == arrays[name].tobytes()
            assert tensor.nbytes == arrays[name].nbytes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_complete_checkpoint_is_indexed_in_the_models_order(
    family: str, tmp_path: Path, config_of: Make, write_model: Make, tensors_of: Make
) -> None:
    config = config_of(family)
    index = matched(write_model(tmp_path, config), config)
    spec = spec_from_config(config)
    assert [tensor.name for tensor in index.tensors] == [tensor.name for tensor in spec.tensors]
    assert index.warnings == ()
    content = (tmp_path / "model.safetensors").read_bytes()
    for name, (_, _, data) in tensors_of(config).items():
        tensor = index.by_name[name]
        assert content[tensor.start_bytes : tensor.end_bytes] == data
    assert index.nbytes == spec.weight_bytes()


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "data_bytes", "says"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 7, "truncated: a ends"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 9, "1 bytes after"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12, "hole"),
        ({**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "overlap"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8, "does not fill"),
        ({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, 8, "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, 8, "list of sizes"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 4, "list of sizes"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, 8, "list of sizes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, 8, "[start, end)"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, 8, "[start, end)"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "exactly dtype"),
        ({"a": 3}, 0, "exactly dtype"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(
    header: dict[str, Any], data_bytes: int, says: str, tmp_path: Path, write_bytes: Make
) -> None:
    path = tmp_path / "model.safetensors"
    write_bytes(path, json.dumps(header).encode(), bytes(data_bytes))
    with pytest.raises(ModelError) as caught:
        read_header(path, file=path.name)
    assert says in whats(caught.value)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x08\0\0", "truncated: 3 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: its header ends at byte 108 of 10"),
        (b"PK\x03\x04rest of a zip file", "not safetensors"),
        ((2).to_bytes(8, "little") + b"[]", "a list, not an object"),
        ((13).to_bytes(8, "little") + b'{"a":1,"a":1}', "appears twice"),
    ],
)
def test_what_is_not_a_safetensors_file_is_refused(
    content: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert says in read_refused(tmp_path).what


def test_every_truncated_shard_is_named(sharded: Path) -> None:
    for file in SHARDS:
        path = sharded / file
        path.write_bytes(path.read_bytes()[:-1])
    error = read_refused(sharded)
    assert [Path(fault.where).name for fault in error.faults] == list(SHARDS)
    assert "truncated" in error.what


def test_a_missing_shard_is_refused_by_its_name(
    tmp_path: Path, config_of: Make, tensors_of: Make, halves: Make, write_sharded: Make
) -> None:
    """sgl-project/sglang#32279: shard 2 of 3 was deleted."""
    first, rest = halves(tensors_of(config_of()))
    second, third = halves(rest)
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    write_sharded(tmp_path, dict(zip(files, (first, second, third), strict=True)))
    (tmp_path / files[1]).unlink()
    error = read_refused(tmp_path)
    assert f"1 of 3 files are missing: {files[1]}" in error.what


def test_renamed_shards_are_never_matched_by_order(sharded: Path) -> None:
    """Neph0s/CoSER#3: the index expects other names than the folder has."""
    for number, file in enumerate(SHARDS, start=1):
        (sharded / file).rename(sharded / f"model-0000{number}-of-00015.safetensors")
    what = read_refused(sharded).what
    assert "2 of 2 files are missing" in what
    for number in (1, 2):
        assert f"model-0000{number}-of-00002.safetensors" in what
        assert f"model-0000{number}-of-00015.safetensors" in what


def test_a_stray_file_beside_an_index_is_not_read(
    sharded: Path, config_of: Make, write_file: Make, tensor: Make
) -> None:
    """Blaizzy/mlx-vlm#1464."""
    write_file(sharded / "model.safetensors", {"model.norm.weight": tensor((64,), seed=9)})
    index = matched(sharded, config_of())
    assert {entry.file for entry in index.tensors} == set(SHARDS)
    (warning,) = index.warnings
    assert warning.code == "stray_file"
    assert "model.safetensors" in warning.text


def test_without_an_index_there_is_exactly_one_file(sharded: Path, tmp_path: Path) -> None:
    """Blaizzy/mlx-vlm#1464: without an index, one file or a refusal that lists them."""
    (sharded / "model.safetensors.index.json").unlink()
    what = read_refused(sharded).what
    assert SHARDS[0] in what
    assert SHARDS[1] in what
    (sharded / SHARDS[0]).unlink()
    assert read_checkpoint(sharded).files == (SHARDS[1],)


def test_other_weight_formats_are_named_in_the_refusal(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in read_refused(tmp_path).what


def test_a_tensor_that_is_not_where_the_index_maps_it_is_refused(
    sharded: Path, write_index: Make
) -> None:
    """huggingface/huggingface_hub#4728: in neither shard, and only in the other shard."""
    weight_map = {tensor.name: tensor.file for tensor in read_checkpoint(sharded).tensors}
    write_index(sharded, {**weight_map, "model.ghost.weight": SHARDS[1]})
    what = read_refused(sharded).what
    assert "model.ghost.weight" in what
    assert SHARDS[1] in what
    assert "no file" in what
    assert weight_map["model.norm.weight"] == SHARDS[1]
    write_index(sharded, {**weight_map, "model.norm.weight": SHARDS[0]})
    what = read_refused(sharded).what
    assert f"model.norm.weight is not in {SHARDS[0]}" in what
    assert f"it is in {SHARDS[1]}" in what


def test_a_copy_that_the_index_assigns_elsewhere_is_ignored(
    tmp_path: Path,
    config_of: Make,
    tensors_of: Make,
    halves: Make,
    write_sharded: Make,
    tensor: Make,
) -> None:
    first, second = halves(tensors_of(config_of()))
    name = next(iter(first))
    second = {name: tensor(first[name][1], seed=77), **second}
    write_sharded(tmp_path, dict(zip(SHARDS, (first, second), strict=True)))
    index = matched(tmp_path, config_of())
    entry = index.by_name[name]
    assert entry.file == SHARDS[0]
    content = (tmp_path / entry.file).read_bytes()[entry.start_bytes : entry.end_bytes]
    assert content == first[name][2] != second[name][2]
    (warning,) = index.warnings
    assert warning.code == "copy_ignored"
    assert name in warning.text


def test_a_tensor_absent_from_the_index_is_refused(sharded: Path, write_index: Make) -> None:
    weight_map = {tensor.name: tensor.file for tensor in read_checkpoint(sharded).tensors}
    del weight_map["model.norm.weight"]
    write_index(sharded, weight_map)
    assert "model.norm.weight is stored in" in read_refused(sharded).what


@pytest.mark.parametrize(
    "file",
    [
        "../other/model.safetensors",
        "/etc/model.safetensors",
        "sub/../../model.safetensors",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        "model.bin",
        "",
        3,
        None,
    ],
)
def test_a_shard_name_may_not_leave_the_folder(
    file: object, sharded: Path, write_index: Make
) -> None:
    write_index(sharded, {"model.norm.weight": file})
    error = read_refused(sharded)
    assert "model.norm.weight is mapped to" in error.what


def test_shards_may_be_links_into_a_cache(sharded: Path, tmp_path_factory: Any) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    for file in SHARDS:
        (sharded / file).rename(blobs / file)
        (sharded / file).symlink_to(blobs / file)
    assert read_checkpoint(sharded).files == SHARDS


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_weight_map_is_refused(index: object, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map" in read_refused(sharded).what


def test_missing_tensors_are_each_named(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """sgl-project/sglang#1508: a parameter left unloaded is always an error."""
    config = config_of()
    tensors = tensors_of(config)
    gone = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    for name in gone:
        del tensors[name]
    error = match_refused(write_model(tmp_path, config, tensors), config)
    assert [fault.what.split()[0] for fault in error.faults] == gone


def test_rotary_buffers_are_ignored_and_nothing_else_is(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make, tensor: Make
) -> None:
    """huggingface/transformers#35255, EleutherAI/gpt-neox#1168."""
    config = config_of()
    tensors = {**tensors_of(config), INV_FREQ: tensor((8,))}
    index = matched(write_model(tmp_path / "old", config, tensors), config)
    assert INV_FREQ not in index.by_name
    for stranger in (
        "model.layers.0.foo.weight",
        "model.layers.x.self_attn.rotary_emb.inv_freq",
        f"{INV_FREQ}_scale",
    ):
        folder = write_model(tmp_path / stranger, config, {**tensors, stranger: tensor((8,))})
        error = match_refused(folder, config)
        assert [fault.what.split()[0] for fault in error.faults] == [stranger]


def test_a_rotary_buffer_that_an_index_does_not_name_is_ignored_too(
    tmp_path: Path,
    config_of: Make,
    tensors_of: Make,
    write_sharded: Make,
    write_index: Make,
    tensor: Make,
) -> None:
    tensors = tensors_of(config_of())
    write_sharded(tmp_path, {SHARDS[0]: {**tensors, INV_FREQ: tensor((8,))}})
    write_index(tmp_path, dict.fromkeys(tensors, SHARDS[0]))
    assert len(matched(tmp_path, config_of()).tensors) == len(tensors)


def test_a_head_beside_a_tie_is_unexpected_unless_it_is_known_to_be_a_copy(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    tied = config_of(tie_word_embeddings=True)
    folder = write_model(tmp_path, tied, tensors_of(config_of()))
    assert match_refused(folder, tied).what.startswith("lm_head.weight")
    spec = spec_from_config(tied)
    index = match_checkpoint(read_checkpoint(folder), spec, head_is_copy=True)
    assert [tensor.name for tensor in index.tensors] == [tensor.name for tensor in spec.tensors]


def test_all_bias_vectors_are_needed_or_refused(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """mlc-ai/mlc-llm#3494: seven biases per layer, fourteen in two layers."""
    biased = config_of(attention_bias=True, mlp_bias=True)
    tensors = tensors_of(biased)
    names = [name for name in tensors if name.endswith(".bias")]
    assert len(names) == 14
    index = matched(write_model(tmp_path / "all", biased, tensors), biased)
    assert set(names) <= index.by_name.keys()
    bare = config_of()
    error = match_refused(write_model(tmp_path / "none", bare, tensors), bare)
    assert {fault.what.split()[0] for fault in error.faults} == set(names)
    remedies = {fault.remedy for fault in error.faults}
    assert remedies == {"correct attention_bias in config.json", "correct mlp_bias in config.json"}


@pytest.mark.parametrize("keys", [("qwen2", {}), ("llama", {"attention_bias": True})])
def test_attention_biases_are_part_of_the_set(
    keys: tuple[str, dict[str, Any]],
    tmp_path: Path,
    config_of: Make,
    tensors_of: Make,
    write_model: Make,
) -> None:
    """sbryngelson/ANEForge#253, vllm-project/vllm#3767: q/k/v biases may not be dropped."""
    family, changes = keys
    config = config_of(family, **changes)
    tensors = tensors_of(config)
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    error = match_refused(write_model(tmp_path, config, tensors), config)
    assert error.what.startswith("model.layers.0.self_attn.k_proj.bias")


def test_head_dim_is_compared_with_the_stored_rows_of_q_proj(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """ml-explore/mlx-lm#1204: head_dim lost, q_proj twice as high as hidden."""
    config = config_of(num_key_value_heads=4)
    tensors = tensors_of({**config, "head_dim": 32})
    error = match_refused(write_model(tmp_path, config, tensors), config)
    (fault,) = [fault for fault in error.faults if "q_proj" in fault.what]
    assert "config.json" in fault.what
    assert "[128, 64]" in fault.what
    assert "num_attention_heads 4 x head_dim 16 = 64 rows" in fault.what
    assert "and 1 more layers" in fault.what
    assert "head_dim 32" in fault.remedy
    assert len(error.faults) == 4


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("model.embed_tokens.weight", (100, 64), "vocab_size 99"),
        ("lm_head.weight", (99, 32), "output vocabulary 99"),
        ("model.norm.weight", (63,), "hidden_size 64"),
        ("model.norm.weight", (1, 64), "hidden_size 64"),
        ("model.norm.weight", (), "hidden_size 64"),
        ("model.layers.1.mlp.down_proj.weight", (96, 64), "intermediate_size 96 columns"),
        ("model.layers.0.self_attn.k_proj.weight", (64, 64), "num_key_value_heads 2 x head_dim 16"),
    ],
)
def test_a_wrong_shape_names_both_shapes_and_the_keys(
    name: str,
    shape: tuple[int, ...],
    says: str,
    tmp_path: Path,
    config_of: Make,
    tensors_of: Make,
    write_model: Make,
    tensor: Make,
) -> None:
    config = config_of()
    tensors = {**tensors_of(config), name: tensor(shape)}
    error = match_refused(write_model(tmp_path, config, tensors), config)
    assert len(error.faults) == 1
    assert name in error.what
    assert str(list(shape)) in error.what
    assert says in error.what


def test_stored_types_that_are_not_plain_floats_are_refused(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make, tensor: Make
) -> None:
    """huggingface/transformers#35963: scaled weights are never read as plain ones."""
    config = config_of()
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {**tensors_of(config), name: tensor((96, 64), "F8_E4M3")}
    error = match_refused(write_model(tmp_path, config, tensors), config)
    assert error.what == f"1 tensors are stored as F8_E4M3: {name}"


def test_casts_are_reported_by_stored_dtype(
    tmp_path: Path, config_of: Make, tensors_of: Make, write_model: Make
) -> None:
    """huggingface/transformers#21524: fp32 norms beside bf16 matrices."""
    config = config_of(torch_dtype="bfloat16")
    tensors = tensors_of(config, "BF16")
    norms = {name: tensor for name, tensor in tensors_of(config).items() if "norm" in name}
    index = matched(write_model(tmp_path, config, {**tensors, **norms}), config)
    (warning,) = index.warnings
    assert warning.code == "cast"
    assert warning.text.startswith("5 tensors stored as float32 are cast to bfloat16: ")


def test_most_matrices_decide_the_dtype(tmp_path: Path, write_file: Make, tensor: Make) -> None:
    path = tmp_path / "model.safetensors"
    vectors = {f"v{number}": tensor((4,), "F64") for number in range(9)}
    write_file(
        path,
        {
            "a": tensor((2, 2), "BF16"),
            "b": tensor((2, 2), "BF16"),
            "big": tensor((64, 64), "F32"),
            **vectors,
        },
    )
    assert majority_dtype(read_checkpoint(tmp_path)) == "bfloat16"
    write_file(path, {"a": tensor((2, 2), "BF16"), "big": tensor((64, 64), "F16")})
    assert majority_dtype(read_checkpoint(tmp_path)) == "float16"
    write_file(path, {"a": tensor((2,), "BF16")})
    assert majority_dtype(read_checkpoint(tmp_path)) is None
