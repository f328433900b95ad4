"""Host data of one attention step: which query rows meet which keys, in which order.

A *unit* is up to 16 query rows of one sequence and one kv head: pairs of (token, query head of
the kv head's group), tokens outermost. An *item* is one unit and one split of 256 keys. Units
are cut into *chunks* that bound memory; a chunk's items are computed in *parts* that need the
same tiles of their splits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedctl_kernels.house import CPU_ROW_BLOCK, SPLIT_TOKENS, TILE_KEYS
from pagedctl_kernels.ops.attention.masks import Mask, build_mask
from pagedctl_kernels.ops.interfaces import AttentionMetadata

if TYPE_CHECKING:
    from pagedctl_kernels.ops.interfaces import HostInts

Ints = np.ndarray[Any, np.dtype[np.int64]]

TILES_PER_SPLIT = SPLIT_TOKENS // TILE_KEYS


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Static facts of the call site."""

    q_heads: int
    kv_heads: int
    block_size: int
    window: int | None

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.q_heads // self.kv_heads

    @property
    def run(self) -> int:
        """Keys that lie together in a block and in a tile: what is gathered as one row."""
        return math.gcd(self.block_size, TILE_KEYS)

    @property
    def runs_per_block(self) -> int:
        """Runs of one physical block, all kv heads."""
        return self.kv_heads * self.block_size // self.run


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A step's metadata as int64 arrays; lengths are per sequence."""

    query_start: Ints
    query_lens: Ints
    seq_lens: Ints
    block_tables: Ints


@dataclass(frozen=True, kw_only=True)
class Units:
    """U units. ``query_rows`` [U, 16]: 1 + row of q viewed [T * Hq, Dh], 0 = padding.
    ``positions`` [U, 16]: absolute positions; padding repeats the last row's. ``height`` [U]:
    rows of the products, those in use rounded up to a proved block. ``first_tile`` and
    ``end_tile`` [U]: the half-open range of tiles that any of the rows sees."""

    sequence: Ints
    kv_head: Ints
    query_rows: Ints
    positions: Ints
    height: Ints
    first_tile: Ints
    end_tile: Ints

    @property
    def first_split(self) -> Ints:
        return self.first_tile // TILES_PER_SPLIT

    @property
    def splits(self) -> Ints:
        return (self.end_tile - 1) // TILES_PER_SPLIT + 1 - self.first_split

    def take(self, index: Ints | slice) -> Units:
        return Units(
            sequence=self.sequence[index],
            kv_head=self.kv_head[index],
            query_rows=self.query_rows[index],
            positions=self.positions[index],
            height=self.height[index],
            first_tile=self.first_tile[index],
            end_tile=self.end_tile[index],
        )


@dataclass(frozen=True, kw_only=True)
class CacheRuns:
    """``runs`` int64: rows of kv head 0 in the cache viewed [runs, run * Dh], sequence after
    sequence; ``places`` [S]: where each sequence's begin."""

    runs: Ints
    places: Ints


@dataclass(frozen=True, kw_only=True)
class Part:
    """I items of one chunk that need the same number of tiles of their splits.

    ``items`` int64[I]: place among the chunk's items, ascending. ``query_rows`` int64[I, height]
    are the units'. ``runs`` int64: rows of the cache viewed [runs, run * Dh], item after item,
    that hold the tiles' keys. ``mask`` is None if every row sees every key.
    """

    tiles: int
    items: torch.Tensor
    query_rows: torch.Tensor
    runs: torch.Tensor
    mask: Mask | None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Units of one height whose items are held together, and how their states are merged."""

    height: int
    query_rows: torch.Tensor
    """int64[U * height]: where the units' output rows go."""
    first_item: torch.Tensor
    """int64[U]: a unit's items lie at first_item, first_item + 1, ... in split order."""
    units_with: tuple[int, ...]
    """Entry s: how many of the units (the first ones) have more than s splits."""
    num_items: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """One step's work: built once, used by every layer.

    ``block_range``: lowest and highest block read.
    """

    num_tokens: int
    block_range: tuple[int, int]
    chunks: tuple[Chunk, ...]


