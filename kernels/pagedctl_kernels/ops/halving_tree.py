"""The halving-tree sum: the CPU's reduction order, the same for every width of padding."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as functional

Sums = TypeVar("Sums", torch.Tensor, np.ndarray[Any, Any])

FEW_VALUES = 1 << 15
"""Up to here numpy adds: its calls cost a third of torch's, and torch would use one thread too."""


def halving_tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum [..., n] over its last dimension to [...], in the dtype of *values*.

    Order: zero-pad to a power of two, then add the upper half to the lower half, element by
    element, until one value is left. Every step is one correctly rounded sum per element, so
    the bits depend on the row alone and on no library.
    """
    width = values.shape[-1]
    if width < 1:
        raise ValueError("halving_tree_sum needs at least one value")
    padded = 1 << (width - 1).bit_length()
    total = functional.pad(values, (0, padded - width)) if padded > width else values
    if values.numel() <= FEW_VALUES:
        return torch.from_numpy(_halved(total.numpy()))
    return _halved(total)


def _halved(total: Sums) -> Sums:
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
