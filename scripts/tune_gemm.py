#!/usr/bin/env python3
"""Measures which tile serves each weight shape and row count best, and writes a tile table.

    python scripts/tune_gemm.py 4096x6144 4096x4096 --rows 16 32 64 --out sm_90.json

Runs on the GPU whose table it makes. A shape is KxN: the inputs and outputs of the layer. Every
candidate is first held to the sums of the plain kernel, unrounded and bit for bit; one that
differs is named and left out. The rest are timed in a CUDA graph that reads another weight in
every launch, so that none is found in the cache. Entries that were not measured stay as the
table had them; a default is the tile that costs the measured shapes least.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pagedctl_kernels.machine import this_machine
from pagedctl_kernels.ops.tile_table import (
    MANY_ROWS_KIND,
    SHARED_BYTES,
    Entry,
    Tile,
    TileTable,
    parse_table,
    tile_table,
)
from pagedctl_kernels.ops.triton_linear import launch

GRAPH_BYTES = 600_000_000
"""Weights that one graph reads: ten times the L2 cache of an H200."""

WIDTHS = (2048, 4608, 8192, 65536, None)
"""Defaults are chosen by output width, up to and with each of these."""

FINALISTS = 4
PROOF_COLUMNS = 272


@dataclass(frozen=True)
class Shape:
    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        k, _, n = text.partition("x")
        return cls(k=int(k), n=int(n))

    def __str__(self) -> str:
        return f"{self.k}x{self.n}"


@dataclass(frozen=True)
class Timing:
    shape: Shape
    rows: int | None
    tile: Tile
    us: float


def candidates(rows: int) -> Iterator[Tile]:
    """Tiles worth a trial at *rows* rows, each as deep as one, two or three programs can be."""
    block_m = min(max(16, 1 << (rows - 1).bit_length()), 128)
    for swapped, block_n, block_k, warps in _forms(block_m):
        stage_bytes = (block_m + block_n) * block_k * 2
        depths = {SHARED_BYTES // programs // stage_bytes for programs in (1, 2, 3)}
        for stages in sorted({min(depth, 10) for depth in depths if depth >= 3}):
            tile = Tile(
                kind="descriptors",
                block_m=block_m,
                block_n=block_n,
                block_k=block_k,
                warps=warps,
                stages=stages,
                swapped=swapped,
            )
            yield tile
            for prefetch in (0, 1024):
                yield replace(tile, overlap=True, prefetch=prefetch)
    if rows >= 128:
        yield from _persistent()


def _persistent() -> Iterator[Tile]:
    """Tiles of the kernel for many rows, as deep as shared memory holds beside its stores."""
    for block_n, depths in ((64, (8,)), (96, (7,)), (128, (6,)), (192, (4, 5)), (256, (4,))):
        for stages in depths:
            for group_m in (8, 16):
                yield Tile(
                    kind=MANY_ROWS_KIND,
                    block_m=128,
                    block_n=block_n,
                    block_k=64,
                    warps=8,
                    stages=stages,
                    group_m=group_m,
                )


def _forms(block_m: int) -> Iterator[tuple[bool, int, int, int]]:
    """(swapped, block_n, block_k, warps) for tiles of *block_m* rows."""
    for block_k in (64, 128, 256):
        for block_n in (16, 32, 64, 128):
            for warps in (2, 4) if block_m < 64 else (4,):
                yield False, block_n, block_k, warps
        for block_n in (64, 128):
            for warps in (4, 8) if block_n > 64 else (4,):
                yield True, block_n, block_k, warps


def compile_all(tiles: Iterable[Tile]) -> None:
    """Compile side by side; a tile that does not compile fails again where it is proved."""

    def one(tile: Tile) -> None:
        x = torch.ones(1, 512, dtype=torch.bfloat16, device="cuda")
        weight = torch.ones(PROOF_COLUMNS, 512, dtype=torch.bfloat16, device="cuda")
        for dtype in (torch.bfloat16, torch.float32):
            y = torch.empty(1, PROOF_COLUMNS, dtype=dtype, device="cuda")
            try:
                launch(x, weight, None, y, tile)
            except Exception as problem:
                print(f"{label(tile)}: {type(problem).__name__}: {str(problem)[:200]}")

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(one, tiles))


def proved(tiles: Iterable[Tile], plain: Tile) -> list[Tile]:
    """The tiles that give the bits of *plain*, on sums whose order shows."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    kept = list(tiles)
    for k in (4096, 1000):
        x = torch.randn(300, k, generator=generator, device="cuda")
        x *= torch.exp2(torch.randint(-30, 31, x.shape, generator=generator, device="cuda"))
        weight = torch.randn(PROOF_COLUMNS, k, generator=generator, device="cuda")
        weight[:, 1::2] = weight[:, 0::2]
        x[::2, 1::2] = -x[::2, 0::2] * (1 + 2**-8)
        x, weight = x.bfloat16(), weight.bfloat16()
        want = sums(x, weight, plain)
        for tile in list(kept):
            for rows in (1, 17, 300):
                try:
                    same = torch.equal(sums(x[:rows], weight, tile), want[:rows])
                except Exception as problem:
                    same = False
                    print(f"{label(tile)}: {type(problem).__name__}: {str(problem)[:200]}")
                if not same:
                    print(f"{label(tile)}: left out, its sums differ at K {k}, {rows} rows")
                    kept.remove(tile)
                    break
    return kept


