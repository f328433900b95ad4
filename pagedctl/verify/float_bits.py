"""float32 values by their bits: equal or not, and how far apart. No torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def bits(values: NDArray[np.float32]) -> NDArray[np.int32]:
    """The bits of float32 *values*: -0.0 is not 0.0, and a NaN equals itself."""
    return values.view(np.int32)


def ulps(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.int64]:
    """Steps between neighbouring float32 values, element by element.

    -0.0 and 0.0 are neighbours, so values of other bits are never 0 steps apart.
    """
    distances: NDArray[np.int64] = np.abs(_rank(one) - _rank(other))
    return distances


def _rank(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """The place of each value among all float32, int64: -0.0 is -1 and 0.0 is 0."""
    found = bits(values).astype(np.int64)
    return np.where(found >= 0, found, -(found & 0x7FFFFFFF) - 1)
