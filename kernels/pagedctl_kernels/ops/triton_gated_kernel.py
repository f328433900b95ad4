"""A linear layer and its gated activation in one kernel: y = silu(x G^T) * (x U^T).

The weight holds the rows of G, then those of U. A program takes the same rows of both, keeps a
chain over K for each, rounds each sum once to D as the layer alone would, and then does what the
activation's own kernel does: the bits are those of the two kernels, and the [M, 2 I] between them
is never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagedctl_kernels.ops.silu_mul.triton_kernel import gated
from pagedctl_kernels.ops.tile_table import Tile
from pagedctl_kernels.ops.triton_linear_kernel import await_inputs, fetch_rows, overlaps


def launch_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
    *,
    round_activation: bool,
) -> None:
    """y D[M, I] from x D[M, K], weight D[2 I, K] and bias D[2 I] or None; all contiguous.

    Addresses and row lengths are multiples of 16 bytes.
    """
    rows, k = x.shape
    width = y.shape[1]
    overlap = overlaps(x, tile)
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n),)
    gated_tile[grid](
        TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        bias,
        y,
        weight,
        rows,
        width,
        k,
        min(tile.prefetch, k * x.element_size()),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        SWAPPED=tile.swapped,
        HAS_BIAS=bias is not None,
        ROUND_ACTIVATION=round_activation,
        OVERLAP=overlap,
        num_warps=tile.warps,
        launch_pdl=overlap,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["rows", "prefetch"])
def gated_tile(
    x,
    weight,
    bias,
    y,
    weight_bytes,
    rows,
    width,
    k,
    prefetch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUND_ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of y a program. Rows of G past its last are rows of U: they are not stored."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    first_row = (tl.program_id(0) % row_tiles) * BLOCK_M
    first_column = (tl.program_id(0) // row_tiles) * BLOCK_N
    if OVERLAP:
        if prefetch > 0:
            fetch_rows(weight_bytes, first_column, width, k, prefetch, BLOCK_N)
            fetch_rows(
                weight_bytes + tl.cast(width, tl.int64) * k,
                first_column,
                width,
                k,
                prefetch,
                BLOCK_N,
            )
        await_inputs()
    gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        inputs = x.load([first_row, step])
        of_gate = weight.load([first_column, step])
        of_up = weight.load([width + first_column, step])
        if SWAPPED:
            gate = tl.dot(of_gate, inputs.T, gate)
            up = tl.dot(of_up, inputs.T, up)
        else:
            gate = tl.dot(inputs, of_gate.T, gate)
            up = tl.dot(inputs, of_up.T, up)
    if SWAPPED:
        gate, up = gate.T, up.T
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    exists = column < width
    if HAS_BIAS:
        gate += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + width + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    dtype = y.dtype.element_ty
    values = gated(gate.to(dtype), up.to(dtype), ROUND_ACTIVATION)
    place = y + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(place, values, mask=(row[:, None] < rows) & exists[None, :])
