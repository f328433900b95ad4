"""Block sums of exp on the GPU: chunks of a block in parallel, then a fold of their sums."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.triton_halving_tree import halving_tree_sum


@triton.jit
def segment_columns(
    columns,
    segments,
    BLOCK_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """This program's GROUP segments of one row: row, segments [GROUP, 1], columns, which exist.

    Segment s is chunk s mod CHUNKS of block s div CHUNKS. The last rows come first: of what was
    read before in ascending order, they are still in the cache.
    """
    programs = (segments + GROUP - 1) // GROUP
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (program // programs).to(tl.int64)
    segment = (program % programs) * GROUP + tl.arange(0, GROUP)[:, None]
    first = (segment // CHUNKS) * BLOCK_SIZE
    inside = (segment % CHUNKS) * WIDTH + tl.arange(0, WIDTH)[None, :]
    column = first + inside
    exists = (inside < BLOCK_SIZE) & (column < columns)
    return row, segment, column, exists


@triton.jit
def segment_sums(shifted, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Sums of exp of each segment, [GROUP, WIDTH] -> [GROUP, 1]; missing columns are -infinity."""
    return halving_tree_sum(tl.exp(shifted), GROUP, WIDTH)[:, None]


@triton.jit
def segment_sums_kernel(
    shifted,
    sums,
    columns,
    row_stride,
    segments,
    BLOCK_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """shifted [R, columns] -> sums [R, segments]; one program per row and GROUP segments."""
    row, segment, column, exists = segment_columns(
        columns, segments, BLOCK_SIZE, CHUNKS, GROUP, WIDTH
    )
    values = tl.load(shifted + row * row_stride + column, mask=exists, other=float("-inf"))
    tl.store(
        sums + row * segments + segment, segment_sums(values, GROUP, WIDTH), mask=segment < segments
    )


@triton.jit
def block_sum(sums, block, blocks, CHUNKS: tl.constexpr):
    """The sum of a block from those of its chunks, left to right; zero past the last block."""
    total = tl.load(sums + block * CHUNKS, mask=block < blocks, other=0.0)
    for chunk in tl.static_range(1, CHUNKS):
        total += tl.load(sums + block * CHUNKS + chunk, mask=block < blocks, other=0.0)
    return total


@triton.jit(do_not_specialize=["blocks"])
def block_sums_kernel(sums, out, blocks, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Chunk sums [blocks, CHUNKS] of all rows -> block sums [blocks]."""
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out + block, block_sum(sums, block, blocks, CHUNKS), mask=block < blocks)
