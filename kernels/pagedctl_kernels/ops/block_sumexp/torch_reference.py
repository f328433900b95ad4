"""The CPU leaf of the block sums of exp."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.halving_tree import halving_tree_sum
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect, int_fact


class TorchBlockSumexp:
    def __init__(self, site: CallSite) -> None:
        self.block_size = int_fact(site, "block_size")
        self.internal = dtype_fact(site, "internal")

    def __call__(self, shifted: torch.Tensor, *, block_size: int) -> torch.Tensor:
        """shifted A[R, V] (the maximum subtracted) -> A[R, ceil(V / block_size)].

        Order: exp of each column, then a halving tree over each block. The last block may be
        ragged: its missing columns are exact zeros.
        """
        expect("block_sumexp: shifted", shifted, self.internal, ("R", "V"))
        if block_size != self.block_size:
            raise ValueError(
                f"block_sumexp: block_size {block_size}, this call site's order has "
                f"{self.block_size}"
            )
        blocks = torch.split(torch.exp(shifted), block_size, dim=-1)
        return torch.stack([halving_tree_sum(block) for block in blocks], dim=-1)


def build(site: CallSite, machine: Machine) -> TorchBlockSumexp:
    return TorchBlockSumexp(site)
