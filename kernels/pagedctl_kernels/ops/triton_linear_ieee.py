"""The Triton leaf of a linear layer on float32 operands; gemm and head share it.

Products are IEEE ones on the CUDA cores, never TF32. bfloat16 and float16 operands (a head whose
``head_dtype`` is float32) are widened exactly inside the kernel, so the weight is not copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from pagedctl_kernels.ops.triton_linear import TritonLinearSite
from pagedctl_kernels.ops.triton_linear_ieee_kernel import fma_chain

BLOCK_K = 32
"""Columns of a step in every tile: part of the order, which pads K with zeros to a multiple."""


@dataclass(frozen=True, kw_only=True)
class FmaTile:
    """A program's rows of x and rows of the weight. No form of it changes a bit."""

    rows: int
    columns: int
    warps: int
    stages: int


FEW_ROWS = FmaTile(rows=16, columns=32, warps=2, stages=4)
SOME_ROWS = FmaTile(rows=64, columns=64, warps=4, stages=3)
MANY_ROWS = FmaTile(rows=128, columns=128, warps=8, stages=3)


class IeeeLinear(TritonLinearSite):
    """One chain of fused multiply-adds over ascending k for every output, then one rounding."""

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
    ) -> None:
        launch_ieee(x, weight, bias, y, fma_tile(x.shape[0]))


def fma_tile(rows: int) -> FmaTile:
    """The tile that was quickest at *rows* rows of a 4096 x 6144 layer."""
    if rows <= 32:
        return FEW_ROWS
    return SOME_ROWS if rows <= 128 else MANY_ROWS


def launch_ieee(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: FmaTile,
) -> None:
    """y[M, N] = x[M, K] weight[N, K]^T (+ bias[N]); all contiguous, M at least 1.

    x, weight and bias have one dtype of float32, bfloat16 and float16; y is of that dtype or
    float32.
    """
    (rows, k), n = x.shape, weight.shape[0]
    fma_chain[(triton.cdiv(n, tile.columns), triton.cdiv(rows, tile.rows))](
        x,
        weight,
        bias,
        y,
        rows,
        n,
        k,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=BLOCK_K,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )
