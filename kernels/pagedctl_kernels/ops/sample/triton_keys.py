"""Device functions of sampling: keys that order as logits do, the integer mass, packed winners.

A key is an int32 that compares as its logit does: zeros of either sign are equal, and a NaN is
above +infinity, so the largest key of a row tells whether the row is faulty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.triton_math import gumbel_noise, scaled, token_words

INFINITY_KEY = tl.constexpr(0x7F800000)
NAN_KEY = tl.constexpr(0x7FFFFFFF)
REMOVED_KEY = tl.constexpr(-0x7F800001)
"""Key of -infinity."""
LOWEST_KEY = tl.constexpr(-0x7F800000)
"""Key of the lowest finite logit."""

NO_WINNER = tl.constexpr(-(2**63))
_ID_BITS = tl.constexpr(0x7FFFFFFF)
_LOWER_IDS_FIRST = tl.constexpr(0x7FFFFFFF)
"""Flipped in a packed id, so that the lower of two ids is the larger number."""
_MASS_SCALE = tl.constexpr(2.0**40)
_INTEGERS_FROM = tl.constexpr(2.0**23)
"""float32 values from here on are integers."""


@triton.jit
def key_of(z):
    """float32 -> int32 keys."""
    pattern = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    key = pattern ^ ((pattern >> 31) & 0x7FFFFFFF)
    return tl.where(z != z, NAN_KEY, key)


@triton.jit
def value_of(key):
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_sound(peak):
    """Whether a row whose largest key is *peak* is finite where it has to be."""
    return (peak > REMOVED_KEY) & (peak < INFINITY_KEY)


@triton.jit
def cuts_prefix(k, p, vocab):
    """Whether top-k or top-p of a row may remove a token."""
    return ((k > 0) & (k < vocab)) | (p < 1.0)


@triton.jit
def scaled_row(logits, operand, MULTIPLY: tl.constexpr):
    """z of a row's logits; by a temperature of one no operation is done."""
    z = logits
    if operand != 1.0:
        z = scaled(logits, operand, MULTIPLY)
    return z


@triton.jit
def integer_mass(weights):
    """Weights in [0, 1] as int64 multiples of 2^-40, rounded to even."""
    mass = weights * _MASS_SCALE
    whole = (mass + _INTEGERS_FROM) - _INTEGERS_FROM
    return tl.where(mass < _INTEGERS_FROM, whole, mass).to(tl.int64)


@triton.jit
def packed(key, token):
    """int64 that orders by key, then by the lower token id."""
    return (key.to(tl.int64) << 32) | (token ^ _LOWER_IDS_FIRST).to(tl.int64)


@triton.jit
def packed_token(winner):
    """The token id of a packed winner, int64."""
    return (winner & _ID_BITS) ^ _LOWER_IDS_FIRST


@triton.jit
def packed_key(winner):
    """The key of a packed winner."""
    return (winner >> 32).to(tl.int32)


@triton.jit
def token_score(z, seed, position, token):
    """fl(z + noise) of single tokens, each with its own counter."""
    w0, w1, w2, w3 = token_words(seed, position, token >> 2)
    odd = (token & 1) != 0
    word = tl.where((token & 2) != 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    return z + gumbel_noise(word)