def sums(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    y = torch.full((len(x), len(weight)), torch.nan, dtype=torch.float32, device="cuda")
    launch(x, weight, None, y, tile)
    return y


class Bench:
    """Memory for weights in rotation, and what is timed on them."""

    def __init__(self) -> None:
        self.memory = torch.empty(GRAPH_BYTES // 2 * 3, dtype=torch.bfloat16, device="cuda")
        self.memory.normal_()

    def weights(self, shape: Shape) -> torch.Tensor:
        """[count, n, k]: enough of them for a graph."""
        size = shape.k * shape.n
        count = max(1, min(self.memory.numel() // size, max(2, GRAPH_BYTES // (2 * size)), 36))
        return self.memory[: count * size].view(count, shape.n, shape.k)

    def us(self, shape: Shape, rows: int, tile: Tile | None, replays: int) -> float:
        """The median time of one product; without a tile, of the vendor's."""
        weights = self.weights(shape)
        x = torch.randn(rows, shape.k, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(rows, shape.n, dtype=torch.bfloat16, device="cuda")

        def launch_all() -> None:
            for weight in weights:
                if tile is None:
                    torch.mm(x, weight.T, out=y)
                else:
                    launch(x, weight, None, y, tile)

        return graph_us(launch_all, replays) / len(weights)

    def best(self, shape: Shape, rows: int, tiles: Iterable[Tile]) -> tuple[list[Timing], float]:
        """All tiles' times, the finalists' measured longer, quickest first; and the vendor's."""
        first = sorted(
            (Timing(shape, rows, tile, self.us(shape, rows, tile, 3)) for tile in tiles),
            key=lambda one: one.us,
        )
        finalists = [
            replace(one, us=self.us(shape, rows, one.tile, 15)) for one in first[:FINALISTS]
        ]
        ranked = sorted(finalists, key=lambda one: one.us) + first[FINALISTS:]
        return ranked, self.us(shape, rows, None, 15)


def graph_us(body: Callable[[], None], replays: int) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times)


def label(tile: Tile) -> str:
    """One word: kind, blocks, warps, stages; s for swapped, o for overlap and its prefetch."""
    shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    ahead = f"o{tile.prefetch}" if tile.overlap else ""
    return f"{tile.kind[0]}{'s' * tile.swapped}{shape}w{tile.warps}s{tile.stages}{ahead}"


def defaults(measured: Iterable[Timing], rows: int) -> list[Entry]:
    """For each of WIDTHS, the tile with the least mean slowdown over the shapes in it."""
    chosen, low = [], 0
    for width in WIDTHS:
        inside = [one for one in measured if low < one.shape.n <= (width or one.shape.n)]
        best = {one.shape: min(t.us for t in inside if t.shape == one.shape) for one in inside}
        loss: dict[Tile, float] = {}
        for one in inside:
            loss[one.tile] = loss.get(one.tile, 0.0) + log(one.us / best[one.shape])
        if loss:  # a default is replaced where shapes of its widths were measured
            tile = min(loss, key=lambda tile: loss[tile])
            chosen.append(Entry(rows=rows, k=None, n=width, tile=tile))
        low = width or low
    return chosen


def merged(table: TileTable, found: list[Entry]) -> dict[str, Any]:
    """The table as JSON with *found* in the place of what served those shapes and rows."""
    known = {(entry.k, entry.n, entry.rows): entry for entry in (*table.entries, *table.defaults)}
    known |= {(entry.k, entry.n, entry.rows): entry for entry in found}
    order = sorted(known.values(), key=_place)
    return {
        "device_class": table.device_class,
        "row_bounds": list(table.bounds),
        "defaults": [_written(entry) for entry in order if entry.k is None],
        "entries": [_written(entry) for entry in order if entry.k is not None],
        "plain": [_tile_fields(tile) for tile in table.plain],
        "gated": [_written(entry) for entry in table.gated],
    }


def _place(entry: Entry) -> tuple[float, ...]:
    return tuple(float("inf") if one is None else one for one in (entry.k, entry.rows, entry.n))


def _written(entry: Entry) -> dict[str, Any]:
    shape = {} if entry.k is None else {"k": entry.k}
    return {**shape, "n": entry.n, "rows": entry.rows, "tile": _tile_fields(entry.tile)}


def _tile_fields(tile: Tile) -> dict[str, Any]:
    """Fields at their defaults are not written."""
    standing = {field.name: field.default for field in fields(Tile)}
    return {name: value for name, value in asdict(tile).items() if value != standing[name]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", type=Shape.parse, help="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 32, 64, 128], help="buckets")
    parser.add_argument(
        "--out", type=Path, help="where the table goes; without it nothing is written"
    )
    args = parser.parse_args()
    table = tile_table(this_machine("cuda").device_class)
    unknown = [rows for rows in args.rows if rows not in table.bounds]
    if unknown:
        parser.error(f"--rows {unknown[0]} is not one of the table's bounds {table.bounds}")
    bench, found = Bench(), []
    for rows in args.rows:
        tiles = list(candidates(rows))
        compile_all(tiles)
        tiles = proved(tiles, table.plain[0])
        measured: list[Timing] = []
        for shape in args.shapes:
            ranked, vendor = bench.best(shape, rows, tiles)
            measured += ranked
            found.append(Entry(rows=rows, k=shape.k, n=shape.n, tile=ranked[0].tile))
            few = ", ".join(f"{one.us:.1f} {label(one.tile)}" for one in ranked[:FINALISTS])
            print(f"{shape} at {rows} rows: vendor {vendor:.1f} us; {few}", flush=True)
        found += defaults(measured, rows)
    if args.out is not None:
        text = json.dumps(merged(table, found), indent=1) + "\n"
        parse_table(text)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
