"""The kernel of a linear layer for many rows: one warp loads, two warpgroups multiply and store.

Written in Gluon, Triton's lower level, which lets a warp load the operands of the next steps while
the tensor cores work, over the end of a tile too. A tile is BLOCK_M rows of x by WIDTH + TAIL rows
of the weight; TAIL, half of WIDTH or zero, lets a layer be cut into as many tiles as there are
multiprocessors. Each sum is one chain over the whole K in a float32 accumulator, in ascending
order, as in the kernels for few rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 has the two copies under longer names.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit(do_not_specialize=["rows", "n", "k"])
def many_rows(
    x,
    weight,
    weight_tail,
    bias,
    y,
    rows,
    n,
    k,
    BLOCK_M: gl.constexpr,
    WIDTH: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """A program takes every P-th tile of P programs.

    The descriptors' blocks: x [BLOCK_M / 2, BLOCK_K], weight [WIDTH, BLOCK_K], weight_tail
    [TAIL, BLOCK_K] (unused where TAIL is 0), y [BLOCK_M / 2, columns of one store].
    """
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * 2, BLOCK_M // 2, BLOCK_K], x.layout)
    ws = gl.allocate_shared_memory(weight.dtype, [STAGES, WIDTH, BLOCK_K], weight.layout)
    ts = ws
    if TAIL > 0:
        ts = gl.allocate_shared_memory(weight.dtype, [STAGES, TAIL, BLOCK_K], weight_tail.layout)
    ys = gl.allocate_shared_memory(y.dtype, [4, y.block_shape[0], y.block_shape[1]], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    given = (xs, ws, ts, full, empty, rows, n, k)
    BLOCKS: gl.constexpr = (BLOCK_M, WIDTH, TAIL, BLOCK_K, GROUP_M, STAGES)
    gl.warp_specialize(
        [
            (_multiply, (given, bias, y, ys, 0, BLOCKS, HAS_BIAS)),
            (_multiply, (given, bias, y, ys, 1, BLOCKS, HAS_BIAS)),
            (_fetch, (given, x, weight, weight_tail, BLOCKS)),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _place(tile, row_tiles, column_tiles, GROUP_M: gl.constexpr):
    """The row and column tile of a number; GROUP_M row tiles go through the columns together."""
    group = GROUP_M * column_tiles
    first = (tile // group) * GROUP_M
    height = gl.minimum(row_tiles - first, GROUP_M)
    return first + (tile % group) % height, (tile % group) // height


@gluon.jit
def _after(slot, phase, STAGES: gl.constexpr):
    """The stage that follows, and the phase of its barriers."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _fetch(
    given,
    x,
    weight,
    weight_tail,
    BLOCKS: gl.constexpr,
):
    """Fill every free stage with the operands of the next step, tile after tile."""
    BLOCK_M: gl.constexpr = BLOCKS[0]
    WIDTH: gl.constexpr = BLOCKS[1]
    TAIL: gl.constexpr = BLOCKS[2]
    BLOCK_K: gl.constexpr = BLOCKS[3]
    GROUP_M: gl.constexpr = BLOCKS[4]
    STAGES: gl.constexpr = BLOCKS[5]
    xs, ws, ts, full, empty, rows, n, k = given
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(n, WIDTH + TAIL)
    BYTES: gl.constexpr = (BLOCK_M + WIDTH + TAIL) * BLOCK_K * x.dtype.primitive_bitwidth // 8
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        i, j = _place(tile, row_tiles, column_tiles, GROUP_M)
        row = i * BLOCK_M
        column = j * (WIDTH + TAIL)
        for start in range(0, k, BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, BYTES)
            _load(x, [row, start], ready, xs.index(slot * 2))
            _load(x, [row + BLOCK_M // 2, start], ready, xs.index(slot * 2 + 1))
            _load(weight, [column, start], ready, ws.index(slot))
            if TAIL > 0:
                _load(weight_tail, [column + WIDTH, start], ready, ts.index(slot))
            slot, phase = _after(slot, phase, STAGES)


@gluon.jit
def _multiply(
    given,
    bias,
    y,
    ys,
    PART: gl.constexpr,
    BLOCKS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """The sums of half the rows of each tile: PART 0 the upper half, 1 the lower.

    The products of a step run on while the next stage is awaited; a stage is given back when the
    step after it has begun.
    """
    BLOCK_M: gl.constexpr = BLOCKS[0]
    WIDTH: gl.constexpr = BLOCKS[1]
    TAIL: gl.constexpr = BLOCKS[2]
    BLOCK_K: gl.constexpr = BLOCKS[3]
    GROUP_M: gl.constexpr = BLOCKS[4]
    STAGES: gl.constexpr = BLOCKS[5]
    xs, ws, ts, full, empty, rows, n, k = given
    row_tiles = gl.cdiv(rows, BLOCK_M)
    column_tiles = gl.cdiv(n, WIDTH + TAIL)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        i, j = _place(tile, row_tiles, column_tiles, GROUP_M)
        sums = gl.zeros((BLOCK_M // 2, WIDTH), gl.float32, LAYOUT)
        if TAIL > 0:
            TAIL_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
            more = gl.zeros((BLOCK_M // 2, TAIL), gl.float32, TAIL_LAYOUT)
        for start in range(0, k, BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            left = xs.index(slot * 2 + PART)
            token = warpgroup_mma(left, ws.index(slot).permute((1, 0)), sums, is_async=True)
            if TAIL > 0:
                tail_token = warpgroup_mma(
                    left, ts.index(slot).permute((1, 0)), more, is_async=True
                )
                sums, more = warpgroup_mma_wait(2, deps=(token, tail_token))
            else:
                sums = warpgroup_mma_wait(1, deps=(token,))
            mbarrier.arrive(_before(empty, slot, STAGES), count=1, pred=start > 0)
            slot, phase = _after(slot, phase, STAGES)
        if TAIL > 0:
            sums, more = warpgroup_mma_wait(0, deps=(sums, more))
        else:
            sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(_before(empty, slot, STAGES), count=1)
        row = i * BLOCK_M + PART * (BLOCK_M // 2)
        column = j * (WIDTH + TAIL)
        tma.store_wait(0)  # long done: a tail may have used the first buffer last
        _write(y, ys, bias, sums, row, column, n, PART, HAS_BIAS)
        if TAIL > 0:
            _write(y, ys, bias, more, row, column + WIDTH, n, PART, HAS_BIAS)
    tma.store_wait(0)


@gluon.jit
def _before(empty, slot, STAGES: gl.constexpr):
    """The barrier of the stage before *slot*."""
    return empty.index(gl.where(slot == 0, STAGES, slot) - 1)


@gluon.jit
def _write(y, ys, bias, sums, row, column, n, PART: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Add the bias, round once and store, in pieces of the width that y's blocks have."""
    WIDTH: gl.constexpr = sums.shape[1]
    PIECE: gl.constexpr = y.block_shape[1]
    if HAS_BIAS:
        place = column + gl.arange(0, WIDTH, gl.SliceLayout(0, sums.type.layout))
        added = gl.load(bias + place, mask=place < n, other=0.0).to(gl.float32)
        sums += gl.expand_dims(added, 0)
    if WIDTH == PIECE:
        _put(y, ys.index(2 * PART), row, column, sums)
    else:
        left, right = _halves(sums)
        if WIDTH == 2 * PIECE:
            _put(y, ys.index(2 * PART), row, column, left)
            _put(y, ys.index(2 * PART + 1), row, column + PIECE, right)
        else:
            first, second = _halves(left)
            third, fourth = _halves(right)
            _put(y, ys.index(2 * PART), row, column, first)
            _put(y, ys.index(2 * PART + 1), row, column + PIECE, second)
            _put(y, ys.index(2 * PART), row, column + 2 * PIECE, third)
            _put(y, ys.index(2 * PART + 1), row, column + 3 * PIECE, fourth)


@gluon.jit
def _halves(sums):
    """The left and the right half of the columns."""
    return sums.reshape((sums.shape[0], 2, sums.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _put(y, buffer, row, column, sums):
    """Store through *buffer*, whose last store but one has been read."""
    tma.store_wait(1)
    buffer.store(sums.to(y.dtype))
    fence_async_shared()
    _store(y, [row, column], buffer)
