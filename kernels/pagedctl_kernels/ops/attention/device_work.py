"""One attention step as arrays on the device: what each program reads, and where states go.

Built on the host, written to one pinned buffer and copied once. The kernels read how many items
are live from the arrays, so a recorded CUDA graph serves any step that fits its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from pagedctl_kernels.ops.attention.device_groups import Tables
from pagedctl_kernels.ops.attention.device_tiles import (
    GROUP_ROWS,
    TILE_ROWS,
    Policy,
    WorkList,
    build_list,
)
from pagedctl_kernels.ops.attention.units import Batch, Geometry, Ints, read_batch
from pagedctl_kernels.ops.interfaces import AttentionMetadata

ALIGNED_INTS = 32
"""Each array begins at a multiple of 128 bytes."""


@dataclass(frozen=True, kw_only=True)
class TileClass:
    """Items of one tile height. ``items`` int32[I, 8]: first place, number of places, row of the
    block tables, first split, end split, flags (KEEPS, RESUMES), last and first position of its
    tokens. Classes stand in ascending order and are launched in descending order: items of the
    lowest class alone resume, what an item of a taller class kept."""

    rows: int
    items: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the memory of a reserved work list holds.

    ``max_query_len`` is the longest query of one sequence: 1 for decode alone. ``max_blocks``
    are those of one sequence, ``num_blocks`` those of the caches. ``max_slots``: states kept in
    one step, q_heads * (head_dim + 2) * 4 bytes each; 0 turns groups and cuts off.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_query_len: int
    max_blocks: int
    num_blocks: int
    max_slots: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Lengths of the arrays in a work list's buffer. ``items``: per class of ``class_rows``."""

    class_rows: tuple[int, ...]
    items: tuple[int, ...]
    places: int
    tokens: int
    seqs: int
    max_blocks: int
    merges: int
    slots: int

    def arrays(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Name, first int and shape of each array; what is longest in reserve comes last."""
        start = 0
        for name, shape in (
            ("item_counts", (len(self.items),)),
            ("merge_count", (1,)),
            *((f"items_{index}", (count, 8)) for index, count in enumerate(self.items)),
            ("merges", (self.merges, 4)),
            ("tokens", (self.places,)),
            ("slots", (self.places,)),
            ("positions", (self.tokens,)),
            ("block_tables", (self.seqs, self.max_blocks)),
        ):
            yield name, start, shape
            start += -(-math.prod(shape) // ALIGNED_INTS) * ALIGNED_INTS


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """One step's work; int32 unless stated, on one device.

    ``item_counts`` [C] and ``merge_count`` [1]: how many entries are live. A *place* is one token
    of one item: ``tokens`` [N], its row of q, and ``slots`` [N], where this token's state is if the
    item keeps or resumes states. ``positions`` [T]: absolute, of the queries. ``block_tables``
    [S, B], 0 where no token looks, undefined past the longest sequence. ``merges`` [M, 4]: token,
    first slot, number of slots, 0: states that are folded in order into the token's output row;
    without a slot, a zero row.

    ``state_m``, ``state_l`` float32[slots, Hq] and ``state_a`` float32[slots, Hq, Dh].
    ``num_tokens`` queries, of ``rows`` rows of q that are written; ``block_range``: lowest and
    highest block read. ``capacity`` is None if the arrays are exactly as long as needed. All but
    the states lie in ``buffer``, as ``layout`` says.
    """

    classes: tuple[TileClass, ...]
    item_counts: torch.Tensor
    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    merges: torch.Tensor
    merge_count: torch.Tensor
    state_m: torch.Tensor
    state_l: torch.Tensor
    state_a: torch.Tensor
    buffer: torch.Tensor
    layout: Layout
    num_tokens: int
    rows: int
    block_range: tuple[int, int]
    capacity: Capacity | None = None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step on the host: its batch, the block tables that are read, and its list."""

    batch: Batch
    tables: Tables
    built: WorkList
    rows: int

    @property
    def num_tokens(self) -> int:
        return int(self.batch.query_start[-1])

    def positions(self) -> Ints:
        """int64[T]; rows before the first query have none."""
        batch = self.batch
        values: Ints = np.arange(self.num_tokens)
        values[batch.query_start[0] :] += np.repeat(
            batch.seq_lens - batch.query_start[1:], batch.query_lens
        )
        return values

    def merges(self) -> Ints:
        """The list's, and an entry without states for each of the rows that no query has."""
        start = int(self.batch.query_start[0])
        empty = np.zeros((start + self.rows - self.num_tokens, 4), dtype=np.int64)
        if not len(empty):
            return self.built.merges
        empty[:, 0] = [*range(start), *range(self.num_tokens, self.rows)]
        return np.concatenate([self.built.merges, empty])


class WorkBuilder:
    """Builds the work lists of one call site."""

    def __init__(
        self, geometry: Geometry, head_dim: int, policy: Policy, device: torch.device
    ) -> None:
        self.geometry = geometry
        self.head_dim = head_dim
        self.policy = policy
        self.device = device

    def prepare(self, metadata: AttentionMetadata) -> DeviceWork:
        """A list in memory of its own; raises ValueError if the metadata is inconsistent."""
        batch = read_batch(metadata, self.geometry)
        tables = used_tables(batch, self.geometry)
        built = build_list(batch, tables, self.geometry, self.policy, None)
        step = _Step(batch=batch, tables=tables, built=built, rows=int(batch.query_start[-1]))
        live = [index for index, items in enumerate(built.items) if len(items)]
        layout = Layout(
            class_rows=tuple(TILE_ROWS[index] for index in live),
            items=tuple(len(built.items[index]) for index in live),
            places=len(built.tokens),
            tokens=step.num_tokens,
            seqs=len(tables),
            max_blocks=tables.shape[1],
            merges=len(step.merges()),
            slots=built.num_slots,
        )
        return self._write(self._allocate(layout, None), step)

    def reserve(self, capacity: Capacity) -> DeviceWork:
        """Memory for any step within *capacity*; it holds no step yet."""
        return self._allocate(self._reserved(capacity), capacity)

    def refill(self, work: DeviceWork, metadata: AttentionMetadata, rows: int) -> DeviceWork:
        """Another step in the memory of a reserved list, of which *rows* rows of q are written.

        Ordered with the current stream's work, so that kernels launched before read the old list.
        Raises ValueError if the metadata is inconsistent or does not fit.
        """
        capacity = work.capacity
        if capacity is None:
            raise ValueError("attention: only a reserved work list can be refilled")
        batch = read_batch(metadata, self.geometry)
        tables = used_tables(batch, self.geometry)
        for what, needed, limit in (
            ("sequences", len(tables), capacity.max_num_seqs),
            ("query tokens", int(batch.query_start[-1]), rows),
            ("rows", rows, capacity.max_num_batched_tokens),
            ("tokens in a query", int(batch.query_lens.max(initial=0)), capacity.max_query_len),
            ("blocks in a sequence", tables.shape[1], capacity.max_blocks),
            ("blocks in the caches", int(tables.max(initial=-1)) + 1, capacity.num_blocks),
        ):
            if needed > limit:
                raise ValueError(f"attention: {needed} {what}, the work list is for {limit}")
        built = build_list(batch, tables, self.geometry, self.policy, capacity.max_slots)
        step = _Step(batch=batch, tables=tables, built=built, rows=rows)
        for height, items in zip(TILE_ROWS, built.items, strict=True):
            if len(items) and height not in work.layout.class_rows:
                raise ValueError(f"attention: the work list has no tiles of {height} rows")
        return self._write(work, step)

    def _reserved(self, capacity: Capacity) -> Layout:
        """No step within *capacity* needs more: a token has one place that writes its row, and
        each other place has a slot; an item has more places than the class below has room for, or,
        in the class above that of one token, two at least. Groups of two take that class however
        many rows they need: their tails, of one token each, resume what it kept."""
        group = self.geometry.group
        tallest = self.policy.tallest // group
        most = max(min(capacity.max_query_len, tallest), GROUP_ROWS // group)
        places = capacity.max_num_batched_tokens + capacity.max_slots
        rows: list[int] = []
        items: list[int] = []
        below = 0
        for height in TILE_ROWS:
            resumed = len(rows) == 1 and GROUP_ROWS // group >= 2 and capacity.max_slots > 0
            if below < min(height // group, most) or resumed:
                items.append(places // (min(below + 1, 2) if len(rows) < 2 else below + 1))
                rows.append(height)
            below = height // group
        return Layout(
            class_rows=tuple(rows),
            items=tuple(items),
            places=places,
            tokens=capacity.max_num_batched_tokens,
            seqs=capacity.max_num_seqs,
            max_blocks=capacity.max_blocks,
            merges=capacity.max_num_batched_tokens,
            slots=capacity.max_slots,
        )

    def _allocate(self, layout: Layout, capacity: Capacity | None) -> DeviceWork:
        arrays = list(layout.arrays())
        _, start, shape = arrays[-1]
        buffer = torch.empty(start + math.prod(shape), dtype=torch.int32, device=self.device)
        views = {
            name: buffer.as_strided(size, (*size[1:], 1), begin) for name, begin, size in arrays
        }
        states = layout.slots * self.geometry.q_heads
        memory = torch.empty((self.head_dim + 2, states), dtype=torch.float32, device=self.device)
        of_slots = (layout.slots, self.geometry.q_heads)
        return DeviceWork(
            classes=tuple(
                TileClass(rows=rows, items=views.pop(f"items_{index}"))
                for index, rows in enumerate(layout.class_rows)
            ),
            **views,
            state_m=memory[-2].view(of_slots),
            state_l=memory[-1].view(of_slots),
            state_a=memory[:-2].view(*of_slots, self.head_dim),
            buffer=buffer,
            layout=layout,
            num_tokens=0,
            rows=0,
            block_range=(0, -1),
            capacity=capacity,
        )

    def _write(self, work: DeviceWork, step: _Step) -> DeviceWork:
        """Fill a pinned buffer and copy it, up to the last block table in use, to the device."""
        built = step.built
        items = [built.items[TILE_ROWS.index(rows)] for rows in work.layout.class_rows]
        merges = step.merges()
        values = {
            "item_counts": np.array([len(of_class) for of_class in items]),
            "merge_count": np.array([len(merges)]),
            **{f"items_{index}": of_class for index, of_class in enumerate(items)},
            "merges": merges,
            "tokens": built.tokens,
            "slots": built.slots,
            "positions": step.positions(),
            "block_tables": step.tables,
        }
        staging = torch.empty(
            work.buffer.shape, dtype=torch.int32, pin_memory=self.device.type == "cuda"
        )
        host = staging.numpy()
        used = 0
        for name, start, shape in work.layout.arrays():
            value = values[name]
            used = start + len(value) * math.prod(shape[1:])
            if value.ndim == 1:
                host[start:used] = value
            else:
                host[start:used].reshape(len(value), shape[1])[:, : value.shape[1]] = value
        work.buffer[:used].copy_(staging[:used], non_blocking=True)
        return replace(
            work,
            num_tokens=step.num_tokens,
            rows=step.rows,
            block_range=(int(step.tables.min(initial=0)), int(step.tables.max(initial=-1))),
        )


def used_tables(batch: Batch, geometry: Geometry) -> Tables:
    """[S, B], the block tables up to the longest sequence: 0 where no query looks.

    What lies there may be stale. Raises ValueError if an entry that is read is no int32 from 0 on.
    """
    end = np.where(batch.query_lens > 0, -(-batch.seq_lens // geometry.block_size), 0)
    block = np.arange(int(end.max(initial=0)), dtype=np.int32)
    used = block < end.astype(np.int32)[:, None]
    if geometry.window is not None:
        first_key = batch.seq_lens - batch.query_lens - geometry.window + 1
        used &= block >= (np.maximum(first_key, 0) // geometry.block_size)[:, None]
    read = batch.block_tables[:, : len(block)] * used
    wrong = (read < 0) | (read > np.iinfo(np.int32).max)
    if wrong.any():
        sequence = int(wrong.any(axis=1).argmax())
        named = read[wrong][0]
        raise ValueError(f"attention: sequence {sequence}: its block table names {named}")
    tables: Tables = read.astype(np.int32)
    return tables
