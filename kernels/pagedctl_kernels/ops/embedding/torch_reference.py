"""The CPU leaf of embedding."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.torch_checks import expect, int_fact, operand_dtype


class TorchEmbedding:
    def __init__(self, site: CallSite) -> None:
        self.vocab_size = int_fact(site, "vocab_size")
        self.width = int_fact(site, "width")
        self.dtype = operand_dtype(site, "w")

    def __call__(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """token_ids int64[T], weight D[V, H] -> D[T, H]. A copy: no arithmetic."""
        expect("embedding: token_ids", token_ids, torch.int64, ("T",))
        expect("embedding: weight", weight, self.dtype, (self.vocab_size, self.width))
        return weight.index_select(0, token_ids)


def build(site: CallSite, machine: Machine) -> TorchEmbedding:
    return TorchEmbedding(site)
