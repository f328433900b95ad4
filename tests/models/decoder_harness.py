"""A decoder over the accelerator's leaves, and the steps that a scheduler could give it.

It runs on a GPU where there is one, and on CPU tensors under Triton's interpreter elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagedctl.engine.sampler import Sampled, Sampler
from pagedctl.models.binding import DecoderPlans, bind_plans
from pagedctl.models.decoder import Decoder, DecoderBatch
from pagedctl.models.resolve import spec_from_config
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.envelopes import house_envelopes
from pagedctl.numerics.resolution import resolve_numerics
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.ops.interfaces import AttentionMetadata, SamplingRows
from tests.kernels.harness import TORCH_DTYPES, sampling_rows
from tests.kernels.triton.harness import DEVICE, hopper
from tests.reference.tiny_models import TinyModel

Span = tuple[int, int, int]
"""Sequence, first and end position of the tokens that a step computes of it."""


def plans_of(
    spec: ModelSpec, *, numerics: str = "invariant", block_size: int = 16, **switches: Any
) -> DecoderPlans:
    return bind_plans(
        spec,
        resolve_numerics(house_envelopes()[numerics], switches, dict.fromkeys(switches, "test")),
        block_size=block_size,
        kv_dtype=spec.dtype,
        machine=hopper(),
        registry=house_registry(),
    )


class DeviceDecoder:
    """A tiny model on DEVICE, with a poisoned cache in which sequences own shuffled blocks."""

    def __init__(
        self,
        model: TinyModel,
        sequences: Sequence[Sequence[int]],
        *,
        dtype: str,
        block_size: int = 16,
        seed: int = 0,
        plans: DecoderPlans | None = None,
    ) -> None:
        raw = {key: value for key, value in model.config.items() if key != "windows_by_layer"}
        self.spec = spec_from_config(raw, dtype=dtype)
        self.plans = plans or plans_of(self.spec, block_size=block_size)
        torch_dtype = TORCH_DTYPES[dtype]
        weights = {name: one.to(DEVICE) for name, one in model.tensors(torch_dtype).items()}
        longest = max(map(len, sequences))
        self.decoder = Decoder(self.spec, self.plans, weights, num_positions=longest)
        self.sequences = [list(one) for one in sequences]
        self.block_size = block_size
        self._lay_out(torch_dtype, seed)

    def _lay_out(self, dtype: torch.dtype, seed: int) -> None:
        blocks = [-(-len(one) // self.block_size) for one in self.sequences]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(seed))
        self.tables = torch.zeros((len(blocks), max(blocks)), dtype=torch.int32)
        taken = 0
        for sequence, count in enumerate(blocks):
            self.tables[sequence, :count] = order[taken : taken + count].int()
            taken += count
        spec = self.spec
        shape = (len(order), spec.num_key_value_heads, self.block_size, spec.head_dim)
        self.caches = [
            tuple(torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
            for _ in range(spec.num_hidden_layers)
        ]

    def step(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Compute positions first..end of each sequence; logits float32 of each, on DEVICE."""
        hidden = self.decoder.forward(self._batch(spans), self.caches)
        logits = self.decoder.logits(hidden)
        return list(torch.split(logits, [end - first for _, first, end in spans]))

    def _batch(self, spans: Sequence[Span]) -> DecoderBatch:
        ids, positions, slots = [], [], []
        for sequence, first, end in spans:
            for position in range(first, end):
                block, offset = divmod(position, self.block_size)
                ids.append(self.sequences[sequence][position])
                positions.append(position)
                slots.append(int(self.tables[sequence, block]) * self.block_size + offset)
        lengths = [end - first for _, first, end in spans]
        return DecoderBatch(
            token_ids=torch.tensor(ids, device=DEVICE),
            positions=torch.tensor(positions, device=DEVICE),
            slot_mapping=torch.tensor(slots, device=DEVICE),
            metadata=AttentionMetadata(
                query_start_loc=np.cumsum([0, *lengths]).astype(np.int32),
                seq_lens=np.array([end for _, _, end in spans], dtype=np.int32),
                block_tables=self.tables[[sequence for sequence, _, _ in spans]],
            ),
        )

    def whole(self) -> list[torch.Tensor]:
        """Logits of every position, every sequence in one step of its own."""
        return [self.step([(i, 0, len(one))])[0] for i, one in enumerate(self.sequences)]

    def sampled(self, logits: torch.Tensor, **columns: Any) -> Sampled:
        rows = sampling_rows(len(logits), **columns)
        on_device = {name: column.to(DEVICE) for name, column in vars(rows).items()}
        return Sampler(self.decoder, "scaled").sample(logits, SamplingRows(**on_device))
