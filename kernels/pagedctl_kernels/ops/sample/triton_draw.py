"""The draw over a tile: bounds of all scores, and noise only where it can decide.

Scores are bounded in units of log2, where noise is -log2(E) with E >= v + v^2 / 2. The group of
four tokens with the largest bound almost always holds the winner. The slack of a comparison covers
every rounding: of bounds, noise and scores, and of logits that were not divided exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.sample.triton_keys import (
    NO_WINNER,
    key_of,
    packed,
    packed_key,
    packed_token,
    scaled_row,
    value_of,
)
from pagedctl_kernels.ops.triton_math import gumbel_noise, token_words

LOG2_E = tl.constexpr(1.4426950408889634)
_CURVE = tl.constexpr(0.5849 * 2.0**-32)
"""log2(1 + v / 2) >= 0.5849 v; in units of the word."""
_TRIES = tl.constexpr(6)
"""Groups that are looked at one by one; with more rivals, all noise of the tile is made."""


@triton.jit
def quarters(tile, GROUPS: tl.constexpr):
    """Tile [GROUPS, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(tile, (GROUPS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def score_bound(logit, rate, word):
    """At least log2(e) * fl(z + noise) - 32, to rounding; z is about logit * rate / log2(e)."""
    variate = word.to(tl.float32) + 0.5
    return logit * rate - (tl.log2(variate) + variate * _CURVE)


@triton.jit
def least_bound(winner):
    """The bound that a token must reach to beat a packed winner."""
    score = value_of(packed_key(winner))
    slack = tl.abs(score) * (2.0**-20) + 2.0**-10
    return (score - slack) * LOG2_E - 32.0


@triton.jit
def group_winner(line, group, vocab, token_offset, seed, position, operand, MULTIPLY: tl.constexpr):
    """The packed winner of four neighbouring columns."""
    lane = tl.arange(0, 4)
    column = group * 4 + lane
    z = tl.load(line + column, mask=column < vocab, other=float("-inf"))
    z = scaled_row(z, operand, MULTIPLY)
    w0, w1, w2, w3 = token_words(seed, position, (token_offset >> 2) + group)
    word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return tl.max(packed(key_of(z + gumbel_noise(word)), column + token_offset), axis=0)


@triton.jit
def all_noise_winner(
    line,
    first,
    vocab,
    token_offset,
    seed,
    position,
    operand,
    GROUPS: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """The packed winner of GROUPS groups from *first* on, every token's noise made."""
    PART: tl.constexpr = min(GROUPS, 128)
    best = tl.full((PART,), NO_WINNER, tl.int64)
    for start in range(0, GROUPS, PART):
        group = first + start + tl.arange(0, PART)
        w0, w1, w2, w3 = token_words(seed, position, (token_offset >> 2) + group)
        for lane in tl.static_range(4):
            column = group * 4 + lane
            z = tl.load(line + column, mask=column < vocab, other=float("-inf"))
            z = scaled_row(z, operand, MULTIPLY)
            word = w0
            if lane == 1:
                word = w1
            if lane == 2:
                word = w2
            if lane == 3:
                word = w3
            score = key_of(z + gumbel_noise(word))
            best = tl.maximum(best, packed(score, column + token_offset))
    return tl.max(best, axis=0)


@triton.jit
def drawn(
    line,
    logits,
    first,
    vocab,
    token_offset,
    seed,
    position,
    rate,
    operand,
    GROUPS: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """The packed winner of fl(z + noise) over logits [GROUPS, 4] without NaN or +infinity."""
    group = first + tl.arange(0, GROUPS)
    z0, z1, z2, z3 = quarters(logits, GROUPS)
    w0, w1, w2, w3 = token_words(seed, position, (token_offset >> 2) + group)
    left = tl.maximum(score_bound(z0, rate, w0), score_bound(z1, rate, w1))
    right = tl.maximum(score_bound(z2, rate, w2), score_bound(z3, rate, w3))
    bound = tl.maximum(left, right)
    leader = tl.max(packed(key_of(bound), group), axis=0)
    winner = tl.full((), NO_WINNER, tl.int64)
    least = tl.full((), float("-inf"), tl.float32)
    tries = 0
    while (value_of(packed_key(leader)) >= least) & (tries < _TRIES):
        chosen = packed_token(leader).to(tl.int32)
        mine = group_winner(line, chosen, vocab, token_offset, seed, position, operand, MULTIPLY)
        winner = tl.maximum(winner, mine)
        least = least_bound(winner)
        bound = tl.where(group == chosen, float("-inf"), bound)
        leader = tl.max(packed(key_of(bound), group), axis=0)
        tries += 1
    if value_of(packed_key(leader)) >= least:
        winner = all_noise_winner(
            line, first, vocab, token_offset, seed, position, operand, GROUPS, MULTIPLY
        )
    return winner
