"""Small configs and checkpoints, written byte by byte so that any fault can be planted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Tensor = tuple[str, tuple[int, ...], bytes]
Tensors = dict[str, Tensor]

ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "F8_E4M3": 1}

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 99,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}


def _config(family: str = "llama", *, without: tuple[str, ...] = (), **changes: Any) -> Any:
    merged = {"model_type": family, **BASE, **FAMILY_KEYS[family], **changes}
    return {key: value for key, value in merged.items() if key not in without}


def _tensor(shape: tuple[int, ...], dtype: str = "F32", seed: int = 0) -> Tensor:
    size = ITEM_BYTES[dtype]
    for extent in shape:
        size *= extent
    return dtype, shape, bytes((seed * 31 + index) % 251 for index in range(size))


def _tensors(config: Mapping[str, Any], dtype: str = "F32") -> Tensors:
    """What a checkpoint of *config* stores, spelled out here and not by the code under test."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    family = config["model_type"]
    bias = config.get("attention_bias") is True
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows * head_dim, hidden)
            if bias or family == "qwen2":
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows * head_dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
        if bias:
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        for name in ("gate", "up"):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (inter, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inter)
        if config.get("mlp_bias"):
            for name, width in (("gate", inter), ("up", inter), ("down", hidden)):
                shapes[f"{at}.mlp.{name}_proj.bias"] = (width,)
        if family == "qwen3":
            for name in ("q", "k"):
                shapes[f"{at}.self_attn.{name}_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (
            config.get("output_vocab_size") or shapes["model.embed_tokens.weight"][0],
            hidden,
        )
    return {name: _tensor(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _write_sharded(folder: Path, shards: Mapping[str, Tensors]) -> None:
    """Each shard's file, and an index that maps every tensor to the first shard that has it."""
    weight_map: dict[str, str] = {}
    for file, tensors in shards.items():
        _write_file(folder / file, tensors)
        for name in tensors:
            weight_map.setdefault(name, file)
    _write_index(folder, weight_map)


def _write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_model(folder: Path, config: Mapping[str, Any], tensors: Tensors | None = None) -> Path:
    """A snapshot folder with config.json and one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_file(folder / "model.safetensors", _tensors(config) if tensors is None else tensors)
    return folder


def _halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = list(tensors)
    middle = len(names) // 2
    return (
        {name: tensors[name] for name in names[:middle]},
        {name: tensors[name] for name in names[middle:]},
    )


@pytest.fixture
def config_of() -> Callable[..., dict[str, Any]]:
    """``config_of(family, without=(...), key=value, ...)``: a small config.json object."""
    return _config


@pytest.fixture
def tensors_of() -> Callable[..., Tensors]:
    return _tensors


@pytest.fixture
def tensor() -> Callable[..., Tensor]:
    return _tensor


@pytest.fixture
def write_file() -> Callable[[Path, Mapping[str, Tensor]], None]:
    return _write_file


@pytest.fixture
def write_bytes() -> Callable[[Path, bytes, bytes], None]:
    return write_raw


@pytest.fixture
def write_sharded() -> Callable[[Path, Mapping[str, Tensors]], None]:
    return _write_sharded


@pytest.fixture
def write_index() -> Callable[[Path, Mapping[str, Any]], None]:
    return _write_index


@pytest.fixture
def write_model() -> Callable[..., Path]:
    return _write_model


@pytest.fixture
def halves() -> Callable[[Tensors], tuple[Tensors, Tensors]]:
    return _halves
