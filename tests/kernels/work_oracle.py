"""An independent reading of attention work lists: one token, one key and one entry at a time.

Nothing is shared with the builder. ``check`` replays a list against the metadata that it was built
from and raises AssertionError with what is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagedctl_kernels.ops.attention.device_work import DeviceWork
from pagedctl_kernels.ops.interfaces import AttentionMetadata

SPLIT = 256


@dataclass(frozen=True)
class Token:
    """One query: its sequence, its position, and the first key that it sees."""

    sequence: int
    position: int
    lowest: int

    @property
    def splits(self) -> tuple[int, int]:
        return self.lowest // SPLIT, self.position // SPLIT + 1


@dataclass(frozen=True)
class Piece:
    """Splits [first, end) of one token, folded by a tile of this height. ``slot``: of its state."""

    first: int
    end: int
    slot: int
    keeps: bool
    resumes: bool
    rows: int


@dataclass(frozen=True)
class Item:
    rows: int
    tokens: tuple[int, ...]
    table_row: int
    first: int
    end: int
    keeps: bool
    resumes: bool


def live(work: DeviceWork) -> tuple[list[Item], list[list[int]], list[int], list[int]]:
    """The items that a kernel would run, in launch order, the merges, and their operands."""
    counts = work.item_counts.cpu().tolist()
    tokens, slots = work.tokens.cpu().tolist(), work.slots.cpu().tolist()
    items = []
    places = []
    assert len(counts) == len(work.classes)
    for tile_class, count in zip(work.classes, counts, strict=True):
        assert 0 <= count <= len(tile_class.items)
        for entry in tile_class.items.cpu()[:count].tolist():
            start, length, table_row, first, end, flags, _, _ = entry
            assert flags in range(4)
            assert not flags & 2 or tile_class is work.classes[0], "only the lowest class resumes"
            places.append(start)
            items.append(
                Item(
                    tile_class.rows,
                    tuple(tokens[start : start + length]),
                    table_row,
                    first,
                    end,
                    keeps=bool(flags & 1),
                    resumes=bool(flags & 2),
                )
            )
    merges = work.merges.cpu()[: int(work.merge_count.item())].tolist()
    return items, merges, slots, places


def queries(metadata: AttentionMetadata, window: int | None) -> dict[int, Token]:
    starts = np.asarray(metadata.query_start_loc).tolist()
    found = {}
    for sequence, length in enumerate(np.asarray(metadata.seq_lens).tolist()):
        for token in range(starts[sequence], starts[sequence + 1]):
            position = length - (starts[sequence + 1] - token)
            lowest = 0 if window is None else max(position - window + 1, 0)
            found[token] = Token(sequence, position, lowest)
    return found


def check(
    work: DeviceWork,
    metadata: AttentionMetadata,
    *,
    q_heads: int,
    kv_heads: int,
    block_size: int,
    window: int | None,
    num_blocks: int,
) -> None:
    """Every token's seen keys are read once, from its own blocks, and folded in order."""
    expected = queries(metadata, window)
    tables = np.asarray(metadata.block_tables)
    copied = work.block_tables.cpu().numpy()
    positions = work.positions.cpu().tolist()
    items, merges, slots, starts = live(work)
    assert work.num_tokens == int(np.asarray(metadata.query_start_loc)[-1])
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for item, start in zip(items, starts, strict=True):
        group = q_heads // kv_heads
        assert 1 <= len(item.tokens) <= item.rows // group, "an item has more rows than its tile"
        assert 0 <= item.first < item.end
        of_item = [expected[token] for token in item.tokens]
        for place, token in enumerate(item.tokens):
            assert positions[token] == expected[token].position
            slot = slots[start + place]
            pieces[token].append(
                Piece(item.first, item.end, slot, item.keeps, item.resumes, item.rows)
            )
        _check_blocks(item, of_item, tables, copied, block_size, num_blocks)
    _check_extremes(work, expected)
    _check_folds(work, expected, pieces, merges)
    _check_order(work)


