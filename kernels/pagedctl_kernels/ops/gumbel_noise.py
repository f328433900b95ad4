"""Gumbel noise from a random word, by float32 operations that every device rounds alike."""

from __future__ import annotations

import torch

EXPONENTIAL = (
    0.5000000596046448,
    0.3333280086517334,
    0.25017765164375305,
    0.1972181648015976,
    0.18958626687526703,
    0.04254123196005821,
    0.3332173526287079,
)
"""Q of ``docs/arithmetic.md``: E = v + v^2 Q(v) for small v, lowest power first."""

LOGARITHM = (
    0.33333316445350647,
    -0.25000810623168945,
    0.2000228613615036,
    -0.16624553501605988,
    0.14181196689605713,
    -0.13128763437271118,
    0.12881620228290558,
    -0.07859551906585693,
)
"""P of ``docs/arithmetic.md``: the tail of ln(1 + f), lowest power first."""

LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
LARGEST = 1 - 2.0**-24
SERIES_BELOW = 0.25
_SQRT_HALF_BITS = 0x3F3504F3


def gumbel_noise(words: torch.Tensor) -> torch.Tensor:
    """words int64 in [0, 2^32) -> Gumbel noise float32 of the same shape.

    Every product and every sum is one rounded float32 operation. Word 0 gives the largest
    noise, 22.9; the last word the smallest, -2.9.
    """
    uniform = uniform_variates(words)
    series = uniform + (uniform * uniform) * horner(EXPONENTIAL, uniform)
    exponential = torch.where(uniform < SERIES_BELOW, series, -natural_log(1 - uniform))
    return -natural_log(exponential)


def uniform_variates(words: torch.Tensor) -> torch.Tensor:
    """v float32 in [2^-33, 1 - 2^-24] of words int64 in [0, 2^32), rising with the word."""
    return ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=LARGEST)


def natural_log(x: torch.Tensor) -> torch.Tensor:
    """LN of a positive normal float32, in the written order; absolute error below 1e-6."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    fraction = (bits - (exponent << 23)).view(torch.float32) - 1
    scale = exponent.to(torch.float32)
    square = fraction * fraction
    tail = horner(LOGARITHM, fraction) * (square * fraction)
    tail = tail + scale * LN2_LOW
    tail = tail - square * 0.5
    return (fraction + tail) + scale * LN2_HIGH


def horner(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """The polynomial at x by Horner's rule, each product and each sum rounded."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
