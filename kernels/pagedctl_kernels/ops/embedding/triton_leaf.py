"""The Triton leaf of embedding."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops import row_stretches
from pagedctl_kernels.ops.embedding.triton_kernel import embedding_stretch
from pagedctl_kernels.ops.torch_checks import expect, int_fact, operand_dtype
from pagedctl_kernels.ops.triton_rows import expect_contiguous, expect_device


class TritonEmbedding:
    def __init__(self, site: CallSite) -> None:
        self.vocab_size = int_fact(site, "vocab_size")
        self.width = int_fact(site, "width")
        self.dtype = operand_dtype(site, "w")
        self.constants = row_stretches.constants(self.width)

    def __call__(self, token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """token_ids int64[T], weight D[V, H] -> D[T, H]. A copy: no arithmetic.

        Ids live on the device and are not looked at here: one outside the table gives a row of
        NaN.
        """
        self._check(token_ids, weight)
        rows = len(token_ids)
        y = torch.empty((rows, self.width), dtype=weight.dtype, device=weight.device)
        if rows:
            embedding_stretch[(rows * self.constants["STRETCHES"],)](
                token_ids,
                weight,
                y,
                VOCAB_SIZE=self.vocab_size,
                **self.constants,
                num_warps=row_stretches.WARPS,
                enable_fp_fusion=False,
            )
        return y

    def _check(self, token_ids: torch.Tensor, weight: torch.Tensor) -> None:
        expect("embedding: token_ids", token_ids, torch.int64, ("T",))
        expect("embedding: weight", weight, self.dtype, (self.vocab_size, self.width))
        expect_contiguous("embedding: token_ids", token_ids)
        expect_contiguous("embedding: weight", weight)
        expect_device("embedding: token_ids", token_ids, weight.device)


def build(site: CallSite, machine: Machine) -> TritonEmbedding:
    return TritonEmbedding(site)
