"""The normalisation formula that RMSNorm and QK-norm share."""

from __future__ import annotations

import torch

from pagedctl_kernels.ops.halving_tree import halving_tree_sum


def rms_normalise(
    rows: torch.Tensor, weight: torch.Tensor, *, eps: float, norm_cast: str
) -> torch.Tensor:
    """Normalise rows D[..., n] and apply weight D[n] (or broadcastable); returns D[..., n].

    Order, all in A: halving tree over the squares, one division by n, + eps, one square root,
    one reciprocal (``torch.rsqrt`` rounds root and quotient separately: tested against
    numpy), product with the row. ``before`` rounds to D and then applies the weight;
    ``after`` applies it first.
    """
    internal = torch.float64 if rows.dtype == torch.float64 else torch.float32
    wide = rows.to(internal)
    mean = halving_tree_sum(wide * wide) / rows.shape[-1]
    normed = wide * torch.rsqrt(mean + eps).unsqueeze(-1)
    if norm_cast == "before":
        normed = normed.to(rows.dtype).to(internal)
    return (normed * weight.to(internal)).to(rows.dtype)
