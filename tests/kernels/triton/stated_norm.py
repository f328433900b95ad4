"""The normalisation as the GPU's order states it, in numpy: every operation rounded on its own."""

from __future__ import annotations

import numpy as np
import torch

from pagedctl_kernels.house import GROUP_VALUES
from tests.kernels.reference import Array


def halved(values: Array) -> Array:
    """The upper half added to the lower half until one value of the last dimension is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def grouped_tree(values: Array) -> Array:
    """Halving trees over GROUP_VALUES neighbours, then over their sums: [..., n] -> [...]."""
    width = values.shape[-1]
    padded = np.zeros((*values.shape[:-1], 1 << (width - 1).bit_length()), dtype=values.dtype)
    padded[..., :width] = values
    group = min(GROUP_VALUES, padded.shape[-1])
    return halved(halved(padded.reshape(*padded.shape[:-1], -1, group)))


def stated_norm(
    rows: torch.Tensor, weight: torch.Tensor, eps: float, norm_cast: str
) -> torch.Tensor:
    """rows D[..., n], weight D[n] -> D[..., n], on the device of *rows*."""
    wide = rows.float().cpu().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        mean = grouped_tree(wide * wide) / np.float32(rows.shape[-1])
        rstd = np.float32(1) / np.sqrt(mean + np.float32(eps))
        normed = wide * rstd[..., None]
        if norm_cast == "before":
            normed = torch.from_numpy(normed).to(rows.dtype).float().numpy()
        weighted = normed * weight.float().cpu().numpy()
    return torch.from_numpy(weighted).to(rows.dtype).to(rows.device)
