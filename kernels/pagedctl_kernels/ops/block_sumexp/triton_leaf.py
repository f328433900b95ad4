"""The Hopper leaf of the block sums of exp."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.block_sumexp.segments import WARPS, Segments
from pagedctl_kernels.ops.block_sumexp.triton_kernel import block_sums_kernel, segment_sums_kernel
from pagedctl_kernels.ops.torch_checks import expect, int_fact

_FOLDED = 128
"""Blocks that one program folds."""


class TritonBlockSumexp:
    def __init__(self, site: CallSite) -> None:
        self.block_size = int_fact(site, "block_size")

    def __call__(self, shifted: torch.Tensor, *, block_size: int) -> torch.Tensor:
        """shifted float32[R, V] (the maximum subtracted) -> float32[R, ceil(V / block_size)].

        Order: exp of each column, a halving tree over each chunk of a block, the chunks' sums
        left to right. The last block may be ragged: its missing columns are exact zeros.
        """
        expect("block_sumexp: shifted", shifted, torch.float32, ("R", "V"))
        if block_size != self.block_size:
            raise ValueError(
                f"block_sumexp: block_size {block_size}, this call site's order has "
                f"{self.block_size}"
            )
        rows, columns = shifted.shape
        segments = Segments(columns=columns, block_size=block_size)
        shifted = shifted if shifted.stride(1) == 1 else shifted.contiguous()
        sums = shifted.new_empty(rows, segments.count)
        if sums.numel():
            segment_sums_kernel[(rows * segments.programs,)](
                shifted,
                sums,
                columns,
                shifted.stride(0),
                segments.count,
                BLOCK_SIZE=block_size,
                CHUNKS=segments.chunks,
                GROUP=segments.group,
                WIDTH=segments.width,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
        return sums if segments.chunks == 1 else _folded(sums, segments)


def _folded(sums: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Chunk sums [R, blocks x chunks] -> block sums [R, blocks]."""
    rows = sums.shape[0]
    blocks = rows * segments.blocks
    out = sums.new_empty(rows, segments.blocks)
    if blocks:
        block_sums_kernel[(-(-blocks // _FOLDED),)](
            sums,
            out,
            blocks,
            CHUNKS=segments.chunks,
            TILE=_FOLDED,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def build(site: CallSite, machine: Machine) -> TritonBlockSumexp:
    return TritonBlockSumexp(site)
