"""The last pass: one program a row finds the end of the kept prefix and draws from the kept set."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.sample.triton_keys import (
    LOWEST_KEY,
    NO_WINNER,
    REMOVED_KEY,
    cuts_prefix,
    integer_mass,
    is_sound,
    key_of,
    packed,
    packed_token,
    scaled_row,
    token_score,
    value_of,
)
from pagedctl_kernels.ops.sample.triton_search import (
    columns_at,
    counted_from,
    crossing_key,
    keys_at,
    kth_key,
    last_tie,
    weighed_from,
)
from pagedctl_kernels.ops.sample.triton_select import NOTHING
from pagedctl_kernels.ops.triton_math import temperature_operand


@triton.jit
def target_mass(p, total):
    """ceil(p * S) in float64, at most S."""
    return tl.minimum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def prefix_end(
    line,
    keys,
    columns,
    weights,
    lowest,
    count,
    capacity,
    operand,
    top,
    k,
    p,
    total,
    vocab,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """The end of the prefix that top-k, then top-p keep: its key, the column of its last tie.

    *total* is the row's mass. Also returns whether the candidates did not do, and how many
    entries there are to look at.
    """
    k = tl.where((k > 0) & (k < vocab), k, vocab)
    by_count = k < vocab
    wide = (lowest == NOTHING) | (count > capacity)
    finite = count
    if by_count:
        wide = wide | ((count < k) & (lowest > LOWEST_KEY))
    elif not wide:
        _, mass = weighed_from(
            line, keys, weights, wide, count, operand, top, LOWEST_KEY, TILE, MULTIPLY
        )
        wide = mass < target_mass(p, total)
    if wide:
        count = vocab
        finite = counted_from(line, keys, wide, count, operand, LOWEST_KEY, TILE, MULTIPLY)
    key = tl.full((), LOWEST_KEY, tl.int32)
    needed = vocab.to(tl.int64)
    number = finite
    if k <= finite:
        key, of_ties = kth_key(
            line, keys, wide, count, operand, top, finite, k.to(tl.int32), TILE, MULTIPLY
        )
        needed = of_ties.to(tl.int64)
        if p < 1.0:
            _, total = weighed_from(
                line, keys, weights, wide, count, operand, top, key + 1, TILE, MULTIPLY
            )
            total += needed * integer_mass(tl.exp(value_of(key) - value_of(top)))
            number = counted_from(line, keys, wide, count, operand, key, TILE, MULTIPLY)
    if p < 1.0:
        key, needed = crossing_key(
            line,
            keys,
            weights,
            wide,
            count,
            operand,
            top,
            key,
            number,
            target_mass(p, total),
            TILE,
            MULTIPLY,
        )
    last = last_tie(line, keys, columns, wide, count, operand, key, needed, vocab, TILE, MULTIPLY)
    return key, last, wide, count


@triton.jit
def drawn_of_kept(
    line,
    keys,
    columns,
    wide,
    count,
    operand,
    top,
    end,
    last,
    least,
    seed,
    position,
    token_offset,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """The packed winner of fl(z + noise) over the kept entries."""
    best = tl.full((TILE,), NO_WINNER, tl.int64)
    for start in range(0, count, TILE):
        key = keys_at(line, keys, wide, start, count, operand, TILE, MULTIPLY)
        column = columns_at(columns, wide, start, count, TILE)
        z = value_of(key)
        kept = (key > end) | ((key == end) & (column <= last))
        kept = kept & (key > REMOVED_KEY) & (tl.exp(z - value_of(top)) >= least)
        if tl.sum(kept.to(tl.int32), axis=0) > 0:
            token = column + token_offset
            entry = packed(key_of(token_score(z, seed, position, token)), token)
            best = tl.maximum(best, tl.where(kept, entry, NO_WINNER))
    return tl.max(best, axis=0)


@triton.jit(do_not_specialize=["chunks"])
def finish_kernel(
    logits,
    row_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    winners,
    peak,
    floor,
    taken,
    masses,
    keys,
    columns,
    weights,
    token_ids,
    faulty,
    ends,
    last_tied,
    vocab,
    token_offset,
    chunks,
    capacity,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
    DRAW: tl.constexpr,
):
    """DRAW: token_ids int64[R] and faulty[R]; else the end of each prefix.

    ends int32[R] is the key of the prefix's last token, last_tied int32[R] the column of the last
    token with that key that belongs to it.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    slot = row * chunks + chunk
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    top = tl.load(peak + row)
    prefix = cuts_prefix(k, p, vocab)
    winner = tl.full((), NO_WINNER, tl.int64)
    end = tl.full((), LOWEST_KEY, tl.int32)
    last = tl.full((), 0, tl.int32) + vocab
    if is_sound(top):
        if ((t == 0.0) | ((prefix == 0) & (least == 0.0))) & DRAW:
            part = tl.load(winners + slot, mask=chunk < chunks, other=NO_WINNER)
            winner = tl.max(part, axis=0)
        else:
            operand = temperature_operand(t, MULTIPLY)
            line = logits + row * row_stride
            first = row * capacity
            lowest = tl.load(floor + row)
            count = tl.load(taken + row)
            wide = (lowest == NOTHING) | (count > capacity)
            if prefix:
                part = tl.load(masses + slot, mask=chunk < chunks, other=0)
                end, last, wide, count = prefix_end(
                    line,
                    keys + first,
                    columns + first,
                    weights + first,
                    lowest,
                    count,
                    capacity,
                    operand,
                    top,
                    k,
                    p,
                    tl.sum(part, axis=0),
                    vocab,
                    TILE,
                    MULTIPLY,
                )
            if wide:
                count = vocab
            if DRAW:
                winner = drawn_of_kept(
                    line,
                    keys + first,
                    columns + first,
                    wide,
                    count,
                    operand,
                    top,
                    end,
                    last,
                    least,
                    tl.load(seed + row),
                    tl.load(position + row),
                    token_offset,
                    TILE,
                    MULTIPLY,
                )
    if DRAW:
        sound = is_sound(top)
        tl.store(token_ids + row, tl.where(sound, packed_token(winner), 0))
        tl.store(faulty + row, tl.where(sound, 0, 1).to(tl.uint8))
    else:
        tl.store(ends + row, end)
        tl.store(last_tied + row, last)


@triton.jit(do_not_specialize=["chunks"])
def mask_kernel(
    logits,
    row_stride,
    temperature,
    min_p,
    peak,
    ends,
    last_tied,
    out,
    vocab,
    chunks,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """logits A[R, V] -> out A[R, V]: tokens outside the kept set at -infinity."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    column = (tl.program_id(0) % chunks) * TILE + tl.arange(0, TILE)
    inside = column < vocab
    logit = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf"))
    top = tl.load(peak + row)
    end = tl.load(ends + row)
    operand = temperature_operand(tl.load(temperature + row), MULTIPLY)
    z = scaled_row(logit, operand, MULTIPLY)
    key = key_of(z)
    kept = (key > end) | ((key == end) & (column <= tl.load(last_tied + row)))
    kept = kept & (tl.exp(z - value_of(top)) >= tl.load(min_p + row))
    removed = tl.where(is_sound(top), float("-inf"), logit)
    tl.store(out + row * vocab + column, tl.where(kept, logit, removed), mask=inside)
