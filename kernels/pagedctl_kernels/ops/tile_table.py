"""Tile tables of linear layers: which tile serves which weight shape and row count, as data.

A table is a JSON file by device class (``tile_tables/sm_90.json``). ``scripts/tune_gemm.py``
measures and merges entries and defaults; plain and gated tiles are kept by hand. It is read once,
when a layer is built; a call only finds the bucket of its row count. No entry may change a result:
every tile sums a row in the same order, which the tests prove for each of them. Imports neither
torch nor triton.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

SHARED_BYTES = 227 * 1024
"""Shared memory that one program may use on Hopper."""

OPERAND_BYTES = 2
"""Tiles are of bfloat16 or float16 operands."""

PLAIN_KIND = "pointers"
"""The kind that takes every shape and address; the others need tensor descriptors."""

MANY_ROWS_KIND = "persistent"
"""The kind whose programs take several tiles each."""

KINDS = (PLAIN_KIND, "descriptors", MANY_ROWS_KIND)


class TileTableError(ValueError):
    """A tile table's file is not one; says the entry and the rule."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One form of a kernel: ``block_m`` rows of x by ``block_n`` rows of the weight.

    ``kind`` names the kernel. ``swapped``: weight rows are the left operand of the product.
    ``group_m``: row tiles that run side by side. ``overlap``: the launch may begin while the
    kernel before it ends, and ``prefetch`` bytes of each weight row are then on their way before
    the rows of x are there.
    """

    kind: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    swapped: bool = False
    group_m: int = 1
    overlap: bool = False
    prefetch: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TileTableError(f"tile kind {self.kind!r} is not one of {', '.join(KINDS)}")
        _check("block_m", self.block_m, 16, 512)
        _check("block_n", self.block_n, 16, 512, threefold=self.kind == MANY_ROWS_KIND)
        _check("block_k", self.block_k, 16, 512)
        _check("warps", self.warps, 1, 16)
        _check("stages", self.stages, 1, 16, power=False)
        _check("group_m", self.group_m, 1, 64, power=False)
        _check("prefetch", self.prefetch, 0, 16384, power=False)
        if self.prefetch % 16 or (self.prefetch and not self.overlap):
            raise TileTableError(
                f"prefetch {self.prefetch} is not a multiple of 16, or the tile does not overlap"
            )
        if self.overlap and self.kind != "descriptors":
            raise TileTableError(f"tiles of kind {self.kind} do not overlap")
        if self.kind == MANY_ROWS_KIND:
            self._check_many_rows()
        if self.stage_bytes > SHARED_BYTES:
            raise TileTableError(
                f"tile {self.block_m} x {self.block_n} x {self.block_k} in {self.stages} stages "
                f"needs {self.stage_bytes} bytes of shared memory, above {SHARED_BYTES}"
            )

    def _check_many_rows(self) -> None:
        """Two warpgroups have half of the rows each, one more has the loads, a stage ahead."""
        if self.block_m not in (128, 256) or self.block_n > 256 or self.warps != 8:
            raise TileTableError(
                f"a {self.kind} tile has 128 or 256 rows, 256 columns at most and 8 warps: {self}"
            )
        if self.stages < 2 or self.swapped:
            raise TileTableError(f"a {self.kind} tile has 2 stages at least, not swapped: {self}")

    @property
    def stage_bytes(self) -> int:
        """Shared memory of the operands in flight."""
        return (self.block_m + self.block_n) * self.block_k * self.stages * OPERAND_BYTES


@dataclass(frozen=True, kw_only=True)
class SiteTiles:
    """The tiles of one weight shape: ``tiles[i]`` serves row counts up to ``bounds[i]``.

    There is one tile more than bounds, for every larger count. ``gated[i]`` is that of the layer
    and its gated activation in one kernel, None where two kernels are as quick.
    """

    bounds: tuple[int, ...]
    tiles: tuple[Tile, ...]
    gated: tuple[Tile | None, ...]

    def at(self, rows: int) -> Tile:
        """The tile for *rows* rows of x; at least one."""
        return self.tiles[bisect_left(self.bounds, rows)]

    def gated_at(self, rows: int) -> Tile | None:
        return self.gated[bisect_left(self.bounds, rows)]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tile for row counts up to ``rows`` (None: beyond the last bound).

    Of a tuned shape it gives ``k`` and ``n``. Of a default, ``k`` is None and ``n`` the largest
    output width that it serves (None: every width).
    """

    rows: int | None
    k: int | None
    n: int | None
    tile: Tile


