"""The first pass: each row's largest logit, its winner where nothing is truncated, or a histogram.

One program reads one chunk of a row. What it writes does not depend on any other program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.sample.triton_draw import LOG2_E, drawn, quarters
from pagedctl_kernels.ops.sample.triton_keys import (
    NO_WINNER,
    cuts_prefix,
    is_sound,
    key_of,
    packed,
    packed_token,
    scaled_row,
    value_of,
)
from pagedctl_kernels.ops.triton_math import scaled, temperature_operand

CLASSES = tl.constexpr(32)
"""Classes of the histogram, by distance from the chunk's largest z; the last one is open."""
CLASSES_PER_UNIT = tl.constexpr(2.0)
_LN_2 = tl.constexpr(0.6931471805599453)
_SMALL = tl.constexpr(2.0**-100)
"""Below this temperature logits are divided before anything else, so that no rate overflows."""


@triton.jit
def larger(a, b):
    """The larger of two; a NaN if either is one."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def first_of_group(line, group, key, vocab, token_offset):
    """Packed: the first of four columns whose logit has this key."""
    column = group * 4 + tl.arange(0, 4)
    keys = key_of(tl.load(line + column, mask=column < vocab, other=float("-inf")))
    best = tl.where(keys == key, packed(keys, column + token_offset), NO_WINNER)
    return tl.max(best, axis=0)


@triton.jit
def class_counts(distance, exists, GROUPS: tl.constexpr):
    """Tokens in each class of distance [GROUPS, 4], int32[CLASSES], where they exist."""
    kind = tl.minimum(distance * CLASSES_PER_UNIT, CLASSES - 1.0).to(tl.int32)
    kind = tl.reshape(tl.where(exists, kind, 0), (4 * GROUPS,))
    return tl.histogram(kind, CLASSES, mask=tl.reshape(exists, (4 * GROUPS,)))


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(
    logits,
    row_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    peaks,
    winners,
    classes,
    vocab,
    token_offset,
    chunks,
    GROUPS: tl.constexpr,
    MULTIPLY: tl.constexpr,
    DRAW: tl.constexpr,
):
    """logits A[R, V] -> peaks int32[R, chunks], and one of the two that the row needs:

    winners int64[R, chunks], packed, of greedy and untruncated rows (DRAW), with the ids of
    columns that begin at token_offset (a multiple of 4); classes int32[R, chunks, CLASSES] of
    rows that top-k or top-p truncates. A chunk has GROUPS groups of four columns.
    """
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
    slot = row * chunks + chunk
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    line = logits + row * row_stride
    t = tl.load(temperature + row)
    tile = tl.load(line + column, mask=column < vocab, other=float("-inf"))
    operand = temperature_operand(t, MULTIPLY)
    rate = tl.div_rn(LOG2_E, tl.where(t < _SMALL, 1.0, t))
    rest = operand
    if (t < _SMALL) & (t > 0.0):
        tile = scaled(tile, operand, MULTIPLY)
        rest = tl.full((), 1.0, tl.float32)
    z0, z1, z2, z3 = quarters(tile, GROUPS)
    keys = key_of(larger(larger(z0, z1), larger(z2, z3)))
    leader = tl.max(packed(keys, group), axis=0)
    key = (leader >> 32).to(tl.int32)
    peak = key_of(scaled_row(value_of(key), rest, MULTIPLY))
    tl.store(peaks + slot, peak)
    prefix = cuts_prefix(tl.load(top_k + row), tl.load(top_p + row), vocab)
    greedy = (t == 0.0) & DRAW
    if greedy:
        best = first_of_group(line, packed_token(leader).to(tl.int32), key, vocab, token_offset)
        tl.store(winners + slot, best)
    elif prefix:
        counts = tl.zeros((CLASSES,), tl.int32)
        if is_sound(peak):
            distance = (value_of(key) - tile) * (rate * _LN_2)
            counts = class_counts(distance, tile > float("-inf"), GROUPS)
        tl.store(classes + slot * CLASSES + tl.arange(0, CLASSES), counts)
    elif DRAW and tl.load(min_p + row) == 0.0:
        winner = tl.full((), NO_WINNER, tl.int64)
        if is_sound(peak):
            winner = drawn(
                line,
                tile,
                chunk * GROUPS,
                vocab,
                token_offset,
                tl.load(seed + row),
                tl.load(position + row),
                rate,
                operand,
                GROUPS,
                MULTIPLY,
            )
        tl.store(winners + slot, winner)