def read_batch(metadata: AttentionMetadata, geometry: Geometry) -> Batch:
    """Check the metadata and widen it; raises ValueError with the sequence that is wrong."""
    query_start = _host_ints(metadata.query_start_loc)
    seq_lens = _host_ints(metadata.seq_lens)
    block_tables = _host_ints(metadata.block_tables)
    count = len(seq_lens)
    if query_start.shape != (count + 1,) or block_tables.ndim != 2 or len(block_tables) != count:
        raise ValueError(
            f"attention: {count} seq_lens need query_start_loc [{count + 1}] and block_tables "
            f"[{count}, max_blocks], got {list(query_start.shape)} and {list(block_tables.shape)}"
        )
    query_lens = np.diff(query_start)
    blocks = -(-seq_lens // geometry.block_size)
    for rule, broken in (
        ("query_start_loc begins below 0", query_start[:-1] < 0),
        ("query_start_loc must not descend", query_lens < 0),
        ("the query is longer than the sequence", query_lens > seq_lens),
        ("the block table is shorter than the sequence", blocks > block_tables.shape[1]),
    ):
        if broken.any():
            raise ValueError(f"attention: sequence {int(broken.argmax())}: {rule}")
    return Batch(
        query_start=query_start,
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_tables=block_tables,
    )


def build_units(batch: Batch, geometry: Geometry, short_blocks: tuple[int, ...]) -> Units:
    """Cut every sequence's query rows into units, sorted by height, most splits first."""
    pairs = batch.query_lens * geometry.group
    blocks = -(-pairs // CPU_ROW_BLOCK)
    per_sequence = blocks * geometry.kv_heads
    sequence = np.repeat(np.arange(len(pairs)), per_sequence)
    place = np.arange(len(sequence)) - np.repeat(_starts(per_sequence), per_sequence)
    kv_head, block = np.divmod(place, blocks[sequence])
    pair = block[:, None] * CPU_ROW_BLOCK + np.arange(CPU_ROW_BLOCK)
    last_pair = pairs[sequence][:, None] - 1
    token, head = np.divmod(np.minimum(pair, last_pair), geometry.group)
    q_row = (batch.query_start[sequence][:, None] + token) * geometry.q_heads
    q_row = q_row + kv_head[:, None] * geometry.group + head
    computed = (batch.seq_lens - batch.query_lens)[sequence]
    positions = computed[:, None] + token
    first_tile, end_tile = tile_range(positions, geometry.window)
    units = Units(
        sequence=sequence,
        kv_head=kv_head,
        query_rows=np.where(pair <= last_pair, q_row + 1, 0),
        positions=positions,
        height=_heights((pair <= last_pair).sum(axis=1), short_blocks),
        first_tile=first_tile,
        end_tile=end_tile,
    )
    return units.take(np.lexsort((-units.splits, units.height)))


def _heights(rows: Ints, short_blocks: tuple[int, ...]) -> Ints:
    """The smallest block that holds each number of rows."""
    blocks = np.array(sorted({*short_blocks, CPU_ROW_BLOCK}), dtype=np.int64)
    heights: Ints = blocks[np.searchsorted(blocks, rows)]
    return heights


def tile_range(positions: Ints, window: int | None) -> tuple[Ints, Ints]:
    """Half-open range of 64-key tiles that a unit with these row positions [U, 16] can see."""
    first_key = np.zeros(len(positions), dtype=np.int64)
    if window is not None:
        first_key = np.maximum(positions.min(axis=1) - window + 1, 0)
    return first_key // TILE_KEYS, positions.max(axis=1) // TILE_KEYS + 1


def build_work(
    batch: Batch, geometry: Geometry, max_items: int, short_blocks: tuple[int, ...]
) -> AttentionWork:
    """Cut the step into chunks of at most *max_items* items (one unit may exceed it).

    *short_blocks*: heights below 16 whose products were proved to have the full block's bits.
    """
    units = build_units(batch, geometry, short_blocks)
    nothing = np.zeros(0, dtype=np.int64)
    runs = [
        _head_zero_runs(table, int(length), int(length - queries), geometry) if queries else nothing
        for table, length, queries in zip(
            batch.block_tables, batch.seq_lens, batch.query_lens, strict=True
        )
    ]
    cache = CacheRuns(
        runs=np.concatenate([*runs, nothing]),
        places=_starts(np.array([len(of_sequence) for of_sequence in runs], dtype=np.int64)),
    )
    return AttentionWork(
        num_tokens=int(batch.query_start[-1]),
        block_range=_block_range(cache.runs, geometry),
        chunks=tuple(
            _build_chunk(units.take(slice(start, end)), geometry, cache, max_items)
            for start, end in _chunk_ranges(units, max_items)
        ),
    )


def _head_zero_runs(table: Ints, length: int, computed: int, geometry: Geometry) -> Ints:
    """The cache run of kv head 0 for every run of keys of one sequence, whole splits of them.

    Runs that no query sees repeat the nearest visible one, so no table entry is read that may
    be stale. A run's own unwritten slots are read and masked.
    """
    lowest = 0 if geometry.window is None else max(computed - geometry.window + 1, 0)
    keys = np.arange(0, -(-length // SPLIT_TOKENS) * SPLIT_TOKENS, geometry.run)
    block, offset = np.divmod(np.clip(keys, lowest, length - 1), geometry.block_size)
    runs: Ints = table[block] * geometry.runs_per_block + offset // geometry.run
    return runs


def _build_chunk(units: Units, geometry: Geometry, cache: CacheRuns, max_items: int) -> Chunk:
    splits = units.splits
    first_item = _starts(splits)
    unit = np.repeat(np.arange(len(splits)), splits)
    split = np.arange(len(unit)) - first_item[unit] + units.first_split[unit]
    low = np.maximum(units.first_tile[unit] - split * TILES_PER_SPLIT, 0)
    high = np.minimum(units.end_tile[unit] - split * TILES_PER_SPLIT, TILES_PER_SPLIT)
    tiles = high - low
    first_key = (split * TILES_PER_SPLIT + low) * TILE_KEYS
    kinds = tiles * 2
    if len(unit) > len(splits):  # short sequences: fewer parts cost less than masks save
        kinds += _all_visible(units.take(unit), first_key, tiles * TILE_KEYS, geometry.window)
    parts = []
    for kind in np.unique(kinds).tolist():
        members = np.flatnonzero(kinds == kind)
        for begin in range(0, len(members), max_items):
            items = members[begin : begin + max_items]
            of_items = units.take(unit[items])
            parts.append(
                _build_part(items, of_items, first_key[items], divmod(kind, 2), geometry, cache)
            )
    height = int(units.height[0])
    return Chunk(
        height=height,
        query_rows=torch.from_numpy(units.query_rows[:, :height].reshape(-1)),
        first_item=torch.from_numpy(first_item),
        units_with=tuple(int((splits > s).sum()) for s in range(int(splits[0]))),
        num_items=len(unit),
        parts=tuple(parts),
    )


def _build_part(
    items: Ints,
    units: Units,
    first_key: Ints,
    kind: tuple[int, int],
    geometry: Geometry,
    cache: CacheRuns,
) -> Part:
    """The tensors of *items*, whose units and first keys are given item by item.

    *kind* is the number of tiles, and 1 if every row is known to see every key.
    """
    height, tiles = int(units.height[0]), kind[0]
    place = cache.places[units.sequence] + first_key // geometry.run
    steps = np.arange(tiles * TILE_KEYS // geometry.run)
    of_head = units.kv_head * (geometry.runs_per_block // geometry.kv_heads)
    runs = cache.runs[place[:, None] + steps] + of_head[:, None]
    positions = torch.from_numpy(units.positions[:, :height])
    return Part(
        tiles=tiles,
        items=torch.from_numpy(items),
        query_rows=torch.from_numpy(units.query_rows[:, :height]),
        runs=torch.from_numpy(runs.reshape(-1)),
        mask=None
        if kind[1]
        else build_mask(positions, torch.from_numpy(first_key), tiles, geometry.window),
    )


def _all_visible(units: Units, first_key: Ints, keys: Ints, window: int | None) -> Ints:
    """1 where each of a unit's rows sees all of [first_key, first_key + keys)."""
    seen = first_key + keys - 1 <= units.positions.min(axis=1)
    if window is not None:
        seen &= first_key > units.positions.max(axis=1) - window
    counted: Ints = seen.astype(np.int64)
    return counted


def _block_range(cache_runs: Ints, geometry: Geometry) -> tuple[int, int]:
    """Lowest and highest physical block that the work reads; (0, -1) if none."""
    if not len(cache_runs):
        return 0, -1
    lowest, highest = int(cache_runs.min()), int(cache_runs.max())
    return lowest // geometry.runs_per_block, highest // geometry.runs_per_block


def _chunk_ranges(units: Units, max_items: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of units of one height, of at most *max_items* items or one unit."""
    start, held = 0, 0
    heights = units.height.tolist()
    for unit, count in enumerate(units.splits.tolist()):
        if held and (held + count > max_items or heights[unit] != heights[start]):
            yield start, unit
            start, held = unit, 0
        held += count
    if held:
        yield start, len(heights)


def _starts(counts: Ints) -> Ints:
    """Exclusive prefix sums."""
    starts: Ints = np.cumsum(counts) - counts
    return starts


def _host_ints(values: HostInts) -> Ints:
    array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.dtype.kind != "i":
        raise ValueError(f"attention: metadata must be integers, got {array.dtype}")
    return array.astype(np.int64)
