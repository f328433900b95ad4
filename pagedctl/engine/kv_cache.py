"""The KV arena: one allocation that every layer's keys and values live in."""

from __future__ import annotations

import torch

from pagedctl.config.engine_config import EngineConfig
from pagedctl.models.spec import ModelSpec


class KVArena:
    """Keys and values of ``num_blocks`` usable blocks and the null block behind them.

    Memory is one tensor [layer, key or value, block, kv_head, token, dim] whose address never
    changes, in ``kv_dtype``. Its content is undefined until it is written; nothing reads an
    unwritten slot.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        kv_dtype: str,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (
            spec.num_hidden_layers,
            2,
            num_blocks + 1,
            spec.num_key_value_heads,
            block_size,
            spec.head_dim,
        )
        self.memory = torch.empty(shape, dtype=getattr(torch, kv_dtype), device=device)

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's (k, v), [num_blocks + 1, kv_heads, block_size, head_dim]."""
        return [(layer[0], layer[1]) for layer in self.memory]

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


def block_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of one block over all layers."""
    return spec.kv_bytes_per_token(dtype=config.kv_dtype) * config.block_size