@dataclass(frozen=True, kw_only=True)
class TileTable:
    """All tiles of one device class.

    ``plain`` serves what tensor descriptors do not reach. ``gated`` are the tiles of a layer and
    its gated activation in one kernel; their n counts gate and up.
    """

    device_class: str
    bounds: tuple[int, ...]
    defaults: tuple[Entry, ...]
    entries: tuple[Entry, ...]
    plain: tuple[Tile, ...]
    gated: tuple[Entry, ...]

    def site(self, *, k: int, n: int, descriptors: bool, stores: bool = True) -> SiteTiles:
        """The tiles of a weight [n, k]; without *descriptors*, plain ones only.

        Without *stores*, rows of the output do not fit descriptors: tiles that store by them give
        way to plain ones.
        """
        buckets = (*self.bounds, None)
        if not descriptors:
            nothing = (None,) * len(buckets)
            return SiteTiles(bounds=self.bounds, tiles=self.plain, gated=nothing)
        return SiteTiles(
            bounds=self.bounds,
            tiles=tuple(
                tile if stores or tile.kind != MANY_ROWS_KIND else plain
                for tile, plain in zip(
                    (self._tile(k, n, bucket) for bucket in buckets), self.plain, strict=True
                )
            ),
            gated=tuple(self._gated(k, n, bucket) for bucket in buckets),
        )

    def all_tiles(self) -> tuple[Tile, ...]:
        """Every tile that a layer alone may be given, each once."""
        listed = [entry.tile for entry in (*self.entries, *self.defaults)]
        return tuple(dict.fromkeys([*listed, *self.plain]))

    def _tile(self, k: int, n: int, rows: int | None) -> Tile:
        for entry in self.entries:
            if (entry.k, entry.n, entry.rows) == (k, n, rows):
                return entry.tile
        return next(
            entry.tile
            for entry in self.defaults
            if entry.rows == rows and (entry.n is None or n <= entry.n)
        )

    def _gated(self, k: int, n: int, rows: int | None) -> Tile | None:
        found = {(entry.k, entry.n): entry.tile for entry in self.gated if entry.rows == rows}
        return found.get((k, n), found.get((None, None)))


@cache
def tile_table(device_class: str) -> TileTable:
    """The shipped table of *device_class*; raises TileTableError if there is none."""
    file = files("pagedctl_kernels") / "tile_tables" / f"{device_class}.json"
    if not file.is_file():
        raise TileTableError(f"there is no tile table for {device_class}")
    return parse_table(file.read_text())


def parse_table(text: str) -> TileTable:
    """Read and check the JSON of a table; raises TileTableError."""
    try:
        data = json.loads(text)
        table = TileTable(
            device_class=str(data["device_class"]),
            bounds=tuple(data["row_bounds"]),
            defaults=tuple(_entry(one) for one in data["defaults"]),
            entries=tuple(_entry(one) for one in data["entries"]),
            plain=tuple(_tile_of(one) for one in data["plain"]),
            gated=tuple(_entry(one) for one in data["gated"]),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as problem:
        raise TileTableError(f"tile table: {type(problem).__name__}: {problem}") from problem
    _check_table(table)
    return table


def _check_table(table: TileTable) -> None:
    """Every bucket has exactly one tile for each shape, tuned or not."""
    if list(table.bounds) != sorted(set(table.bounds)) or min(table.bounds, default=0) < 1:
        raise TileTableError(f"row bounds {table.bounds} do not ascend from 1")
    buckets = (*table.bounds, None)
    for listed in ((*table.entries, *table.defaults), table.gated):
        keys = [(entry.k, entry.n, entry.rows) for entry in listed]
        if len(set(keys)) != len(keys):
            raise TileTableError("two entries of the tile table serve the same shape and rows")
        for entry in listed:
            if entry.rows not in buckets:
                raise TileTableError(f"rows {entry.rows} is not one of the bounds {table.bounds}")
    for entry in table.gated:
        _check_gated(entry)
    for bucket in buckets:
        widths = [entry.n for entry in table.defaults if entry.rows == bucket]
        if not widths or widths[-1] is not None or not _ascends(widths[:-1]):
            raise TileTableError(
                f"the defaults for rows {bucket} must ascend in n and end with n null"
            )
    if len(table.plain) != len(buckets) or any(t.kind != PLAIN_KIND for t in table.plain):
        raise TileTableError(f"plain must give {len(buckets)} tiles of kind {PLAIN_KIND}")


def _check_gated(entry: Entry) -> None:
    """Its kernel reads by descriptors, and holds a tile of the gate and one of up."""
    tile = entry.tile
    if (entry.k is None) != (entry.n is None):
        raise TileTableError(f"a gated entry gives both k and n or neither: {entry.k}, {entry.n}")
    if tile.kind != "descriptors":
        raise TileTableError(f"a gated tile is of kind descriptors, not {tile.kind}")
    both = tile.stage_bytes + tile.block_n * tile.block_k * tile.stages * OPERAND_BYTES
    if both > SHARED_BYTES:
        raise TileTableError(f"a gated tile needs {both} bytes of shared memory: {tile}")


def _ascends(widths: Sequence[int | None]) -> bool:
    known = [width for width in widths if width is not None]
    return len(known) == len(widths) and known == sorted(set(known))


def _entry(data: Mapping[str, Any]) -> Entry:
    return Entry(rows=data["rows"], k=data.get("k"), n=data["n"], tile=_tile_of(data["tile"]))


def _tile_of(data: Mapping[str, Any]) -> Tile:
    unknown = sorted(set(data) - {field.name for field in fields(Tile)})
    if unknown:
        raise TileTableError(f"tile has unknown fields {', '.join(unknown)}")
    return Tile(**data)


def _check(
    name: str, value: object, low: int, high: int, *, power: bool = True, threefold: bool = False
) -> None:
    """An integer in a range; a power of two, or also thrice one, where that is asked for."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise TileTableError(f"{name} {value!r} is not an integer from {low} to {high}")
    base = value // 3 if threefold and value % 3 == 0 else value
    if power and base & (base - 1):
        raise TileTableError(f"{name} {value} is not a power of two")
