"""Rotary position embedding: the resolved parameters and the fp64 numbers they stand for.

Everything here is plain Python floats (IEEE double), so the planner, the loader and the
trainer's twin start from the same table whatever device they use. The table itself, and a
trainer's float32 forms of it, are in ``rope_table.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn"]

YARN_BETA_FAST = 32.0  # the values of a config.json that states none
YARN_BETA_SLOW = 1.0
YARN_SINGULAR_STEP = 0.001


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Resolved rope parameters; a field that the type does not use holds None.

    ``rotary_dim`` of the head's dimensions are rotated: pair i is dimensions i and
    i + rotary_dim / 2; the remaining head dimensions pass through unchanged.
    """

    type: RopeType = "default"
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None

    def inverse_frequencies(self, *, yarn_ramp: Sequence[float] | None = None) -> tuple[float, ...]:
        """Radians per position of each pair, fp64, ``rotary_dim // 2`` values.

        *yarn_ramp* stands in for ``yarn_ramp()`` where that was computed elsewhere.
        """
        base = _base_frequencies(self.theta, self.rotary_dim)
        if self.type == "linear":
            return tuple(frequency / self.factor for frequency in base)
        if self.type == "llama3":
            return tuple(_llama3_frequency(self, frequency) for frequency in base)
        if self.type == "yarn":
            ramp = self.yarn_ramp() if yarn_ramp is None else yarn_ramp
            return _yarn_frequencies(self, base, ramp)
        return base

    def yarn_ramp(self) -> tuple[float, ...]:
        """YaRN's linear ramp: the share of each pair's frequency that is divided by factor."""
        low, high = self.yarn_ramp_ends()
        pairs = range(self.rotary_dim // 2)
        return tuple(min(max((pair - low) / (high - low), 0.0), 1.0) for pair in pairs)

    def yarn_ramp_ends(self) -> tuple[float, float]:
        """First and last pair of the ramp: where a pair turns beta_fast and beta_slow times."""
        fast, slow = self.beta_fast, self.beta_slow
        if fast is None or slow is None:
            raise ValueError("a yarn rope needs beta_fast and beta_slow")
        low, high = _pair_of_turns(self, fast), _pair_of_turns(self, slow)
        if self.truncate is not False:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, float(self.rotary_dim - 1))
        return (low, high + YARN_SINGULAR_STEP) if low == high else (low, high)

    @property
    def attention_scaling(self) -> float:
        """The factor on cos and sin: 1 except for yarn.

        For yarn an explicit attention_factor wins; else, with both mscale keys, the ratio
        of the two magnitudes; else the magnitude 0.1 ln(factor) + 1 of the YaRN paper
        (arXiv 2309.00071, section 3.4).
        """
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            above = _yarn_magnitude(self.factor, self.mscale)
            return above / _yarn_magnitude(self.factor, self.mscale_all_dim)
        return _yarn_magnitude(self.factor, 1.0)


def _base_frequencies(theta: float, rotary_dim: int) -> tuple[float, ...]:
    """theta^(-2i / rotary_dim) for pair i (arXiv 2104.09864, section 3.2.2)."""
    return tuple(1.0 / theta ** (index / rotary_dim) for index in range(0, rotary_dim, 2))


def _llama3_frequency(rope: RopeSpec, frequency: float) -> float:
    """Llama 3.1's rule by wavelength, in tokens per turn.

    Shorter than original / high_freq_factor: kept. Longer than original /
    low_freq_factor: divided by factor. Between: the two blended linearly in turns per
    original context.
    """
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, _original(rope)
    if low is None or high is None:
        raise ValueError("a llama3 rope needs low_freq_factor and high_freq_factor")
    wavelength = 2.0 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / rope.factor
    kept = (original / wavelength - low) / (high - low)
    return (1.0 - kept) * frequency / rope.factor + kept * frequency


def _yarn_frequencies(
    rope: RopeSpec, base: tuple[float, ...], ramp: Sequence[float]
) -> tuple[float, ...]:
    """NTK-by-parts (arXiv 2309.00071, section 3.2), with the ramp taken over the pair index.

    Pairs below the ramp keep their frequency, pairs above it are divided by factor.
    """
    return tuple(
        _blend(frequency, frequency / rope.factor, share)
        for frequency, share in zip(base, ramp, strict=True)
    )


def _blend(kept: float, divided: float, share_divided: float) -> float:
    return divided * share_divided + kept * (1.0 - share_divided)


def _pair_of_turns(rope: RopeSpec, turns: float) -> float:
    """The (real) pair index whose frequency turns *turns* times in the original context."""
    tokens_per_turn = _original(rope) / (turns * 2.0 * math.pi)
    return rope.rotary_dim * math.log(tokens_per_turn) / (2.0 * math.log(rope.theta))


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _original(rope: RopeSpec) -> int:
    if rope.original_max_position_embeddings is None:
        raise ValueError(f"a {rope.type} rope needs original_max_position_embeddings")
    return rope.original_max_position_embeddings
