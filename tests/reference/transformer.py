"""A dense decoder in numpy float64 from a raw config.json object and raw weights.

Full attention matrices, no cache, no paging, no batching: as plain as the architecture's
papers. It reads the config's own keys and shares nothing with the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class ReferenceTransformer:
    """``logits(ids)`` float64[T, V] of one sequence."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.config = config
        self.weights = {name: np.asarray(one, dtype=np.float64) for name, one in weights.items()}

    def logits(self, ids: list[int]) -> Array:
        x = self.weights["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(prefix, layer, self._norm(x, prefix + "input_layernorm"))
            x = x + self._mlp(prefix, self._norm(x, prefix + "post_attention_layernorm"))
        x = self._norm(x, "model.norm")
        tied = self.config["tie_word_embeddings"]
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return x @ self.weights[head].T

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """Full recompute for every token; ids and their log-probabilities."""
        ids, logprobs = list(prompt), []
        for _ in range(count):
            row = self.logits(ids)[-1]
            token = int(np.argmax(row))
            logprobs.append(float(log_softmax(row)[token]))
            ids.append(token)
        return ids[len(prompt) :], logprobs

    def _linear(self, x: Array, name: str) -> Array:
        y = x @ self.weights[name + ".weight"].T
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[name + ".weight"]

    def _heads(self, x: Array, count: int) -> Array:
        return x.reshape(len(x), count, self.config["head_dim"])

    def _attention(self, prefix: str, layer: int, x: Array) -> Array:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q = self._heads(self._linear(x, prefix + "self_attn.q_proj"), heads)
        k = self._heads(self._linear(x, prefix + "self_attn.k_proj"), kv_heads)
        v = self._heads(self._linear(x, prefix + "self_attn.v_proj"), kv_heads)
        if prefix + "self_attn.q_norm.weight" in self.weights:
            q = self._norm(q, prefix + "self_attn.q_norm")
            k = self._norm(k, prefix + "self_attn.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        out = np.empty_like(q)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv].T / np.sqrt(self.config["head_dim"])
            scores = np.where(self._visible(len(x), layer), scores, -np.inf)
            out[:, head] = softmax(scores) @ v[:, kv]
        return self._linear(out.reshape(len(x), -1), prefix + "self_attn.o_proj")

    def _visible(self, length: int, layer: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        query, key = np.arange(length)[:, None], np.arange(length)[None, :]
        visible = key <= query
        window = self.config.get("windows_by_layer", {}).get(layer)
        return visible if window is None else visible & (query - key < window)

    def _rotate(self, x: Array) -> Array:
        """Half-split pairs, default frequencies."""
        dim = self.config["head_dim"]
        frequencies = self.config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        angles = np.arange(len(x))[:, None, None] * frequencies
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _mlp(self, prefix: str, x: Array) -> Array:
        gate = self._linear(x, prefix + "mlp.gate_proj")
        up = self._linear(x, prefix + "mlp.up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "mlp.down_proj")


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
