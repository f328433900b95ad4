"""Operands that expose a product whose bits follow its surroundings."""

from __future__ import annotations

import torch

from pagedctl_kernels.ops.row_blocks import CACHE_LINE_BYTES

KINDS = 5
"""Kinds of numbers in a payload (``payload``); those of kind 0 are Gaussian."""

_DRAWN_COLUMNS = 1024


def payload(
    rows: int, columns: int, k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] and a weight [columns, k], the five kinds of numbers in turn down each.

    Every kind of row meets every kind of column: Gaussian, cancelling (pairs that almost
    annihilate), wide-exponent (2^-30 to 2^30), subnormal, and zeros (all +0, all -0, mixed).
    A wide weight repeats the columns it drew.
    """
    generator = torch.Generator().manual_seed(1)
    x = _numbers(rows, k, dtype, generator)
    weight = _numbers(min(columns, _DRAWN_COLUMNS), k, dtype, generator)
    x[3::KINDS] *= torch.finfo(dtype).tiny
    x[1::KINDS, 1 : k - k % 2 : 2] *= -(1 + 1e-6)
    return x, weight.repeat(-(-columns // weight.shape[0]), 1)[:columns]


def _numbers(rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randn(rows, k, generator=generator, dtype=dtype)
    even = k - k % 2
    numbers[1::KINDS, 1:even:2] = numbers[1::KINDS, 0:even:2]
    exponents = torch.randint(-30, 31, numbers[2::KINDS].shape, generator=generator)
    numbers[2::KINDS] *= torch.exp2(exponents.to(dtype))
    numbers[3::KINDS] *= 2.0**-4
    numbers[4::KINDS] *= 0.0
    numbers[4:5], numbers[9:10] = 0.0, -0.0
    return numbers


def other_contents(rows: torch.Tensor) -> torch.Tensor:
    """Other contents of the same shape: large values, and what is not a number at all."""
    others = rows.flip(-1) * 1024
    others[..., 0, :] = torch.nan
    others[..., -1, :] = torch.inf
    return others


def address_offsets(matrix: torch.Tensor) -> tuple[int, ...]:
    """Bytes past a cache line at which operands are tried: one element, and half a line."""
    return matrix.itemsize, CACHE_LINE_BYTES // 2


def moved_by(matrix: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values *offset* bytes past an allocation's start."""
    before = offset // matrix.itemsize
    storage = matrix.new_empty(matrix.numel() + before)
    storage[before:] = matrix.reshape(-1)
    return storage[before:].view(matrix.shape)
