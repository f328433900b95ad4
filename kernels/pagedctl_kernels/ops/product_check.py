"""Construction checks: does this machine's BLAS keep a row's bits, whatever surrounds it?

A BLAS states no summation order, so a leaf that promises one checks it for its own shape,
dtype and thread count before it serves, on payloads that expose a changed order. Each check
returns the reason for refusal, or None, and is remembered for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from pagedctl_kernels.house import CPU_ROW_BLOCK, TILE_KEYS
from pagedctl_kernels.ops.row_blocks import (
    COLUMN_STEPS,
    row_block_product,
    row_product,
    split_rows,
)
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES

SHORT_BLOCKS = (4, 8)
_DRAWN_COLUMNS = 1024


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``reason`` is None if the 16-row block keeps its bits; ``short_blocks`` (heights of
    shorter blocks) were seen to give the same ones."""

    reason: str | None
    short_blocks: tuple[int, ...]


@cache
def check_linear(k: int, columns: int, dtype: str, threads: int, height: int) -> Verdict:
    """Check products of *height* rows (16 or 1) with a [columns, k] weight, columns padded."""
    product = row_product if height == 1 else row_block_product
    x, weight = _payload(2 * CPU_ROW_BLOCK, columns, k, TORCH_DTYPES[dtype])
    expected = torch.cat([product(rows, weight) for rows in split_rows(x, height)])
    check = _LinearCheck(product, x, weight, expected)
    failure = next(check.failures(COLUMN_STEPS[dtype], threads), None)
    if failure is not None:
        reason = (
            f"[{height}, {k}] x [{k}, {columns}] {dtype} products at {threads} threads "
            f"change a row's bits with {failure}"
        )
        return Verdict(reason=reason, short_blocks=())
    candidates = SHORT_BLOCKS if height > 1 else ()
    short = tuple(rows for rows in candidates if check.short_block_agrees(rows, threads))
    return Verdict(reason=None, short_blocks=short)


@cache
def check_tile_products(head_dim: int, dtype: str, threads: int) -> Verdict:
    """Check the two products of attention: [16, head_dim] x [head_dim, 64] and its return."""
    rows, keys = _payload(8 * CPU_ROW_BLOCK, 8 * TILE_KEYS, head_dim, TORCH_DTYPES[dtype])
    scores, _ = _payload(8 * CPU_ROW_BLOCK, 1, TILE_KEYS, TORCH_DTYPES[dtype])
    tiles = keys.view(8, TILE_KEYS, head_dim)
    short: tuple[int, ...] = SHORT_BLOCKS
    for name, left, right in (
        ("query-key", rows.view(8, CPU_ROW_BLOCK, head_dim), tiles.transpose(1, 2)),
        ("probability-value", scores.abs().view(8, CPU_ROW_BLOCK, TILE_KEYS), tiles),
    ):
        singles = zip(torch.split(left, 1), torch.split(right, 1), strict=True)
        expected = torch.cat([torch.bmm(*single) for single in singles])
        failure = next(_tile_failures(left, right, expected, threads), None)
        if failure is not None:
            reason = (
                f"{name} products of head_dim {head_dim} in {dtype} at {threads} threads "
                f"change a row's bits with {failure}"
            )
            return Verdict(reason=reason, short_blocks=())
        short = tuple(h for h in short if _short_tile_agrees(left, right, expected, h, threads))
    return Verdict(reason=None, short_blocks=short)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit: signs of zero count, and a NaN equals itself."""
    as_int = torch.int64 if left.dtype == torch.float64 else torch.int32
    return torch.equal(left.contiguous().view(as_int), right.contiguous().view(as_int))


@dataclass(frozen=True)
class _LinearCheck:
    """One payload: rows x, a weight, and each block's product taken alone (*expected*)."""

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    x: torch.Tensor
    weight: torch.Tensor
    expected: torch.Tensor

    def failures(self, column_step: int, threads: int) -> Iterator[str]:
        """Name every condition under which a row's bits come out otherwise."""
        x, weight, expected = self.x, self.weight, self.expected
        if not same_bits(self.product(x, weight), expected):
            yield "batching"
        order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(3))
        if not same_bits(self.product(x[order], weight), expected[order]):
            yield "row permutation"
        kept, strangers = x.clone(), torch.arange(x.shape[0]) % 3 != 1
        kept[strangers] = _strangers(x[strangers])
        if not same_bits(self.product(kept, weight)[~strangers], expected[~strangers]):
            yield "other rows' contents"
        for start, end in _column_ranges(weight.shape[0], column_step):
            shard = weight[start:end].clone()
            if not same_bits(self.product(x, shard), expected[:, start:end]):
                yield f"columns {start}..{end} taken apart"
        if not same_bits(self.product(_misaligned(x), _misaligned(weight)), expected):
            yield "memory alignment"
        with _threads(1 if threads > 1 else 2):
            if not same_bits(self.product(x, weight), expected):
                yield "thread count"

    def short_block_agrees(self, height: int, threads: int) -> bool:
        """Blocks of *height* rows give the full block's bits, at one thread and at *threads*."""
        rows, expected = self.x[:CPU_ROW_BLOCK], self.expected[:CPU_ROW_BLOCK]
        for count in sorted({1, threads}):
            with _threads(count):
                blocks = [
                    row_block_product(block, self.weight, (height,))
                    for block in split_rows(rows, height)
                ]
            if not same_bits(torch.cat(blocks), expected):
                return False
        return True


