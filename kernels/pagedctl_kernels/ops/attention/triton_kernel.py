"""The Hopper kernel of attention: items of a work list, tile by tile, into rows or states."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def finite(maximum):
    """The maximum to subtract: 0 where nothing was seen, so that exp2 gives 0 and not NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def fold(left_m, left_l, left_a, m, l, a):  # noqa: E741
    """The state of two neighbouring ranges of keys; an empty one changes nothing."""
    maximum = tl.maximum(left_m, m)
    offset = finite(maximum)
    f = tl.exp2(left_m - offset)[:, None]
    g = tl.exp2(m - offset)[:, None]
    return maximum, left_l * f + l * g, left_a * f + a * g


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["item_count", "state_m", "state_l"],
)
def attend_items(
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
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    P_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    RESUMES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Every program takes (item, kv head) pairs in turns; see ``DeviceWork`` for the lists.

    q D[T, Hq, Dh], caches [num_blocks, Hkv, BLOCK_SIZE, Dh], out D[T, Hq, Dh]. An item's keys
    are folded into one state, which becomes output rows or is kept for a merge.
    """
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    place = rows // GROUP
    dims = tl.arange(0, BLOCK_DIM)
    in_dims = dims < HEAD_DIM
    tile_keys = tl.arange(0, TILE)
    ones = tl.full([TILE, SUM_COLUMNS], 1.0, P_DTYPE)

    count = tl.load(item_count) * KV_HEADS
    if OVERLAPS:
        gdc_launch_dependents()
    for turn in range(0, tl.cdiv(count, programs)):
        # Longest items come first; odd turns run backwards, so that no program has all of them.
        index = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
        if index < count:
            # Read in its turn: Triton 3.6 lost a field that was carried over from the turn before.
            item = items + (index // KV_HEADS).to(tl.int64) * 8
            start = tl.load(item)
            num_tokens = tl.load(item + 1)
            table_row = tl.load(item + 2)
            first_split = tl.load(item + 3)
            end_split = tl.load(item + 4)
            flags = tl.load(item + 5)
            last_position = tl.load(item + 6)
            first_position = tl.load(item + 7)
            kv_head = index % KV_HEADS
            table = block_tables + table_row.to(tl.int64) * table_stride
            live = (place < num_tokens) & (rows < (ROWS // GROUP) * GROUP)
            token = tl.load(tokens + start + place, mask=live, other=0).to(tl.int64)
            position = tl.load(positions + token, mask=live, other=-1)
            q_row = token * Q_HEADS + kv_head * GROUP + rows % GROUP
            q_at = q_row[:, None] * HEAD_DIM + dims[None, :]
            on = live[:, None] & in_dims[None, :]
            queries = tl.load(q + q_at, mask=on, other=0.0)

            first_tile = first_split * SPLIT_TILES
            end_tile = tl.minimum(end_split * SPLIT_TILES, last_position // TILE + 1)
            lowest = 0
            if WINDOW > 0:
                lowest = tl.maximum(first_position - WINDOW + 1, 0)
                first_tile = tl.maximum(first_tile, lowest // TILE)

            run_m = tl.full([ROWS], float("-inf"), tl.float32)
            run_l = tl.zeros([ROWS, SUM_COLUMNS], tl.float32)
            run_a = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
            m = run_m
            l = run_l  # noqa: E741
            a = run_a
            if RESUMES:
                resumed = live & (rows * 0 + flags >= 2)
                slot = tl.load(slots + start + place, mask=resumed, other=0).to(tl.int64)
                state = slot * Q_HEADS + kv_head * GROUP + rows % GROUP
                state_at = state[:, None] * HEAD_DIM + dims[None, :]
                run_m = tl.load(state_m + state, mask=resumed, other=float("-inf"))
                run_l = run_l + tl.load(state_l + state, mask=resumed, other=0.0)[:, None]
                run_a = tl.load(state_a + state_at, mask=on & resumed[:, None], other=0.0)
            keys = first_tile * TILE + tile_keys
            seen = (keys <= last_position) & (keys >= lowest)
            block = tl.load(table + keys // BLOCK_SIZE, mask=seen, other=0)
            for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
                keys = tile * TILE + tile_keys
                seen = (keys <= last_position) & (keys >= lowest)
                head = block.to(tl.int64) * KV_HEADS + kv_head
                kv_at = ((head * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM)[:, None] + dims[
                    None, :
                ]
                coming = keys + TILE
                seen_then = (coming <= last_position) & (coming >= lowest)
                block = tl.load(table + coming // BLOCK_SIZE, mask=seen_then, other=0)
                kv_on = seen[:, None] & in_dims[None, :]
                k = tl.load(k_cache + kv_at, mask=kv_on, other=0.0)
                z = tl.dot(queries, k.to(queries.dtype).T, input_precision="ieee") * scale
                edge = tile * TILE + TILE - 1 > first_position
                if WINDOW > 0:
                    edge = edge | (tile * TILE <= last_position - WINDOW)
                if edge:
                    hidden = keys[None, :] > position[:, None]
                    if WINDOW > 0:
                        hidden = hidden | (keys[None, :] <= position[:, None] - WINDOW)
                    z = tl.where(hidden, float("-inf"), z)
                v = tl.load(v_cache + kv_at, mask=kv_on, other=0.0)
                largest = tl.max(z, 1)
                maximum = tl.maximum(m, largest)
                if tile % SPLIT_TILES == 0:
                    run_m, run_l, run_a = fold(run_m, run_l, run_a, m, l, a)
                    # A new split: f is 0, so that what stays in l and a counts no more.
                    m = tl.full([ROWS], float("-inf"), tl.float32)
                    maximum = largest
                offset = finite(maximum)
                f = tl.exp2(m - offset)[:, None]
                p = tl.exp2(z - offset[:, None]).to(P_DTYPE)
                m = maximum
                l = tl.dot(p, ones, l * f, input_precision="ieee")  # noqa: E741
                a = tl.dot(p, v.to(P_DTYPE), a * f, input_precision="ieee")
            run_m, run_l, run_a = fold(run_m, run_l, run_a, m, l, a)

            total = tl.max(run_l, 1)
            if flags % 2 != 0:
                slot = tl.load(slots + start + place, mask=live, other=0).to(tl.int64)
                state = slot * Q_HEADS + kv_head * GROUP + rows % GROUP
                tl.store(state_m + state, run_m, mask=live)
                tl.store(state_l + state, total, mask=live)
                tl.store(state_a + state[:, None] * HEAD_DIM + dims[None, :], run_a, mask=on)
            else:
                y = tl.div_rn(run_a + 0.0, tl.broadcast_to(total[:, None], run_a.shape))
                tl.store(out + q_at, y.to(out.dtype.element_ty), mask=on)
