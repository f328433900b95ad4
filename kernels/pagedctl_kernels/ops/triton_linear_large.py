"""Linear layers of many rows: launches the kernel that moves whole tiles by descriptors."""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagedctl_kernels.ops.tile_table import SHARED_BYTES, Tile
from pagedctl_kernels.ops.triton_linear_large_kernel import many_rows

BARRIER_BYTES = 1024
"""Kept for the barriers of the stages, and for what aligns the buffers."""

_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


def launch_large(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """y[M, N] = x[M, K] weight[N, K]^T (+ bias[N]) with a tile of kind persistent.

    x and weight are contiguous bfloat16 or float16 on 16-byte addresses; rows of all operands are
    multiples of 16 bytes; M is at least 1; y is of their dtype or float32.
    """
    (rows, k), n = x.shape, weight.shape[0]
    tail = tile.block_n // 3 if tile.block_n % 3 == 0 else 0
    width = tile.block_n - tail
    piece, stages = fitted(tile, tail or width, y.element_size())
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    many_rows[(min(tiles, _processors(x.device)),)](
        _descriptor(x, tile.block_m // 2, tile.block_k),
        _descriptor(weight, width, tile.block_k),
        _descriptor(weight, tail or width, tile.block_k),
        bias,
        _descriptor(y, tile.block_m // 2, piece),
        rows,
        n,
        k,
        BLOCK_M=tile.block_m,
        WIDTH=width,
        TAIL=tail,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=stages,
        HAS_BIAS=bias is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )


def fitted(tile: Tile, narrowest: int, itemsize: int) -> tuple[int, int]:
    """Columns of one store, and stages: the wider store if it fits beside all of the stages.

    A tile is stored in at most four pieces, so the widest one leaves a float32 result fewer stages.
    """
    one_stage = tile.stage_bytes // tile.stages
    piece = min(64, narrowest)
    room = _stages_beside(tile, piece, itemsize, one_stage)
    if room < tile.stages and tile.block_n < 256:
        piece = min(32, narrowest)
        room = _stages_beside(tile, piece, itemsize, one_stage)
    return piece, min(tile.stages, room)


def _stages_beside(tile: Tile, piece: int, itemsize: int, one_stage: int) -> int:
    """How many stages fit beside two buffers of *piece* columns for each half of the rows."""
    return (SHARED_BYTES - BARRIER_BYTES - 2 * tile.block_m * piece * itemsize) // one_stage


def _descriptor(operand: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[operand.dtype])
    return TensorDescriptor.from_tensor(operand, block, layout)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
