"""The Hopper kernel of attention for tiles of 128 rows: two warpgroups of rows, one that loads.

The arithmetic is ``attend_items``'. While one half of the rows takes its exponentials the tensor
cores multiply for the other half: the halves share keys and values and nothing else.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 has the second name, later ones the first.
load_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def finite(maximum):
    """The maximum to subtract: 0 where nothing was seen."""
    return gl.where(maximum == float("-inf"), 0.0, maximum)


@gluon.jit
def column(values, LAYOUT: gl.constexpr):
    """One value a row as a column of *LAYOUT*."""
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def fold(left_m, left_l, left_a, m, l, a, SUM: gl.constexpr, OUT: gl.constexpr):  # noqa: E741
    """The state of two neighbouring ranges of keys; an empty one changes nothing."""
    maximum = gl.maximum(left_m, m)
    offset = finite(maximum)
    f = gl.exp2(left_m - offset)
    g = gl.exp2(m - offset)
    total = left_l * column(f, SUM) + l * column(g, SUM)
    return maximum, total, left_a * column(f, OUT) + a * column(g, OUT)


@gluon.jit
def taken(turn, programs):
    """Which (item, kv head) pair this program takes in a turn: odd turns run backwards."""
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def tile_range(item, WINDOW: gl.constexpr, TILE: gl.constexpr, SPLIT_TILES: gl.constexpr):
    """First and end tile of an item, its lowest visible key and its last one."""
    last_position = gl.load(item + 6)
    first_tile = gl.load(item + 3) * SPLIT_TILES
    end_tile = gl.minimum(gl.load(item + 4) * SPLIT_TILES, last_position // TILE + 1)
    lowest = last_position * 0
    if WINDOW > 0:
        lowest = gl.maximum(gl.load(item + 7) - WINDOW + 1, 0)
        first_tile = gl.maximum(first_tile, lowest // TILE)
    return first_tile, end_tile, lowest, last_position


@gluon.jit
def load_tiles(loads, BLOCK_SIZE: gl.constexpr, FACTS: gl.constexpr):
    """Bring every pair's keys and values into the rings, tile after tile."""
    k_cache, v_cache, items, count, block_tables, table_stride, rings, filled, emptied = loads
    KV_HEADS: gl.constexpr = FACTS[0]
    HEAD_DIM: gl.constexpr = FACTS[1]
    WINDOW: gl.constexpr = FACTS[2]
    TILE: gl.constexpr = FACTS[3]
    SPLIT_TILES: gl.constexpr = FACTS[4]
    STAGES: gl.constexpr = FACTS[5]
    DIM: gl.constexpr = rings[0].shape[2]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    tile_keys = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, ROWS))
    in_dims = gl.expand_dims(dims < HEAD_DIM, 0)
    programs = gl.num_programs(0)
    done = programs * 0
    for turn in range(0, (count + programs - 1) // programs):
        index = taken(turn, programs)
        if index < count:
            kv_head = index % KV_HEADS
            item = items + (index // KV_HEADS) * 8
            table = block_tables + gl.load(item + 2).to(gl.int64) * table_stride
            first_tile, end_tile, lowest, last_position = tile_range(
                item, WINDOW, TILE, SPLIT_TILES
            )
            keys = first_tile * TILE + tile_keys
            seen = (keys <= last_position) & (keys >= lowest)
            block = gl.load(table + keys // BLOCK_SIZE, mask=seen, other=0)
            for tile in range(first_tile, end_tile):
                keys = tile * TILE + tile_keys
                on = gl.expand_dims((keys <= last_position) & (keys >= lowest), 1) & in_dims
                head = block.to(gl.int64) * KV_HEADS + kv_head
                row = (head * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
                at = gl.expand_dims(row, 1) + gl.expand_dims(dims, 0)
                coming = keys + TILE
                seen = (coming <= last_position) & (coming >= lowest)
                block = gl.load(table + coming // BLOCK_SIZE, mask=seen, other=0)
                stage = done % STAGES
                phase = ((done // STAGES) & 1) ^ 1
                mbarrier.wait(emptied[0].index(stage), phase)
                load_shared(rings[0].index(stage), k_cache + at, mask=on)
                async_copy.mbarrier_arrive(filled[0].index(stage), increment_count=False)
                mbarrier.wait(emptied[1].index(stage), phase)
                load_shared(rings[1].index(stage), v_cache + at, mask=on)
                async_copy.mbarrier_arrive(filled[1].index(stage), increment_count=False)
                done += 1


@gluon.jit
def row_places(
    half,
    listed,
    num_tokens,
    kv_head,
    Q_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Where 64 rows lie in [N, Hq, Dh], N as *listed* for their places, and which are in use."""
    row = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    live = row // GROUP < num_tokens
    first = gl.load(listed + row // GROUP, mask=live, other=0).to(gl.int64)
    at = (first * Q_HEADS + kv_head * GROUP + row % GROUP) * HEAD_DIM
    on = gl.expand_dims(live, 1) & gl.expand_dims(dims < HEAD_DIM, 0)
    return gl.expand_dims(at, 1) + gl.expand_dims(dims, 0), on


@gluon.jit
def attend_half(half, rows, Q_HEADS: gl.constexpr, FACTS: gl.constexpr):
    """Rows 64 * half onwards of every pair's tile, as ``attend_items`` has them."""
    q, out, lists, states, scale, q_tiles, rings, filled, emptied = rows
    items, count, tokens, slots, positions = lists
    state_m, state_l, state_a = states
    KV_HEADS: gl.constexpr = FACTS[0]
    HEAD_DIM: gl.constexpr = FACTS[1]
    WINDOW: gl.constexpr = FACTS[2]
    TILE: gl.constexpr = FACTS[3]
    SPLIT_TILES: gl.constexpr = FACTS[4]
    STAGES: gl.constexpr = FACTS[5]
    GROUP: gl.constexpr = Q_HEADS // KV_HEADS
    DIM: gl.constexpr = rings[0].shape[2]
    DTYPE: gl.constexpr = rings[0].dtype
    FIT: gl.constexpr = 128 // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ones = gl.full([TILE, 8], 1.0, DTYPE, gl.DotOperandLayout(1, SUM, 2))
    q_tile = q_tiles.index(half)
    tile_keys = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    programs = gl.num_programs(0)
    done = programs * 0
    for turn in range(0, (count + programs - 1) // programs):
        index = taken(turn, programs)
        if index < count:
            kv_head = index % KV_HEADS
            item = items + (index // KV_HEADS) * 8
            start = gl.load(item)
            num_tokens = gl.minimum(gl.load(item + 1), FIT)
            first_position = gl.load(item + 7)
            first_tile, end_tile, _, last_position = tile_range(item, WINDOW, TILE, SPLIT_TILES)
            q_at, q_on = row_places(
                half, tokens + start, num_tokens, kv_head, Q_HEADS, GROUP, HEAD_DIM, DIM, LOADS
            )
            q_tile.store(gl.load(q + q_at, mask=q_on, other=0.0))
            fence_async_shared()
            place = (half * 64 + gl.arange(0, 64, ROW)) // GROUP
            live = place < num_tokens
            token = gl.load(tokens + start + place, mask=live, other=0)
            position = gl.expand_dims(gl.load(positions + token, mask=live, other=-1), 1)

            run_m = gl.full([64], float("-inf"), gl.float32, ROW)
            run_l = gl.zeros([64, 8], gl.float32, SUM)
            run_a = gl.zeros([64, DIM], gl.float32, OUT)
            m = run_m
            l = run_l  # noqa: E741
            a = run_a
            for tile in range(first_tile, end_tile):
                stage = done % STAGES
                phase = (done // STAGES) & 1
                mbarrier.wait(filled[0].index(stage), phase)
                nothing = gl.zeros([64, TILE], gl.float32, SCORES)
                keys_t = rings[0].index(stage).permute((1, 0))
                z = warpgroup_mma(q_tile, keys_t, nothing, use_acc=False, is_async=True)
                z = warpgroup_mma_wait(0, deps=(z,)) * scale
                mbarrier.arrive(emptied[0].index(stage), count=1)
                edge = tile * TILE + TILE - 1 > first_position
                if WINDOW > 0:
                    edge = edge | (tile * TILE <= last_position - WINDOW)
                if edge:
                    keys = gl.expand_dims(tile * TILE + tile_keys, 0)
                    hidden = keys > position
                    if WINDOW > 0:
                        hidden = hidden | (keys <= position - WINDOW)
                    z = gl.where(hidden, float("-inf"), z)
                largest = gl.max(z, 1)
                maximum = gl.maximum(m, largest)
                if tile % SPLIT_TILES == 0:
                    run_m, run_l, run_a = fold(run_m, run_l, run_a, m, l, a, SUM, OUT)
                    m = gl.full([64], float("-inf"), gl.float32, ROW)
                    maximum = largest
                offset = finite(maximum)
                f = gl.exp2(m - offset)
                p = gl.exp2(z - gl.expand_dims(offset, 1)).to(DTYPE)
                m = maximum
                p_sum = gl.convert_layout(p, gl.DotOperandLayout(0, SUM, 2))
                l = mma_v2(p_sum, ones, l * column(f, SUM))  # noqa: E741
                p = gl.convert_layout(p, gl.DotOperandLayout(0, OUT, 2))
                a = a * column(f, OUT)
                mbarrier.wait(filled[1].index(stage), phase)
                a = warpgroup_mma(p, rings[1].index(stage), a, is_async=True)
                a = warpgroup_mma_wait(0, deps=(a,))
                mbarrier.arrive(emptied[1].index(stage), count=1)
                done += 1
            run_m, run_l, run_a = fold(run_m, run_l, run_a, m, l, a, SUM, OUT)

            total = gl.max(run_l, 1)
            if gl.load(item + 5) != 0:
                a_at, a_on = row_places(
                    half, slots + start, num_tokens, kv_head, Q_HEADS, GROUP, HEAD_DIM, DIM, OUT
                )
                gl.store(state_a + a_at, run_a, mask=a_on)
                slot = gl.load(slots + start + place, mask=live, other=0).to(gl.int64)
                head = (half * 64 + gl.arange(0, 64, ROW)) % GROUP
                state = slot * Q_HEADS + kv_head * GROUP + head
                gl.store(state_m + state, run_m, mask=live)
                gl.store(state_l + state, gl.convert_layout(total, ROW), mask=live)
            else:
                y_at, y_on = row_places(
                    half, tokens + start, num_tokens, kv_head, Q_HEADS, GROUP, HEAD_DIM, DIM, OUT
                )
                divisor = gl.broadcast(column(total, OUT), run_a)[0]
                y = gl.div_rn(run_a + 0.0, divisor)
                gl.store(out + y_at, y.to(DTYPE), mask=y_on)


@gluon.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["item_count", "state_m", "state_l"],
)
def attend_tall_items(
    q,
    k_cache,
    v_cache,
    out,
    items,
    item_count,
    tokens,
    slots,
    positions,
    block_tables,
    table_stride,
    state_m,
    state_l,
    state_a,
    scale,
    Q_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    ROW_REGISTERS: gl.constexpr,
):
    """The arguments and lists of ``attend_items``, for items of up to 128 rows.

    Three warpgroups: two take 64 rows each, the third loads STAGES tiles of keys and of values
    ahead.
    """
    dtype: gl.constexpr = k_cache.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_DIM], SHARED)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, BLOCK_DIM], SHARED)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, TILE, BLOCK_DIM], SHARED)
    k_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # Every loading thread arrives, and one thread of each half.
        mbarrier.init(k_filled.index(i), count=128)
        mbarrier.init(v_filled.index(i), count=128)
        mbarrier.init(k_emptied.index(i), count=2)
        mbarrier.init(v_emptied.index(i), count=2)
    rings, filled, emptied = (k_ring, v_ring), (k_filled, v_filled), (k_emptied, v_emptied)
    count = gl.load(item_count) * KV_HEADS
    lists, states = (items, count, tokens, slots, positions), (state_m, state_l, state_a)
    rows = (q, out, lists, states, scale, q_tiles, rings, filled, emptied)
    loads = (k_cache, v_cache, items, count, block_tables, table_stride, rings, filled, emptied)
    facts: gl.constexpr = (KV_HEADS, HEAD_DIM, WINDOW, TILE, SPLIT_TILES, STAGES)
    gl.warp_specialize(
        [
            (attend_half, (0, rows, Q_HEADS, facts)),
            (attend_half, (1, rows, Q_HEADS, facts)),
            (load_tiles, (loads, BLOCK_SIZE, facts)),
        ],
        [4, 4],
        [ROW_REGISTERS, LOAD_REGISTERS],
    )
