"""Device functions that several kernels share: LN, Philox, the noise, the temperature.

Every one consists of integer operations and correctly rounded float32 operations, so its bits
equal those of the CPU's leaves. Kernels that call them compile without contraction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops import gumbel_noise as written
from pagedctl_kernels.ops import philox

_EXPONENTIAL = tl.constexpr(written.EXPONENTIAL)
_LOGARITHM = tl.constexpr(written.LOGARITHM)
_LN2_HIGH = tl.constexpr(written.LN2_HIGH)
_LN2_LOW = tl.constexpr(written.LN2_LOW)
_LARGEST = tl.constexpr(written.LARGEST)
_SERIES_BELOW = tl.constexpr(written.SERIES_BELOW)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_ROUNDS = tl.constexpr(philox.ROUNDS)
_LEFT_MULTIPLIER = tl.constexpr(0xD2511F53)
_RIGHT_MULTIPLIER = tl.constexpr(0xCD9E8D57)
_LEFT_WEYL = tl.constexpr(0x9E3779B9)
_RIGHT_WEYL = tl.constexpr(0xBB67AE85)
_SAMPLING = tl.constexpr(philox.SAMPLING)


@triton.jit
def natural_log(x):
    """LN of positive normal float32 values, in the written order. A NaN gives a number."""
    pattern = x.to(tl.int32, bitcast=True)
    exponent = (pattern - _SQRT_HALF_BITS) >> 23
    fraction = (pattern - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    scale = exponent.to(tl.float32)
    square = fraction * fraction
    tail = fraction * _LOGARITHM[7] + _LOGARITHM[6]
    for power in tl.static_range(5, -1, -1):
        tail = tail * fraction + _LOGARITHM[power]
    tail = tail * (square * fraction)
    tail = tail + scale * _LN2_LOW
    tail = tail - square * 0.5
    return (fraction + tail) + scale * _LN2_HIGH


@triton.jit
def philox4x32_10(c0, c1, c2, c3, k0, k1):
    """Four uint32 words of each counter (c0, c1, c2, c3) under the key (k0, k1), all uint32."""
    for _ in tl.static_range(_ROUNDS):
        left = c0 * _LEFT_MULTIPLIER
        right = c2 * _RIGHT_MULTIPLIER
        c0_next = tl.umulhi(c2, _RIGHT_MULTIPLIER) ^ c1 ^ k0
        c2 = tl.umulhi(c0, _LEFT_MULTIPLIER) ^ c3 ^ k1
        c0 = c0_next
        c1 = right
        c3 = left
        k0 = k0 + _LEFT_WEYL
        k1 = k1 + _RIGHT_WEYL
    return c0, c1, c2, c3


@triton.jit
def token_words(seed, position, token_group):
    """Words of tokens 4 g .. 4 g + 3: four uint32 tensors of token_group's shape.

    seed int64 in [0, 2^53) and position int64 are scalars or of that shape; token_group is an
    integer tensor of groups g.
    """
    c0 = token_group.to(tl.uint32)
    zero = c0 ^ c0
    c1 = zero + position.to(tl.uint32)
    c2 = zero + _SAMPLING
    k0 = zero + seed.to(tl.uint32)
    k1 = zero + (seed >> 32).to(tl.uint32)
    return philox4x32_10(c0, c1, c2, zero, k0, k1)


@triton.jit
def uniform(word):
    """v float32 in [2^-33, 1 - 2^-24] of uint32 words."""
    return tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), _LARGEST)


@triton.jit
def gumbel_noise(word):
    """Gumbel noise float32 of uint32 words, in the written order."""
    v = uniform(word)
    series = v * _EXPONENTIAL[6] + _EXPONENTIAL[5]
    for power in tl.static_range(4, -1, -1):
        series = series * v + _EXPONENTIAL[power]
    series = v + (v * v) * series
    far = natural_log(1.0 - v) * -1.0
    return natural_log(tl.where(v < _SERIES_BELOW, series, far)) * -1.0


@triton.jit
def temperature_operand(temperature, MULTIPLY: tl.constexpr):
    """What ``scaled`` takes of a temperature: T, or fl(1 / T); 1 where T is 0."""
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    if MULTIPLY:
        return tl.div_rn(1.0, divisor)
    return divisor


@triton.jit
def scaled(logits, operand, MULTIPLY: tl.constexpr):
    """z of logits: one division by T, or one product with fl(1 / T). Rises with the logit."""
    if MULTIPLY:
        return logits * operand
    return tl.div_rn(logits, operand)
