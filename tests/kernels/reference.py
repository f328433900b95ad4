"""Independent float64 references: the formulas of the field, in numpy, one row at a time.

Nothing here is shared with the implementation: no tiles, no splits, no block tables that are
gathered in bulk, no halving trees. Inputs are arrays whose values are exact in the tested dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import torch

Array = np.ndarray[Any, Any]

# |got - want| <= atol + rtol * |want|, per op and dtype. One unit in the last place is 2^-23 of
# a float32, 2^-10 of a float16, 2^-7 of a bfloat16. An op that rounds twice to D (``before``
# norms, the activation) is allowed two of them.
TOLERANCES: dict[tuple[str, str], tuple[float, float]] = {
    ("rms_norm", "float64"): (1e-14, 1e-14),
    ("rms_norm", "float32"): (1e-6, 1e-6),
    ("rms_norm", "float16"): (1e-4, 2.0**-9),
    ("rms_norm", "bfloat16"): (1e-4, 2.0**-6),
    ("linear", "float64"): (1e-12, 1e-13),
    ("linear", "float32"): (1e-4, 1e-5),
    ("linear", "float16"): (1e-4, 2.0**-10),
    ("linear", "bfloat16"): (1e-4, 2.0**-7),
    ("rope", "float64"): (1e-14, 1e-14),
    ("rope", "float32"): (1e-6, 1e-6),
    ("rope", "float16"): (1e-3, 2.0**-9),
    ("rope", "bfloat16"): (1e-2, 2.0**-6),
    ("attention", "float64"): (1e-13, 1e-13),
    ("attention", "float32"): (2e-6, 2e-6),
    ("attention", "float16"): (1e-3, 2.0**-9),
    ("attention", "bfloat16"): (1e-2, 2.0**-6),
    ("silu_mul", "float64"): (1e-14, 1e-14),
    ("silu_mul", "float32"): (1e-6, 1e-6),
    ("silu_mul", "float16"): (1e-6, 2.0**-9),
    ("silu_mul", "bfloat16"): (1e-6, 2.0**-6),
    ("logprob", "float64"): (1e-13, 1e-13),
    ("logprob", "float32"): (5e-6, 1e-6),
}


def assert_close(op: str, dtype: str, got: torch.Tensor, want: Array) -> None:
    """Compare within the table's tolerance and report the worst place."""
    atol, rtol = TOLERANCES[op, dtype]
    values = to_numpy(got)
    assert values.shape == want.shape
    assert np.isfinite(values).all(), f"{op} {dtype}: not finite"
    excess = np.abs(values - want) - (atol + rtol * np.abs(want))
    worst = np.unravel_index(int(excess.argmax()), excess.shape)
    assert excess[worst] <= 0, (
        f"{op} {dtype} at {worst}: got {values[worst]!r}, want {want[worst]!r}"
    )


def to_numpy(tensor: torch.Tensor) -> Array:
    array: Array = tensor.to(torch.float64).numpy()
    return array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(head: Array, position: int, theta: float, rotary_dim: int) -> Array:
    """Rotate one head's half-split pairs as complex numbers."""
    half = rotary_dim // 2
    angles = position * theta ** (-np.arange(half) / half)
    turned = (head[:half] + 1j * head[half:rotary_dim]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag, head[rotary_dim:]])


def attend(query: Array, keys: Array, values: Array, position: int, window: int | None) -> Array:
    """One query row [Dh] at *position* over keys and values [L, Dh] from position 0."""
    first = 0 if window is None else max(position - window + 1, 0)
    scores = keys[first : position + 1] @ query / math.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights @ values[first : position + 1] / weights.sum()


def silu_mul(gate: Array, up: Array) -> Array:
    return gate / (1 + np.exp(-gate)) * up


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max()
    return shifted - math.log(math.fsum(np.exp(shifted)))


def kept_tokens(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """The kept set by sorting (probability descending, id ascending), in float64."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    ranked = sorted((i for i in range(len(z)) if z[i] > -math.inf), key=lambda i: (-z[i], i))
    if 0 < top_k < len(z):
        ranked = ranked[:top_k]
    weights = np.exp(z - z.max())
    if top_p < 1:
        mass = math.fsum(weights[ranked])
        running = 0.0
        for count, token in enumerate(ranked, start=1):
            running += weights[token] / mass
            if running >= top_p:
                ranked = ranked[:count]
                break
    return sorted(token for token in ranked if weights[token] >= min_p)


def crossing_margin(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> float:
    """How near any partial sum of the ranked probabilities comes to top_p."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    ranked = np.sort(np.exp(z - z.max()))[::-1][: top_k if top_k > 0 else None]
    return float(np.abs(np.cumsum(ranked) / ranked.sum() - top_p).min())


def gumbel(word: int) -> float:
    """-ln(-ln(1 - v)) of the word's uniform v, in 60 digits."""
    with mpmath.workdps(60):
        v = mpmath.mpf(float(np.float32(np.float32(word) + np.float32(0.5)))) / 2**32
        v = min(v, 1 - mpmath.mpf(2) ** -24)
        return float(-mpmath.log(-mpmath.log(1 - v)))


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """The published generator on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (right >> 32) ^ c[1] ^ k[0],
            right & 0xFFFFFFFF,
            (left >> 32) ^ c[3] ^ k[1],
            left & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c
