"""RMSNorm of one row a program, with the residual sum."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.triton_halving_tree import grouped_tree_sum
from pagedctl_kernels.ops.triton_root_mean_square import normalised, reciprocal_root


@triton.jit
def rms_norm_row(
    x,
    residual,
    weight,
    y,
    stream,
    eps,
    x_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CAST_BEFORE: tl.constexpr,
):
    """x and residual D[T, WIDTH], weight D[WIDTH] -> y and stream D[T, WIDTH], contiguous.

    Without a residual, ``residual`` and ``stream`` are not touched. BLOCK is the power of two
    that holds WIDTH.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    h = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    w = tl.load(weight + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        r = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        h = (h.to(tl.float32) + r.to(tl.float32)).to(h.dtype)
        tl.store(stream + row * WIDTH + columns, h, mask=inside)
    wide = h.to(tl.float32)
    sums = grouped_tree_sum(tl.reshape(wide * wide, (1, BLOCK)), 1, BLOCK)
    rstd = reciprocal_root(tl.sum(sums, axis=0), eps, WIDTH)
    tl.store(y + row * WIDTH + columns, normalised(h, rstd, w, CAST_BEFORE), mask=inside)
