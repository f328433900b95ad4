"""Construction checks: does this machine's BLAS keep a row's bits, whatever surrounds it?

A BLAS states no summation order, so a leaf that promises one checks it for its own shape,
dtype and thread count before it serves, on payloads that expose a changed order; a product that
is wrong in the same way everywhere is exposed by a float64 one. Each check returns the reason
for refusal, or None, and is remembered for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import MappingProxyType

import torch

from pagedctl_kernels.house import CPU_ROW_BLOCK, TILE_KEYS
from pagedctl_kernels.ops.product_payloads import (
    KINDS,
    address_offsets,
    moved_by,
    other_contents,
    payload,
)
from pagedctl_kernels.ops.row_blocks import (
    COLUMN_STEPS,
    aligned,
    row_block_product,
    row_product,
    split_rows,
)
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES

SHORT_BLOCKS = (4, 8)

_BATCHES: Mapping[int, tuple[int, ...]] = MappingProxyType({CPU_ROW_BLOCK: (133, 48, 1), 1: (37,)})
"""Rows of the batches tried, by height of a product, the largest first.

For blocks: eight and a padded one, three, a padded one. Rows that are taken one by one never
meet, so one batch of them tells as much.
"""

_DISTINCT_ROWS: Mapping[int, int] = MappingProxyType({CPU_ROW_BLOCK: 2 * CPU_ROW_BLOCK, 1: 10})
"""Rows drawn, by height of a product; a batch repeats them."""

TAIL = 5
STRIDE = 7
"""Steps by which a batch takes its rows: it meets each of them, at other places than drawn."""

_DISTINCT_TILES = 8
_TILES_AT_ONCE = 37

NARROWEST = 7
"""Column steps of the narrowest weight drawn: a site of fewer columns is a shard of it."""

COMPARED_COLUMNS = 64
_GAUSSIAN_ERROR = 4
"""Units of roundoff times both norms that an IEEE product of Gaussian rows stays below.

Rounding errors of one chain add up to 0.4 of it at any length (one deviation); inputs
rounded to bfloat16 or TF32 exceed it by far until K is a million.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``reason`` is None if the 16-row block keeps its bits; ``short_blocks`` (heights at
    which a batch may be issued beside it) were seen to give the same ones."""

    reason: str | None
    short_blocks: tuple[int, ...]


@cache
def check_linear(k: int, columns: int, dtype: str, threads: int, height: int) -> Verdict:
    """Check products of *height* rows (16 or 1) with a [columns, k] weight, columns padded."""
    width = max(columns, NARROWEST * COLUMN_STEPS[dtype])
    x, wide = payload(_DISTINCT_ROWS[height], width, k, TORCH_DTYPES[dtype])
    product, prepare = (row_product, aligned) if height == 1 else (row_block_product, _as_it_is)
    whole = prepare(wide)
    expected = torch.cat([product(rows, whole) for rows in split_rows(x, height)])
    check = LinearCheck(product, prepare, x, wide, columns, expected, threads)
    failure = next(check.failures(_BATCHES[height], COLUMN_STEPS[dtype]), None)
    if failure is not None:
        reason = (
            f"[{height}, {k}] x [{k}, {columns}] {dtype} products at {threads} threads {failure}"
        )
        return Verdict(reason=reason, short_blocks=())
    return Verdict(reason=None, short_blocks=check.short_blocks() if height > 1 else ())


@cache
def check_tile_products(head_dim: int, dtype: str, threads: int) -> Verdict:
    """Check the two products of attention: [16, head_dim] x [head_dim, 64] and its return."""
    count, drawn = _DISTINCT_TILES, TORCH_DTYPES[dtype]
    rows, keys = payload(count * CPU_ROW_BLOCK, count * TILE_KEYS, head_dim, drawn)
    scores, _ = payload(count * CPU_ROW_BLOCK, 1, TILE_KEYS, drawn)
    tiles = keys.view(count, TILE_KEYS, head_dim)
    short: tuple[int, ...] = SHORT_BLOCKS
    for name, left, right in (
        ("query-key", rows.view(count, CPU_ROW_BLOCK, head_dim), tiles.transpose(1, 2)),
        ("probability-value", scores.abs().view(count, CPU_ROW_BLOCK, TILE_KEYS), tiles),
    ):
        singles = zip(torch.split(left, 1), torch.split(right, 1), strict=True)
        expected = torch.cat([torch.bmm(*single) for single in singles])
        failure = next(_tile_failures(left, right, expected, threads), None)
        if failure is not None:
            reason = (
                f"{name} products of head_dim {head_dim} in {dtype} at {threads} threads {failure}"
            )
            return Verdict(reason=reason, short_blocks=())
        short = tuple(h for h in short if _short_tile_agrees(left, right, expected, h, threads))
    return Verdict(reason=None, short_blocks=short)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit: signs of zero count, and a NaN equals itself."""
    as_int = {8: torch.int64, 4: torch.int32, 2: torch.int16}[left.itemsize]
    return torch.equal(left.contiguous().view(as_int), right.contiguous().view(as_int))


