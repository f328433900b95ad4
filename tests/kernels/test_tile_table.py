"""Tile tables: every shape and row count has one tile, and a broken file is refused by rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pagedctl_kernels.ops.tile_table import (
    Tile,
    TileTableError,
    parse_table,
    tile_table,
)

ROWS = (1, 2, 16, 17, 64, 65, 128, 129, 512, 513, 4096, 1 << 20)


def small_tile(**changes: Any) -> dict[str, Any]:
    tile = {"kind": "descriptors", "block_m": 16, "block_n": 32, "block_k": 128}
    return {**tile, "warps": 4, "stages": 4, **changes}


def table_data() -> dict[str, Any]:
    plain = small_tile(kind="pointers")
    return {
        "device_class": "sm_90",
        "row_bounds": [16, 64],
        "defaults": [
            {"rows": 16, "n": 8192, "tile": small_tile()},
            {"rows": 16, "n": None, "tile": small_tile(block_n=64)},
            {"rows": 64, "n": None, "tile": small_tile(block_m=64)},
            {"rows": None, "n": None, "tile": small_tile(block_m=128)},
        ],
        "entries": [{"k": 4096, "n": 4096, "rows": 64, "tile": small_tile(block_m=32)}],
        "plain": [plain, plain, plain],
        "gated": [
            {"rows": 16, "n": None, "tile": small_tile()},
            {"rows": 16, "k": 64, "n": 96, "tile": small_tile(block_n=16)},
        ],
    }


def test_the_shipped_table_has_a_tile_for_every_shape_and_row_count() -> None:
    table = tile_table("sm_90")
    assert table.device_class == "sm_90"
    for descriptors in (True, False):
        for n in (16, 1024, 4096, 151936):
            tiles = table.site(k=4096, n=n, descriptors=descriptors)
            for rows in ROWS:
                tile = tiles.at(rows)
                assert tile in table.all_tiles()
                assert (tile.kind == "pointers") is not descriptors


def test_a_tuned_shape_has_its_entry_and_defaults_elsewhere() -> None:
    table = parse_table(json.dumps(table_data()))
    tuned = table.site(k=4096, n=4096, descriptors=True)
    assert [tuned.at(rows).block_m for rows in (1, 16, 17, 64, 65)] == [16, 16, 32, 32, 128]
    other = table.site(k=4096, n=4095, descriptors=True)
    assert [other.at(rows).block_m for rows in (16, 64, 65)] == [16, 64, 128]
    assert table.site(k=1, n=8192, descriptors=True).at(1).block_n == 32
    assert table.site(k=1, n=8193, descriptors=True).at(1).block_n == 64


def test_fused_activations_have_a_tile_where_the_table_gives_one() -> None:
    table = parse_table(json.dumps(table_data()))
    own, other = (table.site(k=64, n=n, descriptors=True) for n in (96, 97))
    assert [tile and tile.block_n for tile in own.gated] == [16, None, None]
    assert [tile and tile.block_n for tile in other.gated] == [32, None, None]
    assert own.gated_at(16) is not None
    assert own.gated_at(17) is None
    assert table.site(k=64, n=96, descriptors=False).gated == (None, None, None)


def test_a_device_class_without_a_table_is_named() -> None:
    with pytest.raises(TileTableError, match="no tile table for sm_75"):
        tile_table("sm_75")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kind", "magic", "tile kind 'magic'"),
        ("block_m", 48, "block_m 48 is not a power of two"),
        ("block_n", 8, "block_n 8 is not an integer from 16"),
        ("block_k", "64", "block_k '64'"),
        ("warps", 3, "warps 3"),
        ("stages", 0, "stages 0"),
        ("stages", True, "stages True"),
        ("stages", 16, "bytes of shared memory"),
        ("prefetch", 1024, "the tile does not overlap"),
        ("block_n", 96, "block_n 96 is not a power of two"),
    ],
)
def test_a_tile_out_of_range_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(TileTableError, match=said):
        Tile(**small_tile(**{field: value, "block_n": 128} if value == 16 else {field: value}))


def test_tiles_overlap_only_by_descriptors_and_only_many_rows_have_threefold_widths() -> None:
    assert Tile(**small_tile(overlap=True, prefetch=1024)).prefetch == 1024
    with pytest.raises(TileTableError, match="prefetch 24 is not a multiple of 16"):
        Tile(**small_tile(overlap=True, prefetch=24))
    with pytest.raises(TileTableError, match="kind pointers do not overlap"):
        Tile(**small_tile(kind="pointers", overlap=True))
    many = {"kind": "persistent", "block_m": 128, "block_k": 64, "warps": 8}
    assert Tile(**small_tile(**many, block_n=192)).block_n == 192
    for changes, said in (
        ({"block_n": 80}, "block_n 80 is not a power of two"),
        ({"block_n": 512}, "256 columns at most"),
        ({"block_m": 64}, "has 128 or 256 rows"),
        ({"warps": 4}, "and 8 warps"),
        ({"stages": 1}, "2 stages at least"),
        ({"swapped": True}, "not swapped"),
    ):
        with pytest.raises(TileTableError, match=said):
            Tile(**small_tile(**{**many, **changes}))


def test_outputs_that_no_descriptor_stores_take_plain_tiles_only_where_tiles_store_by_one() -> None:
    table = tile_table("sm_90")
    whole = table.site(k=4096, n=50257, descriptors=True)
    ragged = table.site(k=4096, n=50257, descriptors=True, stores=False)
    kinds = {tile.kind for tile in whole.tiles}
    assert kinds == {"descriptors", "persistent"}
    for tile, other, plain in zip(ragged.tiles, whole.tiles, table.plain, strict=True):
        assert tile == (plain if other.kind == "persistent" else other)
    assert ragged.gated == whole.gated


def _drop_last_default(data: dict[str, Any]) -> None:
    del data["defaults"][-1]


def _repeat_entry(data: dict[str, Any]) -> None:
    data["entries"] *= 2


def _unknown_bound(data: dict[str, Any]) -> None:
    data["entries"][0]["rows"] = 48


def _unknown_field(data: dict[str, Any]) -> None:
    data["entries"][0]["tile"]["wraps"] = 4


def _falling_bounds(data: dict[str, Any]) -> None:
    data["row_bounds"] = [64, 16]


def _falling_widths(data: dict[str, Any]) -> None:
    data["defaults"].insert(1, {"rows": 16, "n": 4096, "tile": small_tile()})


def _short_plain(data: dict[str, Any]) -> None:
    del data["plain"][0]


def _gated_by_pointers(data: dict[str, Any]) -> None:
    data["gated"][0]["tile"]["kind"] = "pointers"


def _gated_half_a_shape(data: dict[str, Any]) -> None:
    data["gated"][0]["n"] = 96


def _gated_unknown_bound(data: dict[str, Any]) -> None:
    data["gated"][0]["rows"] = 48


def _gated_twice(data: dict[str, Any]) -> None:
    data["gated"] *= 2


def _gated_too_deep(data: dict[str, Any]) -> None:
    data["gated"][0]["tile"].update(block_m=64, block_n=128)


def _no_defaults(data: dict[str, Any]) -> None:
    del data["defaults"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_drop_last_default, "defaults for rows None must ascend"),
        (_repeat_entry, "serve the same shape"),
        (_unknown_bound, "rows 48 is not one of the bounds"),
        (_unknown_field, "unknown fields wraps"),
        (_falling_bounds, "do not ascend"),
        (_falling_widths, "must ascend in n"),
        (_short_plain, "plain must give 3 tiles"),
        (_gated_by_pointers, "of kind descriptors, not pointers"),
        (_gated_half_a_shape, "both k and n or neither"),
        (_gated_unknown_bound, "rows 48 is not one of the bounds"),
        (_gated_twice, "serve the same shape"),
        (_gated_too_deep, "gated tile needs 327680 bytes"),
        (_no_defaults, "KeyError: 'defaults'"),
    ],
)
def test_a_broken_table_is_refused(damage: Callable[[dict[str, Any]], None], said: str) -> None:
    data = table_data()
    damage(data)
    with pytest.raises(TileTableError, match=said):
        parse_table(json.dumps(data))


def test_a_file_that_is_no_json_is_refused() -> None:
    with pytest.raises(TileTableError, match="JSONDecodeError"):
        parse_table("{")
