"""Searches for the end of a kept prefix: passes over a row's candidates, or over all its logits.

``line`` is the row of logits, ``keys``, ``columns`` and ``weights`` are its candidates' first
entries; ``wide`` says that the row itself is searched, ``count`` how many entries there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.sample.triton_keys import (
    LOWEST_KEY,
    REMOVED_KEY,
    integer_mass,
    key_of,
    scaled_row,
    value_of,
)


@triton.jit
def keys_at(line, keys, wide, start, count, operand, TILE: tl.constexpr, MULTIPLY: tl.constexpr):
    """Keys int32[TILE] of the entries from *start* on; there is -infinity behind the last."""
    place = start + tl.arange(0, TILE)
    if wide:
        z = tl.load(line + place, mask=place < count, other=float("-inf"))
        key = key_of(scaled_row(z, operand, MULTIPLY))
    else:
        key = tl.load(keys + place, mask=place < count, other=REMOVED_KEY)
    return key


@triton.jit
def columns_at(columns, wide, start, count, TILE: tl.constexpr):
    """Columns int32[TILE] of the entries from *start* on."""
    place = start + tl.arange(0, TILE)
    column = place
    if not wide:
        column = tl.load(columns + place, mask=place < count, other=0)
    return column


@triton.jit
def masses_at(key, weights, wide, start, count, top, TILE: tl.constexpr):
    """Masses int64[TILE] of the entries from *start* on, whose keys are *key*."""
    if wide:
        mass = integer_mass(tl.exp(value_of(key) - value_of(top)))
    else:
        place = start + tl.arange(0, TILE)
        mass = tl.load(weights + place, mask=place < count, other=0)
    return mass


@triton.jit
def counted_from(
    line, keys, wide, count, operand, lowest, TILE: tl.constexpr, MULTIPLY: tl.constexpr
):
    """How many entries have a key of at least *lowest*."""
    total = tl.zeros((TILE,), tl.int32)
    for start in range(0, count, TILE):
        key = keys_at(line, keys, wide, start, count, operand, TILE, MULTIPLY)
        total += (key >= lowest).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def weighed_from(
    line,
    keys,
    weights,
    wide,
    count,
    operand,
    top,
    lowest,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """How many entries have a key of at least *lowest*, and their mass."""
    number = tl.zeros((TILE,), tl.int32)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, count, TILE):
        key = keys_at(line, keys, wide, start, count, operand, TILE, MULTIPLY)
        mass = masses_at(key, weights, wide, start, count, top, TILE)
        number += (key >= lowest).to(tl.int32)
        total += tl.where(key >= lowest, mass, 0)
    return tl.sum(number, axis=0), tl.sum(total, axis=0)


@triton.jit
def largest_below(
    line, keys, wide, count, operand, limit, TILE: tl.constexpr, MULTIPLY: tl.constexpr
):
    """The largest key of an entry below *limit*."""
    largest = tl.full((TILE,), REMOVED_KEY, tl.int32)
    for start in range(0, count, TILE):
        key = keys_at(line, keys, wide, start, count, operand, TILE, MULTIPLY)
        largest = tl.maximum(largest, tl.where(key < limit, key, REMOVED_KEY))
    return tl.max(largest, axis=0)


@triton.jit
def tied_until(
    line,
    keys,
    columns,
    wide,
    count,
    operand,
    tie,
    last,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """How many entries with the key *tie* have a column of at most *last*."""
    total = tl.zeros((TILE,), tl.int32)
    for start in range(0, count, TILE):
        key = keys_at(line, keys, wide, start, count, operand, TILE, MULTIPLY)
        column = columns_at(columns, wide, start, count, TILE)
        total += ((key == tie) & (column <= last)).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def kth_key(
    line, keys, wide, count, operand, top, finite, k, TILE: tl.constexpr, MULTIPLY: tl.constexpr
):
    """The key of the k-th entry (k <= finite, the finite ones), and which of its ties that is."""
    low = tl.full((), LOWEST_KEY, tl.int64)
    high = top.to(tl.int64) + 1
    from_low = finite
    from_high = tl.full((), 0, tl.int32)
    while (high - low > 1) & (from_low - from_high > 1):
        middle = (low + high) >> 1
        number = counted_from(line, keys, wide, count, operand, middle.to(tl.int32), TILE, MULTIPLY)
        enough = number >= k
        low = tl.where(enough, middle, low)
        from_low = tl.where(enough, number, from_low)
        high = tl.where(enough, high, middle)
        from_high = tl.where(enough, from_high, number)
    key = largest_below(line, keys, wide, count, operand, high, TILE, MULTIPLY)
    return key, k - from_high


@triton.jit
def crossing_key(
    line,
    keys,
    weights,
    wide,
    count,
    operand,
    top,
    least,
    number,
    target,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """The largest key from *least* on whose prefix has the target mass, and its ties needed.

    *number* entries have a key of at least *least*, and the target mass or, if not all ties at
    *least* count, more than it.
    """
    low = least.to(tl.int64)
    high = top.to(tl.int64) + 1
    from_low = number
    from_high = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int64)
    while (high - low > 1) & (from_low - from_high > 1):
        middle = (low + high) >> 1
        number, mass = weighed_from(
            line, keys, weights, wide, count, operand, top, middle.to(tl.int32), TILE, MULTIPLY
        )
        enough = mass >= target
        low = tl.where(enough, middle, low)
        from_low = tl.where(enough, number, from_low)
        high = tl.where(enough, high, middle)
        from_high = tl.where(enough, from_high, number)
        above = tl.where(enough, above, mass)
    key = largest_below(line, keys, wide, count, operand, high, TILE, MULTIPLY)
    one = tl.maximum(integer_mass(tl.exp(value_of(key) - value_of(top))), 1)
    return key, (target - above + one - 1) // one


@triton.jit
def last_tie(
    line,
    keys,
    columns,
    wide,
    count,
    operand,
    tie,
    needed,
    vocab,
    TILE: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """The column of the needed-th entry with the key *tie*, by column; vocab if all are needed."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 0, tl.int32) + vocab
    tied = tied_until(line, keys, columns, wide, count, operand, tie, vocab, TILE, MULTIPLY)
    while (high - low > 1) & (tied > needed):
        middle = (low + high) >> 1
        reached = tied_until(line, keys, columns, wide, count, operand, tie, middle, TILE, MULTIPLY)
        enough = reached >= needed
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    return high