@dataclass(frozen=True)
class LinearCheck:
    """One payload: rows x, a weight, and each block's product taken alone (*expected*).

    The call site's weight is the first *columns* of *wide*. ``product`` takes a weight that
    ``prepare`` made, as a leaf's does.
    """

    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    prepare: Callable[[torch.Tensor], torch.Tensor]
    x: torch.Tensor
    wide: torch.Tensor
    columns: int
    expected: torch.Tensor
    threads: int

    @property
    def weight(self) -> torch.Tensor:
        return self.wide[: self.columns]

    @property
    def ragged_batch(self) -> torch.Tensor:
        """Places of every row and a few more, which leave the last block padded."""
        return torch.arange(len(self.x) + TAIL) % len(self.x)

    def agrees(self, got: torch.Tensor, places: torch.Tensor, first: int = 0) -> bool:
        """*got* has the bits of rows *places* of x, from column *first* on."""
        return same_bits(got, self.expected[places, first : first + got.shape[1]])

    def failures(self, batches: tuple[int, ...], step: int) -> Iterator[str]:
        """Every condition under which a product fails, as the end of a sentence."""
        for condition in self._row_conditions(batches):
            yield f"change a row's bits with {condition}"
        for condition in self._weight_conditions(step):
            yield f"change a row's bits with {condition}"
        if not self.is_ieee():
            yield "differ from float64 ones by more than IEEE rounding"

    def is_ieee(self) -> bool:
        x, weight = self.x[::KINDS], self.weight[: COMPARED_COLUMNS * KINDS : KINDS]
        got = self.expected[::KINDS, : self.columns][:, : COMPARED_COLUMNS * KINDS : KINDS]
        return _rounds_like_ieee(x, weight, got, _GAUSSIAN_ERROR)

    def _row_conditions(self, batches: tuple[int, ...]) -> Iterator[str]:
        """What surrounds a row: its batch, its place, the other rows, the threads."""
        x, weight = self.x, self.prepare(self.weight)
        for rows in batches:
            places = torch.arange(rows) * STRIDE % len(x)
            if not self.agrees(self.product(x[places], weight), places):
                yield f"batching and permuting ({rows} rows)"
        places = self.ragged_batch
        packed, strangers = x[places], torch.arange(len(places)) % 3 != 1
        with num_threads(1 if self.threads > 1 else 2):
            if not self.agrees(self.product(packed, weight), places):
                yield "thread count"
        packed[strangers] = other_contents(packed[strangers])
        if not self.agrees(self.product(packed, weight)[~strangers], places[~strangers]):
            yield "other rows' contents"

    def _weight_conditions(self, step: int) -> Iterator[str]:
        """Which columns are taken together, and where the operands lie."""
        places = self.ragged_batch
        packed = self.x[places]
        for start, end in _column_ranges(len(self.wide), step):
            shard = self.prepare(self.wide[start:end].clone())
            if not self.agrees(self.product(packed, shard), places, start):
                yield f"columns {start}..{end} taken apart"
        for offset in address_offsets(packed):
            weight = self.prepare(moved_by(self.weight, offset))
            moved = self.product(moved_by(packed, offset), weight)
            if not self.agrees(moved, places):
                yield f"memory alignment ({offset} bytes past a cache line)"

    def short_blocks(self) -> tuple[int, ...]:
        """Heights of shorter blocks that give the full block's bits wherever the weight lies."""
        agreeing: tuple[int, ...] = SHORT_BLOCKS
        for offset in (0, *address_offsets(self.x)):
            weight = moved_by(self.weight, offset) if offset else self.weight
            agreeing = tuple(h for h in agreeing if self._short_block_agrees(h, weight))
        return agreeing

    def _short_block_agrees(self, height: int, weight: torch.Tensor) -> bool:
        """A whole block of *height* rows and a padded one, at one thread and at the leaf's."""
        blocks = (torch.arange(height), torch.arange(CPU_ROW_BLOCK - height + 1, CPU_ROW_BLOCK))
        for count in sorted({1, self.threads}):
            with num_threads(count):
                for places in blocks:
                    if not self.agrees(
                        row_block_product(self.x[places], weight, (height,)), places
                    ):
                        return False
        return True


