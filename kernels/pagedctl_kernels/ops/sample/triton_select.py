"""Truncation without a sort: a bound from the histogram, then the few tokens above it.

Counts and masses are integers, so no order of summation and no launch shape can change a set.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.sample.triton_keys import (
    LOWEST_KEY,
    NAN_KEY,
    REMOVED_KEY,
    cuts_prefix,
    integer_mass,
    is_sound,
    key_of,
    scaled_row,
    value_of,
)
from pagedctl_kernels.ops.sample.triton_scan import CLASSES, CLASSES_PER_UNIT
from pagedctl_kernels.ops.triton_math import temperature_operand

NOTHING = NAN_KEY
"""A floor that no logit reaches: no token is collected."""
_UNITS_PER_CLASS = tl.constexpr(1.0 / CLASSES_PER_UNIT.value)
_STEPS = tl.constexpr(256)
"""Largest distance of a floor from the row's maximum, in classes."""
_MARGIN = tl.constexpr(0.6)
"""A class's mass is known to a factor of exp(1/4); its square is less than 1 / 0.6."""


@triton.jit
def histogram_floor(counts, peaks, top, k, p, vocab, capacity):
    """A key that every token of the kept prefix reaches, or NOTHING if too many tokens reach it.

    counts int32[chunks, CLASSES], peaks int32[chunks], top the largest peak. It is checked later:
    a bad bound costs time and changes no set.
    """
    filled = peaks > REMOVED_KEY
    shift = tl.where(filled, value_of(top) - value_of(peaks), 0.0)[:, None]
    kind = tl.arange(0, CLASSES)[None, :].to(tl.float32)
    step = tl.ceil(shift * CLASSES_PER_UNIT) + kind
    step = tl.where(kind == CLASSES - 1, float("inf"), step)
    mass = counts.to(tl.float32) * tl.exp(-((kind + 0.5) * _UNITS_PER_CLASS) - shift)
    finite = tl.sum(tl.sum(counts, axis=1), axis=0)
    wanted = tl.where((k > 0) & (k < vocab), k, vocab)
    by_count = wanted < finite
    allowed = tl.sum(tl.sum(mass, axis=1), axis=0) * ((1.0 - p) * _MARGIN).to(tl.float32)
    low = -1
    high = _STEPS
    while high - low > 1:
        middle = (low + high) // 2
        within = step <= middle
        count = tl.sum(tl.sum(tl.where(within, counts, 0), axis=1), axis=0)
        tail = tl.sum(tl.sum(tl.where(within, 0.0, mass), axis=1), axis=0)
        enough = tl.where(by_count, count >= wanted, tail <= allowed)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    certain = tl.sum(tl.sum(tl.where(step <= high, counts, 0), axis=1), axis=0)
    reach = (high + 1).to(tl.float32) * _UNITS_PER_CLASS
    slack = (tl.abs(value_of(top)) + reach) * (2.0**-20)
    floor = tl.maximum(key_of(value_of(top) - reach - slack), LOWEST_KEY)
    # k that keeps all finite tokens is a count too: no floor above the lowest is checked by it.
    bounded = (high < _STEPS) & (certain <= capacity) & (by_count | (wanted == vocab))
    return tl.where(bounded, floor, tl.where(finite <= capacity, LOWEST_KEY, NOTHING))


@triton.jit
def weight_floor(top, least):
    """A key that every token reaches whose weight exp(z - top) is at least *least*."""
    reach = tl.log2(least) * -0.6931472
    slack = (tl.abs(value_of(top)) + reach) * (2.0**-20) + 0.01
    return tl.maximum(key_of(value_of(top) - reach - slack), LOWEST_KEY)


@triton.jit(do_not_specialize=["chunks"])
def floor_kernel(
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    classes,
    peak,
    floor,
    taken,
    vocab,
    chunks,
    capacity,
    CHUNKS: tl.constexpr,
    DRAW: tl.constexpr,
):
    """peaks and classes of a row -> its largest key, the floor of its candidates, none taken."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < chunks
    slot = row * chunks + chunk
    tops = tl.load(peaks + slot, mask=exists, other=REMOVED_KEY)
    top = tl.max(tops, axis=0)
    tl.store(peak + row, top)
    tl.store(taken + row, 0)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    lowest = tl.full((), NOTHING, tl.int32)
    if is_sound(top) & ((tl.load(temperature + row) > 0.0) | (not DRAW)):
        if cuts_prefix(k, p, vocab):
            kind = tl.arange(0, CLASSES)
            places = slot[:, None] * CLASSES + kind[None, :]
            counts = tl.load(classes + places, mask=exists[:, None], other=0)
            lowest = histogram_floor(counts, tops, top, k, p, vocab, capacity)
        elif least > 0.0:
            lowest = weight_floor(top, least)
    tl.store(floor + row, lowest)


@triton.jit(do_not_specialize=["chunks"])
def collect_kernel(
    logits,
    row_stride,
    temperature,
    top_p,
    peak,
    floor,
    taken,
    masses,
    keys,
    columns,
    weights,
    vocab,
    chunks,
    capacity,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    MULTIPLY: tl.constexpr,
    DRAW: tl.constexpr,
):
    """masses int64[R, chunks] of rows with top-p, and the candidates above a floor.

    A candidate is keys int32, columns int32 and, with top-p, weights int64, each [R, capacity].
    They lie in any order; taken int32[R] counts all, those that found no place included.
    """
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
    t = tl.load(temperature + row)
    top = tl.load(peak + row)
    lowest = tl.load(floor + row)
    weighs = (tl.load(top_p + row) < 1.0) & is_sound(top) & ((t > 0.0) | (not DRAW))
    if weighs | (lowest < NOTHING):
        operand = temperature_operand(t, MULTIPLY)
        line = logits + row * row_stride
        mass = tl.zeros((PART,), tl.int64)
        for start in range(0, TILE, PART):
            column = chunk * TILE + start + tl.arange(0, PART)
            z = tl.load(line + column, mask=column < vocab, other=float("-inf"))
            z = scaled_row(z, operand, MULTIPLY)
            above = z >= value_of(lowest)
            place = tl.atomic_add(taken + row + column * 0, 1, mask=above, sem="relaxed")
            entry = row * capacity + place
            kept = above & (place < capacity)
            tl.store(keys + entry, key_of(z), mask=kept)
            tl.store(columns + entry, column, mask=kept)
            if weighs:
                weight = integer_mass(tl.exp(z - value_of(top)))
                tl.store(weights + entry, weight, mask=kept)
                mass += weight
        if weighs:
            tl.store(masses + row * chunks + chunk, tl.sum(mass, axis=0))
