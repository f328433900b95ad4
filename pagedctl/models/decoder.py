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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedctl.models.architecture import EMBEDDING_NAME, HEAD_NAME
from pagedctl.models.binding import DecoderPlans
from pagedctl.models.decoder_weights import (
    LayerWeights,
    Weights,
    prepare_layer,
    refresh_layer,
    require_tensors,
)
from pagedctl.models.rope_table import YarnDevices, rope_table
from pagedctl.models.spec import ModelSpec
from pagedctl_kernels.ops.interfaces import AttentionMetadata, PreparedLinear

LayerCache = tuple[torch.Tensor, torch.Tensor]
AttentionWorks = Mapping[int | None, Any]
GatedLinear = Callable[[torch.Tensor, PreparedLinear], torch.Tensor]

MLP_ROWS = 128
"""Rows whose wide activations a CPU holds in its cache while they are needed."""

FINAL_NORM = "model.norm.weight"


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
    """A model's weights behind its plans. ``forward`` depends on nothing but its arguments.

    The tensors given at construction are the decoder's from then on: it may keep them, and an
    update writes into what it keeps.
    """

    def __init__(
        self, spec: ModelSpec, plans: DecoderPlans, weights: Weights, *, num_positions: int
    ) -> None:
        self.spec = spec
        self.plans = plans
        self.mlp_rows = MLP_ROWS
        self.embedding = weights[EMBEDDING_NAME]
        self.layers = [
            prepare_layer(plans, weights, layer) for layer in range(spec.num_hidden_layers)
        ]
        self.final_norm = weights[FINAL_NORM]
        self.head = plans.head.run.prepare(self._head_rows(weights), None)
        self.cos_sin = self._rope_table(num_positions)

    def update(self, weights: Weights) -> None:
        """Replace every weight in place by *weights*, which has all of the model's tensors.

        Tensors of the decoder stay the same objects; beyond them and the arguments, one
        projection's weight is alive at a time. No step may run meanwhile, and what was cached
        of earlier steps is of the old weights. Raises ModelError, before anything is written,
        with every tensor that is missing, unknown, or of another shape or dtype.
        """
        require_tensors(self.spec, weights, where="argument weights")
        with torch.no_grad():
            self.embedding.copy_(weights[EMBEDDING_NAME])
            for layer, held in enumerate(self.layers):
                refresh_layer(self.plans, held, weights, layer)
            self.final_norm.copy_(weights[FINAL_NORM])
            self.plans.head.run.refresh(self.head, self._head_rows(weights), None)

    def attention_works(self, metadata: AttentionMetadata) -> AttentionWorks:
        """What the attention of a step does, by window: made on the host, used by every layer."""
        plans = self.plans.attention
        return {window: bound.run.prepare(metadata) for window, bound in plans.items()}

    def forward(
        self,
        batch: DecoderBatch,
        caches: Sequence[LayerCache],
        works: AttentionWorks | None = None,
    ) -> torch.Tensor:
        """Hidden states D[T, H] after the last norm; writes the batch's keys and values.

        ``caches`` holds each layer's (k, v), D[num_blocks, kv_heads, block_size, head_dim].
        ``works`` are those of the batch's metadata, made here if not given.
        """
        plans = self.plans
        works = self.attention_works(batch.metadata) if works is None else works
        gated = gated_linear(plans)
        x = plans.embedding.run(batch.token_ids, self.embedding)
        residual: torch.Tensor | None = None
        for layer, cache, window in zip(self.layers, caches, self.spec.windows, strict=True):
            x, residual = plans.norm.run(x, layer.input_norm, residual)
            q = self._project_and_write(layer, x, batch, cache)
            x = plans.attention[window].run(q, *cache, works[window])
            x = plans.o_proj.run(x.flatten(1), layer.o_proj)
            x, residual = plans.norm.run(x, layer.post_attention_norm, residual)
            x = self._mlp(layer, x, gated)
        hidden: torch.Tensor = plans.norm.run(x, self.final_norm, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """D[R, H] -> A[R, output_vocab_size]."""
        logits: torch.Tensor = self.plans.head.run(hidden, self.head)
        return logits

    def _mlp(self, layer: LayerWeights, x: torch.Tensor, gated: GatedLinear) -> torch.Tensor:
        """x D[T, H] -> D[T, H]; row by row, so cutting the rows changes no bits."""
        down_proj = self.plans.down_proj.run
        done = [
            down_proj(gated(rows, layer.gate_up_proj), layer.down_proj)
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

    def _head_rows(self, weights: Weights) -> torch.Tensor:
        """A tied head reads the decoder's own embedding, whose memory it may share."""
        rows = self.embedding if self.spec.tie_word_embeddings else weights[HEAD_NAME]
        return rows[: self.spec.output_vocab_size].to(self.embedding.device)

    def _rope_table(self, num_positions: int) -> torch.Tensor:
        """The table in the form that the order of its call site names."""
        facts = self.plans.qk_norm_rope_write.site.facts
        return rope_table(
            self.spec.rope,
            num_positions,
            getattr(torch, str(facts["rope_table_dtype"])),
            device=self.embedding.device,
            yarn=YarnDevices(
                ramp=str(facts["yarn_ramp_mask_device"]),
                frequency=str(facts["yarn_frequency_device"]),
            ),
        )


def gated_linear(plans: DecoderPlans) -> GatedLinear:
    """gate_up_proj and silu_mul in one call: fused where their leaves fit, with the same bits."""
    fused_with = getattr(plans.gate_up_proj.run, "fused_with", None)
    fused: GatedLinear | None = fused_with(plans.silu_mul.run) if fused_with else None
    if fused is not None:
        return fused
    return lambda x, prepared: plans.silu_mul.run(plans.gate_up_proj.run(x, prepared))