def _as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _rounds_like_ieee(
    left: torch.Tensor, right: torch.Tensor, got: torch.Tensor, units: int
) -> bool:
    """*got* is left [R, k] times right [C, k] transposed, within *units* of roundoff.

    One unit is half an epsilon times both norms. The comparison uses no library product.
    """
    left, right = left.double(), right.double()
    exact = (left.unsqueeze(1) * right).sum(dim=-1)
    unit = torch.finfo(got.dtype).eps / 2 * torch.outer(left.norm(dim=1), right.norm(dim=1))
    return bool(((got - exact).abs() <= units * unit).all())


def _tile_failures(
    left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor, threads: int
) -> Iterator[str]:
    """Conditions under which a batched product of tiles fails, as the end of a sentence."""
    for condition in _tile_conditions(left, right, expected, threads):
        yield f"change a row's bits with {condition}"
    rows, columns = left[0, ::KINDS], right[0].t()[::KINDS]
    if not _rounds_like_ieee(rows, columns, expected[0, ::KINDS, ::KINDS], left.shape[2]):
        yield "differ from float64 ones by more than IEEE rounding"


def _tile_conditions(
    left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor, threads: int
) -> Iterator[str]:
    """What makes a batched product of tiles differ from one tile at a time."""
    many = torch.arange(_TILES_AT_ONCE) % len(left)
    if not same_bits(torch.bmm(left[many], right[many]), expected[many]):
        yield "batching"
    order = torch.randperm(left.shape[1], generator=torch.Generator().manual_seed(5))
    if not same_bits(torch.bmm(left[:, order], right), expected[:, order]):
        yield "row permutation"
    kept, strangers = left.clone(), torch.arange(left.shape[1]) % 3 != 1
    kept[:, strangers] = other_contents(left[:, strangers])
    if not same_bits(torch.bmm(kept, right)[:, ~strangers], expected[:, ~strangers]):
        yield "other rows' contents"
    with num_threads(1 if threads > 1 else 2):
        if not same_bits(torch.bmm(left, right), expected):
            yield "thread count"


def _short_tile_agrees(
    left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor, height: int, threads: int
) -> bool:
    """Tiles of *height* rows give the full tile's bits, at one thread and at *threads*."""
    for count in sorted({1, threads}):
        with num_threads(count):
            short = [torch.bmm(rows, right) for rows in torch.split(left, height, dim=1)]
        if not same_bits(torch.cat(short, dim=1), expected):
            return False
    return True


def _column_ranges(columns: int, step: int) -> list[tuple[int, int]]:
    """Shards in multiples of *step*: of one, two and three, an uneven half, the last."""
    steps = columns // step
    cuts = {0, 1, 3, 6, max(steps // 3 + 1, 6), steps - 1, steps}
    return list(pairwise(sorted(cut * step for cut in cuts)))


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run a block at *count* intra-op threads and restore the count."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