def _tile_failures(
    left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor, threads: int
) -> Iterator[str]:
    """Conditions under which a batched product of tiles differs from one tile at a time."""
    if not same_bits(torch.bmm(left, right), expected):
        yield "batching"
    order = torch.randperm(left.shape[1], generator=torch.Generator().manual_seed(5))
    if not same_bits(torch.bmm(left[:, order], right), expected[:, order]):
        yield "row permutation"
    kept, strangers = left.clone(), torch.arange(left.shape[1]) % 3 != 1
    kept[:, strangers] = _strangers(left[:, strangers])
    if not same_bits(torch.bmm(kept, right)[:, ~strangers], expected[:, ~strangers]):
        yield "other rows' contents"
    with _threads(1 if threads > 1 else 2):
        if not same_bits(torch.bmm(left, right), expected):
            yield "thread count"


def _short_tile_agrees(
    left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor, height: int, threads: int
) -> bool:
    """Tiles of *height* rows give the full tile's bits, at one thread and at *threads*."""
    for count in sorted({1, threads}):
        with _threads(count):
            short = [torch.bmm(rows, right) for rows in torch.split(left, height, dim=1)]
        if not same_bits(torch.cat(short, dim=1), expected):
            return False
    return True


def _column_ranges(columns: int, step: int) -> list[tuple[int, int]]:
    """Shards in multiples of *step*: the first, a middle one, an uneven half, the last."""
    steps = columns // step
    cuts = [0, 1, steps // 3 + 1, steps - 1, steps]
    edges = sorted({min(max(cut, 0), steps) * step for cut in cuts})
    return [] if steps < 2 else list(pairwise(edges))


def _payload(
    rows: int, columns: int, k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] and a weight [columns, k], the four kinds of numbers in turn down each.

    Every kind of row meets every kind of column: Gaussian, cancelling (pairs that almost
    annihilate), wide-exponent (2^-30 to 2^30) and subnormal. A wide weight repeats the
    columns it drew.
    """
    generator = torch.Generator().manual_seed(1)
    x = _numbers(rows, k, dtype, generator)
    weight = _numbers(min(columns, _DRAWN_COLUMNS), k, dtype, generator)
    x[3::4] *= torch.finfo(dtype).tiny
    x[1::4, 1 : k - k % 2 : 2] *= -(1 + 1e-6)
    return x, weight.repeat(-(-columns // weight.shape[0]), 1)[:columns]


def _numbers(rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randn(rows, k, generator=generator, dtype=dtype)
    even = k - k % 2
    numbers[1::4, 1:even:2] = numbers[1::4, 0:even:2]
    exponents = torch.randint(-30, 31, numbers[2::4].shape, generator=generator)
    numbers[2::4] *= torch.exp2(exponents.to(dtype))
    numbers[3::4] *= 2.0**-4
    return numbers


def _strangers(rows: torch.Tensor) -> torch.Tensor:
    """Other contents of the same shape: large values, and what is not a number at all."""
    others = rows.flip(-1) * 1024
    others[..., 0, :] = torch.nan
    others[..., -1, :] = torch.inf
    return others


def _misaligned(matrix: torch.Tensor) -> torch.Tensor:
    """The same values one element past an allocation's start."""
    storage = matrix.new_empty(matrix.numel() + 1)
    storage[1:] = matrix.reshape(-1)
    return storage[1:].view(matrix.shape)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run a block at *count* intra-op threads and restore the count."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
