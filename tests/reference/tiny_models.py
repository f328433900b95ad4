"""Tiny models of every family with random weights, as raw config objects and arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.reference.transformer import ReferenceTransformer

VOCAB = 99

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A raw config and float64 weights by Hugging Face name."""

    config: Mapping[str, Any]
    weights: Mapping[str, np.ndarray[Any, np.dtype[np.float64]]]

    def reference(self) -> ReferenceTransformer:
        return ReferenceTransformer(self.config, self.weights)

    def write_config(self, folder: Path) -> str:
        """Write config.json and return its path, for ``EngineConfig(model=...)``."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.json"
        kept = {key: value for key, value in self.config.items() if key != "windows_by_layer"}
        path.write_text(json.dumps(kept), encoding="utf-8")
        return str(path)

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(one).to(dtype) for name, one in self.weights.items()}


def _config(family: str) -> dict[str, Any]:
    extra: dict[str, dict[str, Any]] = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "mistral": {"sliding_window": 7, "windows_by_layer": {0: 7, 1: 7}},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "windows_by_layer": {1: 9},
        },
    }
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    return {
        **_COMMON,
        "model_type": family,
        "architectures": [f"{name}ForCausalLM"],
        **extra[family],
    }


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> TinyModel:
    """A random model of *family*; weights are large enough that attention and MLP matter."""
    config = {**_config(family), **overrides}
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["head_dim"]
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    o_bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    weights: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}

    def matrix(name: str, rows: int, columns: int, bias: bool = False) -> None:
        weights[name + ".weight"] = rng.normal(0, 1.2 / np.sqrt(columns), (rows, columns))
        if bias:
            weights[name + ".bias"] = rng.normal(0, 0.2, rows)

    def norm(name: str, width: int) -> None:
        weights[name + ".weight"] = rng.normal(1, 0.2, width)

    weights["model.embed_tokens.weight"] = rng.normal(0, 1, (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norm(prefix + "input_layernorm", hidden)
        matrix(prefix + "self_attn.q_proj", heads * dim, hidden, qkv_bias)
        matrix(prefix + "self_attn.k_proj", kv_heads * dim, hidden, qkv_bias)
        matrix(prefix + "self_attn.v_proj", kv_heads * dim, hidden, qkv_bias)
        matrix(prefix + "self_attn.o_proj", hidden, heads * dim, o_bias)
        if family == "qwen3":
            norm(prefix + "self_attn.q_norm", dim)
            norm(prefix + "self_attn.k_norm", dim)
        norm(prefix + "post_attention_layernorm", hidden)
        matrix(prefix + "mlp.gate_proj", inner, hidden, mlp_bias)
        matrix(prefix + "mlp.up_proj", inner, hidden, mlp_bias)
        matrix(prefix + "mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm", hidden)
    if config["tie_word_embeddings"]:
        # Random signs: else a token's own logit leads and the model repeats its input.
        weights["model.norm.weight"] *= rng.choice([-0.4, 0.4], hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden)
    return TinyModel(config=config, weights=weights)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
