"""The kernel of a linear layer for few rows, and for every shape and address.

One program a tile of y: ``block_m`` rows of x by ``block_n`` rows of the weight, one chain over
the whole K in ascending steps, in an accumulator of float32. Few rows are bound by the weight's
bytes, so tiles are small enough that every multiprocessor streams, and deep enough in flight.
``swapped`` puts the weight's rows on the side of the product whose height is that of the wide
tensor-core instruction. The order of the sum is the same for every tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from pagedctl_kernels.ops.tile_table import PLAIN_KIND, Tile


def launch_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """y[M, N] = x[M, K] weight[N, K]^T (+ bias[N]), rounded once to y's dtype; all contiguous.

    Tiles of kind ``descriptors`` need addresses and row lengths that are multiples of 16 bytes.
    """
    rows, k = x.shape
    n = weight.shape[0]
    descriptors = tile.kind != PLAIN_KIND
    overlap = overlaps(x, tile)
    left: Any = x
    right: Any = weight
    if descriptors:
        left = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k])
        right = TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])
    grid = (triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n),)
    linear_tile[grid](
        left,
        right,
        bias,
        y,
        weight,
        rows,
        n,
        k,
        min(tile.prefetch, k * x.element_size()),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        SWAPPED=tile.swapped,
        DESCRIPTORS=descriptors,
        K_FITS=k % tile.block_k == 0,
        HAS_BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=tile.warps,
        launch_pdl=overlap,
        enable_fp_fusion=False,
    )


def overlaps(x: torch.Tensor, tile: Tile) -> bool:
    """Whether a launch of *tile* may begin before the kernel ahead of it has ended."""
    return tile.overlap and x.is_cuda


@triton.jit(do_not_specialize=["rows", "prefetch"])
def linear_tile(
    x,
    weight,
    bias,
    y,
    weight_bytes,
    rows,
    n,
    k,
    prefetch,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    K_FITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs of one weight tile run side by side, so that its bytes are read once.

    ``weight_bytes`` is the weight's address, which a descriptor does not give.
    """
    row_tiles = tl.cdiv(rows, BLOCK_M)
    first_row = (tl.program_id(0) % row_tiles) * BLOCK_M
    first_column = (tl.program_id(0) // row_tiles) * BLOCK_N
    if OVERLAP:
        if prefetch > 0:
            fetch_rows(weight_bytes, first_column, n, k, prefetch, BLOCK_N)
        await_inputs()
    sums = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        left = _operand(x, first_row, rows, step, k, BLOCK_M, BLOCK_K, DESCRIPTORS, K_FITS)
        right = _operand(weight, first_column, n, step, k, BLOCK_N, BLOCK_K, DESCRIPTORS, K_FITS)
        sums = tl.dot(right, left.T, sums) if SWAPPED else tl.dot(left, right.T, sums)
    if SWAPPED:
        sums = sums.T
    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    place = y + row.to(tl.int64)[:, None] * n + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < n)
    tl.store(place, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def await_inputs():
    """Let the next kernel begin, and wait until the kernels before this one are complete.

    Every program waits, whatever it reads: so a kernel that is complete has none unfinished
    before it, and the next one may read what any of them wrote. Nothing is written before the
    wait, and nothing is read but weights on their way to the cache (``fetch_rows``).
    """
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def fetch_rows(matrix, first, limit, k, count, BLOCK: tl.constexpr):
    """Ask for the first *count* bytes of BLOCK rows from *first* to be brought into L2.

    No value is read, so an update of the weight that is still being written cannot be missed:
    L2 is where writes meet reads.
    """
    row = tl.minimum(first + tl.arange(0, BLOCK), limit - 1)
    place = (matrix + row.to(tl.int64) * k).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [place, tl.zeros((BLOCK,), tl.int32) + count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _operand(
    source,
    first,
    limit,
    step,
    k,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    K_FITS: tl.constexpr,
):
    """BLOCK rows from *first* by BLOCK_K columns from *step*; zeros beyond *limit* and k."""
    if DESCRIPTOR:
        values = source.load([first, step])
    else:
        row = first + tl.arange(0, BLOCK)
        column = step + tl.arange(0, BLOCK_K)
        inside = row[:, None] < limit
        if not K_FITS:
            inside = inside & (column[None, :] < k)
        place = source + row.to(tl.int64)[:, None] * k + column[None, :]
        values = tl.load(place, mask=inside, other=0.0)
    return values