def _check_blocks(
    item: Item,
    of_item: list[Token],
    tables: np.ndarray[Any, Any],
    copied: np.ndarray[Any, Any],
    block_size: int,
    num_blocks: int,
) -> None:
    """What the program reads is each token's own block for every key that the token sees."""
    lowest = max(min(token.lowest for token in of_item), item.first * SPLIT)
    last = min(max(token.position for token in of_item), item.end * SPLIT - 1)
    read = copied[item.table_row, lowest // block_size : last // block_size + 1]
    assert ((read >= 0) & (read < num_blocks)).all(), "a block outside the caches is read"
    for token in of_item:
        first = max(token.lowest, item.first * SPLIT)
        stop = min(token.position + 1, item.end * SPLIT)
        if first < stop:
            blocks = slice(first // block_size, (stop - 1) // block_size + 1)
            own = tables[token.sequence, blocks]
            assert (copied[item.table_row, blocks] == own).all(), "another sequence's block"


def _check_extremes(work: DeviceWork, expected: dict[int, Token]) -> None:
    tokens = work.tokens.cpu().tolist()
    for tile_class, count in zip(work.classes, work.item_counts.tolist(), strict=True):
        for entry in tile_class.items.cpu()[:count].tolist():
            of_item = [expected[token].position for token in tokens[entry[0] : entry[0] + entry[1]]]
            assert entry[6:] == [max(of_item), min(of_item)], "positions of an item"


def _check_folds(
    work: DeviceWork,
    expected: dict[int, Token],
    pieces: dict[int, list[Piece]],
    merges: list[list[int]],
) -> None:
    """Each row is written once, from states that are this token's, complete and in order."""
    folded = {token: _resumed(of_token) for token, of_token in pieces.items()}
    written = [token for token, of_token in folded.items() if not all(p.keeps for p in of_token)]
    merged = [entry[0] for entry in merges]
    assert sorted(written + merged) == list(range(work.rows)), "rows are written once"
    states = {
        token: {p.slot for p in found if p.keeps or p.resumes} for token, found in pieces.items()
    }
    used = [slot for of_token in states.values() for slot in of_token]
    assert len(set(used)) == len(used), "two tokens in one slot"
    assert all(0 <= slot < len(work.state_m) for slot in used), "a slot outside the states"
    assert work.state_m.shape == work.state_l.shape == work.state_a.shape[:2]
    for token in written:
        assert len(folded[token]) == 1, "a row that is written directly has one state"
        piece, (first, end) = folded[token][0], expected[token].splits
        assert piece.first <= first, "keys are missing"
        assert piece.end >= end, "keys are missing"
    for token, first_slot, num_slots, _ in merges:
        if token not in expected:
            assert num_slots == 0, "a row without a query gives zeros"
            continue
        by_slot = {piece.slot: piece for piece in folded[token]}
        assert len(by_slot) == len(folded[token]) == num_slots > 0, "states that are not merged"
        first, end = expected[token].splits
        assert first_slot in by_slot, "a slot that no item fills"
        at = by_slot[first_slot].first
        assert at <= first, "keys are missing"
        for number in range(num_slots):
            piece = by_slot[first_slot + number]
            assert piece.first == at, "states out of order"
            assert number == 0 or piece.end == piece.first + 1, "a later state holds one split"
            at = piece.end
        assert at >= end, "keys are missing"


def _resumed(pieces: list[Piece]) -> list[Piece]:
    """Pieces of one token, each that resumes another joined to it."""
    joined = [piece for piece in pieces if not piece.resumes]
    for piece in pieces:
        if piece.resumes:
            before = [other for other in joined if other.slot == piece.slot]
            assert len(before) == 1, "a state that no item kept is resumed"
            assert before[0].keeps
            assert before[0].rows > piece.rows, "a state is resumed before it is kept"
            assert before[0].end == piece.first, "a split is left out or read twice"
            joined.remove(before[0])
            joined.append(replace(piece, first=before[0].first, resumes=False))
    return joined


def _check_order(work: DeviceWork) -> None:
    for tile_class, count in zip(work.classes, work.item_counts.tolist(), strict=True):
        lengths = [_tiles(entry) for entry in tile_class.items.cpu()[:count].tolist()]
        assert lengths == sorted(lengths, reverse=True), "the longest items come first"


def _tiles(entry: list[int]) -> int:
    """How many tiles of 64 keys an item reads, if no window hides the first ones."""
    return min(entry[4] * 4, entry[6] // 64 + 1) - entry[3] * 4


def loads(work: DeviceWork, kv_heads: int, programs: int) -> dict[int, tuple[float, float]]:
    """Per tile height, the busiest program's key tiles and the mean, dealt as the kernel deals."""
    found = {}
    for tile_class, count in zip(work.classes, work.item_counts.tolist(), strict=True):
        load = np.zeros(programs)
        lengths = [_tiles(entry) for entry in tile_class.items.cpu()[:count].tolist()]
        for index, length in enumerate(np.repeat(lengths, kv_heads).tolist()):
            turn, place = divmod(index, programs)
            load[place if turn % 2 == 0 else programs - 1 - place] += length
        found[tile_class.rows] = (float(load.max()), float(load.mean()))
    return found
