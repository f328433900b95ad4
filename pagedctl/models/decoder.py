"""The dense decoder: one forward pass over a flat batch of tokens. Its seams are bound plans.

x = embedding                                     h is the residual stream, in D
per layer:
    x, h = norm(x + h)                            the sum is rounded before the norm reads it
    q    = qk_norm_rope_write(qkv_proj(x))        keys and values go to the paged cache
    x    = o_proj(attention(q, cache))
    x, h = norm(x + h)
    x    = down_proj(silu_mul(gate_up_proj(x)))
x = norm(x + h)                                   the head reads the rows that are sampled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedctl.models.binding import DecoderPlans
from pagedctl.models.rope import RopeSpec
from pagedctl.models.spec import ModelSpec
from pagedctl_kernels.ops.interfaces import AttentionMetadata, PreparedLinear

Weights = Mapping[str, torch.Tensor]
LayerCache = tuple[torch.Tensor, torch.Tensor]

MLP_ROWS = 128
"""Rows whose wide activations a CPU holds in its cache while they are needed."""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer's weights, linear ones as their leaves prepared them."""

    input_norm: torch.Tensor
    qkv_proj: PreparedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: PreparedLinear
    post_attention_norm: torch.Tensor
    gate_up_proj: PreparedLinear
    down_proj: PreparedLinear


@dataclass(frozen=True, kw_only=True)
class DecoderBatch:
    """One step's flat batch of T tokens, on the device but for ``metadata``.

    ``token_ids``, ``positions``, ``slot_mapping`` int64[T]; a slot is block * block_size +
    offset, and negative for a token whose keys and values are written nowhere.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    metadata: AttentionMetadata


class Decoder:
    """A model's weights behind its plans. ``forward`` depends on nothing but its arguments."""

    def __init__(
        self, spec: ModelSpec, plans: DecoderPlans, weights: Weights, *, num_positions: int
    ) -> None:
        self.spec = spec
        self.plans = plans
        self.mlp_rows = MLP_ROWS
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [self._layer(weights, layer) for layer in range(spec.num_hidden_layers)]
        self.final_norm = weights["model.norm.weight"]
        head = self.embedding if spec.tie_word_embeddings else weights["lm_head.weight"]
        self.head = plans.head.run.prepare(head[: spec.output_vocab_size], None)
        self.cos_sin = rope_table(
            spec.rope, num_positions, self._table_dtype(), device=self.embedding.device
        )

    def forward(self, batch: DecoderBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """Hidden states D[T, H] after the last norm; writes the batch's keys and values.

        ``caches`` holds each layer's (k, v), D[num_blocks, kv_heads, block_size, head_dim].
        """
        plans = self.plans
        works = {
            window: bound.run.prepare(batch.metadata) for window, bound in plans.attention.items()
        }
        x = plans.embedding.run(batch.token_ids, self.embedding)
        residual: torch.Tensor | None = None
        for layer, cache, window in zip(self.layers, caches, self.spec.windows, strict=True):
            x, residual = plans.norm.run(x, layer.input_norm, residual)
            q = self._project_and_write(layer, x, batch, cache)
            x = plans.attention[window].run(q, *cache, works[window])
            x = plans.o_proj.run(x.flatten(1), layer.o_proj)
            x, residual = plans.norm.run(x, layer.post_attention_norm, residual)
            x = self._mlp(layer, x)
        hidden: torch.Tensor = plans.norm.run(x, self.final_norm, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """D[R, H] -> A[R, output_vocab_size]."""
        logits: torch.Tensor = self.plans.head.run(hidden, self.head)
        return logits

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        """x D[T, H] -> D[T, H]; row by row, so cutting the rows changes no bits."""
        plans = self.plans
        done = [
            plans.down_proj.run(
                plans.silu_mul.run(plans.gate_up_proj.run(rows, layer.gate_up_proj)),
                layer.down_proj,
            )
            for rows in torch.split(x, self.mlp_rows if x.device.type == "cpu" else len(x))
        ]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _project_and_write(
        self, layer: LayerWeights, x: torch.Tensor, batch: DecoderBatch, cache: LayerCache
    ) -> torch.Tensor:
        q: torch.Tensor = self.plans.qk_norm_rope_write.run(
            self.plans.qkv_proj.run(x, layer.qkv_proj),
            layer.q_norm,
            layer.k_norm,
            self.cos_sin,
            batch.positions,
            batch.slot_mapping,
            *cache,
        )
        return q

    def _layer(self, weights: Weights, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        plans = self.plans
        return LayerWeights(
            input_norm=weights[f"{prefix}.input_layernorm.weight"],
            qkv_proj=plans.qkv_proj.run.prepare(
                *_fused(weights, [f"{attention}.{name}_proj" for name in "qkv"])
            ),
            q_norm=weights.get(f"{attention}.q_norm.weight"),
            k_norm=weights.get(f"{attention}.k_norm.weight"),
            o_proj=plans.o_proj.run.prepare(*_fused(weights, [f"{attention}.o_proj"])),
            post_attention_norm=weights[f"{prefix}.post_attention_layernorm.weight"],
            gate_up_proj=plans.gate_up_proj.run.prepare(
                *_fused(weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"])
            ),
            down_proj=plans.down_proj.run.prepare(*_fused(weights, [f"{mlp}.down_proj"])),
        )

    def _table_dtype(self) -> torch.dtype:
        facts = self.plans.qk_norm_rope_write.site.facts
        return getattr(torch, str(facts["rope_table_dtype"]))  # type: ignore[no-any-return]


def rope_table(
    rope: RopeSpec, num_positions: int, dtype: torch.dtype, *, device: torch.device
) -> torch.Tensor:
    """cos and sin of every position, [num_positions, rotary_dim]: the cos half, then the sin half.

    float64 on the host, multiplied by the attention factor, rounded once to *dtype*; returned
    in float32 (float64 for a float64 table), which holds any narrower value exactly.
    """
    positions = np.arange(num_positions, dtype=np.float64)
    angles = np.outer(positions, np.array(rope.inverse_frequencies(), dtype=np.float64))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.attention_scaling
    internal = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.from_numpy(table).to(dtype).to(internal).to(device)


def _fused(weights: Weights, modules: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The modules' weights stacked by output row, and their biases if they have any."""
    weight = torch.cat([weights[f"{module}.weight"] for module in modules])
    biases = [weights.get(f"{module}.bias") for module in modules]
    present = [bias for bias in biases if bias is not None]
    return weight, torch.cat(present) if present else None
