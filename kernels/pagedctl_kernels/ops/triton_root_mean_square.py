"""The normalisation formula that the RMSNorm and QK-norm kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal_root(sums, eps, WIDTH: tl.constexpr):
    """fl(1 / fl(sqrt(fl(fl(sums / WIDTH) + eps)))) of float32 sums of squares."""
    mean = tl.div_rn(sums, WIDTH * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def normalised(values, rstd, weight, CAST_BEFORE: tl.constexpr):
    """values D times rstd float32 times weight D, rounded to D.

    CAST_BEFORE rounds the normalised value to D before the weight is applied.
    """
    normed = values.to(tl.float32) * rstd
    if CAST_BEFORE:
        normed = normed.to(values.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(values.dtype)
