"""How a step's tokens are packed into tiles and cut into items. No bit of a result depends on it.

A *tile* is a set of query tokens that read the same blocks over a range of splits. It becomes one
item, or, where too few programs would run, one that folds its first splits and one for each later
split, whose states are merged. What follows the splits that a group shares resumes the group's
state, unless those splits are several items themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pagedctl_kernels.house import SPLIT_TOKENS, TILE_KEYS
from pagedctl_kernels.ops.attention.device_groups import (
    NO_GROUPS,
    DecodeRows,
    Flags,
    Groups,
    Tables,
    find_groups,
)
from pagedctl_kernels.ops.attention.units import TILES_PER_SPLIT, Batch, Geometry, Ints

TILE_ROWS = (16, 64, 128)
"""Heights of the tile classes: rows are (token, query head of the kv head's group)."""

GROUP_ROWS = 64
"""Rows of a decode group at most: 16 samples of a model with 4 query heads per kv head."""


KEEPS = 1
"""Flag of an item: its tokens' states are kept; otherwise it writes their output rows."""

RESUMES = 2
"""Flag of an item: it goes on from the states in its tokens' slots."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What packing costs, in splits of keys and values read for one kv head.

    ``programs``: per class, how many programs (item, kv head) keep the device busy.
    ``state_cost``: one token's state, written and read, with the item that it takes.
    ``launch_cost``: a launch of its own, as groups need, of splits at full bandwidth. ``slack``: a
    tile up to this much longer than what one program should read is left whole. ``tallest``: rows
    of a tile of prefill tokens at most. ``grouped``, ``cut`` and ``resumed`` turn the three off.
    """

    programs: tuple[int, ...]
    state_cost: float
    launch_cost: float = 100
    slack: float = 2.0
    tallest: int = TILE_ROWS[-1]
    grouped: bool = True
    cut: bool = True
    resumed: bool = True


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """N tiles. ``tokens``: flat query indices, tile after tile; ``counts`` int64[N].

    Int64[N]: ``table_row``; ``first_split`` and ``end_split``; ``first_position`` and
    ``last_position``, extremes of the tokens'; ``follows``, the tile that holds the splits before
    its first one, or -1 if its tokens see none of them. Bool[N]: ``closes``, it holds all splits
    from its first one on that its tokens see.
    """

    tokens: Ints
    counts: Ints
    table_row: Ints
    first_split: Ints
    end_split: Ints
    first_position: Ints
    last_position: Ints
    follows: Ints
    closes: Flags


@dataclass(frozen=True, kw_only=True)
class WorkList:
    """What is written for the device; fields as in DeviceWork, int64 unless stated.

    ``items``: per class of TILE_ROWS, int32[I, 8], longest first. ``num_slots``: of states.
    """

    items: tuple[Tables, ...]
    tokens: Ints
    slots: Ints
    merges: Ints
    num_slots: int


def build_list(
    batch: Batch, tables: Tables, geometry: Geometry, policy: Policy, max_slots: int | None
) -> WorkList:
    """Pack and cut; where more than *max_slots* states were kept, with fewer cuts and groups."""
    while True:
        tiles = build_tiles(batch, tables, geometry, policy)
        built = _cut_tiles(tiles, geometry, policy, int(batch.query_start[-1]))
        if max_slots is None or built.num_slots <= max_slots:
            return built
        policy = replace(policy, cut=False, grouped=policy.cut and policy.grouped)


def build_tiles(batch: Batch, tables: Tables, geometry: Geometry, policy: Policy) -> Tiles:
    """Groups of decode tokens, what is left of each decode token, and runs of prefill tokens.

    *tables* [S, B]: every entry is at least 0.
    """
    decodes = np.flatnonzero(batch.query_lens == 1)
    position = batch.seq_lens[decodes] - 1
    token = batch.query_start[decodes]
    first_key = _first_key(position, geometry)
    first, end = first_key // SPLIT_TOKENS, position // SPLIT_TOKENS + 1
    groups = NO_GROUPS
    if policy.grouped and len(decodes) > 1:
        rows = DecodeRows(
            tables=tables if len(decodes) == len(tables) else tables[decodes],
            first_block=first_key // geometry.block_size,
            first_split=first,
            full_end=(position + 1) // SPLIT_TOKENS,
        )
        groups = find_groups(
            rows,
            block_size=geometry.block_size,
            cap=GROUP_ROWS // geometry.group,
            state_cost=policy.state_cost,
            least=policy.launch_cost / geometry.kv_heads,
        )
    whole = Tiles(
        tokens=token,
        counts=np.ones(len(decodes), dtype=np.int64),
        table_row=decodes,
        first_split=first,
        end_split=end,
        first_position=position,
        last_position=position,
        follows=np.full(len(decodes), -1),
        closes=np.ones(len(decodes), dtype=np.bool_),
    )
    parts = [whole]
    if len(groups.counts):
        parts = [_tails(whole, groups), _group_tiles(whole, groups)]
    if len(decodes) < len(batch.query_lens):
        parts.append(_prefill_tiles(batch, geometry, policy))
    return parts[0] if len(parts) == 1 else _joined(parts)


def _tails(whole: Tiles, groups: Groups) -> Tiles:
    """What is left of decode tokens, one tile each, after the splits that groups read for them."""
    first, group = whole.first_split.copy(), whole.follows.copy()
    first[groups.members] = np.repeat(groups.end_split, groups.counts)
    group[groups.members] = np.repeat(np.arange(len(groups.counts)), groups.counts)
    left = np.flatnonzero(first < whole.end_split)
    return Tiles(
        tokens=whole.tokens[left],
        counts=whole.counts[left],
        table_row=whole.table_row[left],
        first_split=first[left],
        end_split=whole.end_split[left],
        first_position=whole.first_position[left],
        last_position=whole.last_position[left],
        follows=np.where(group[left] < 0, -1, group[left] + len(left)),
        closes=whole.closes[left],
    )


def _group_tiles(whole: Tiles, groups: Groups) -> Tiles:
    """A tile for each group of decode tokens; they stand behind those of ``_tails``."""
    members, begins = groups.members, np.cumsum(groups.counts) - groups.counts
    leader = members[begins]
    return Tiles(
        tokens=whole.tokens[members],
        counts=groups.counts,
        table_row=whole.table_row[leader],
        first_split=whole.first_split[leader],
        end_split=groups.end_split,
        first_position=np.minimum.reduceat(whole.first_position[members], begins),
        last_position=np.maximum.reduceat(whole.last_position[members], begins),
        follows=np.full(len(begins), -1),
        closes=np.maximum.reduceat(whole.end_split[members], begins) == groups.end_split,
    )


def _prefill_tiles(batch: Batch, geometry: Geometry, policy: Policy) -> Tiles:
    """Sequences with several tokens, in runs of nearly equal length.

    They fill the tallest tile, or, where that gives too few programs, one below it.
    """
    chunk = np.flatnonzero(batch.query_lens > 1)
    length = batch.query_lens[chunk]
    for rows, programs in zip(TILE_ROWS[:0:-1], policy.programs[:0:-1], strict=True):
        if rows > policy.tallest or rows < geometry.group:
            continue
        runs = -(-length // (rows // geometry.group))
        if int(runs.sum()) * geometry.kv_heads >= programs:
            break
    of = np.repeat(np.arange(len(chunk)), runs)
    place = ragged_range(np.zeros(len(chunk), dtype=np.int64), runs)
    begin = length[of] * place // runs[of]
    stop = length[of] * (place + 1) // runs[of]
    computed = (batch.seq_lens[chunk] - length)[of]
    return Tiles(
        tokens=ragged_range(batch.query_start[chunk], length),
        counts=stop - begin,
        table_row=chunk[of],
        first_split=_first_key(computed + begin, geometry) // SPLIT_TOKENS,
        end_split=(computed + stop - 1) // SPLIT_TOKENS + 1,
        first_position=computed + begin,
        last_position=computed + stop - 1,
        follows=np.full(len(of), -1),
        closes=np.ones(len(of), dtype=np.bool_),
    )


def _cut_tiles(tiles: Tiles, geometry: Geometry, policy: Policy, num_tokens: int) -> WorkList:
    splits = tiles.end_split - tiles.first_split
    tile_class = _classes(tiles, geometry)
    opening = splits
    if policy.cut:
        length = _opening_length(splits, tiles.counts, tile_class, geometry, policy)
        opening = np.where(splits > policy.slack * length, np.minimum(splits, length), splits)
    later = tiles.follows >= 0
    resumes = later & policy.resumed & (opening == splits)[tiles.follows]
    opening = np.where(later & ~resumes, 0, opening)
    flags = np.where(tiles.closes & (opening == splits), 0, KEEPS) + resumes * RESUMES
    cut = _cut(tiles, opening, flags)
    tile, counts = cut.tile, tiles.counts[cut.tile]
    starts = np.cumsum(counts) - counts
    tokens = tiles.tokens
    if not len(tile) == len(splits) == cut.num_opening:
        tokens = tokens[ragged_range((np.cumsum(tiles.counts) - tiles.counts)[tile], counts)]
    slots, merges, num_slots = np.zeros_like(tokens), np.zeros((0, 4), dtype=np.int64), 0
    if cut.flags.any():
        slots, merges, num_slots = _assign_slots(tokens, counts, cut, num_tokens)
    items = np.empty((len(tile), 8), dtype=np.int32)
    for column, values in enumerate(
        (
            starts,
            counts,
            tiles.table_row[tile],
            cut.first,
            cut.end,
            cut.flags,
            tiles.last_position[tile],
            tiles.first_position[tile],
        )
    ):
        items[:, column] = values
    of_class = tile_class[tile]
    end_tile = np.minimum(cut.end * TILES_PER_SPLIT, tiles.last_position[tile] // TILE_KEYS + 1)
    order = np.lexsort((cut.first * TILES_PER_SPLIT - end_tile, of_class))
    ends = np.cumsum(np.bincount(of_class, minlength=len(TILE_ROWS))).tolist()
    items = items[order]
    return WorkList(
        items=tuple(items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)),
        tokens=tokens,
        slots=slots,
        merges=merges,
        num_slots=num_slots,
    )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Items before they are sorted: those that fold several splits, then those of one split each.

    Int64 by item: ``tile``; ``first`` and ``end`` split; ``flags``. ``num_opening``: how many of
    them hold a tile's first splits; the others keep the state of a later split.
    """

    tile: Ints
    first: Ints
    end: Ints
    flags: Ints
    num_opening: int


def _cut(tiles: Tiles, opening: Ints, flags: Ints) -> _Cut:
    """Tiles cut after *opening* splits, of which some may be 0; *flags* are of what opens."""
    splits = tiles.end_split - tiles.first_split
    everything = np.arange(len(splits))
    if (opening == splits).all():
        return _Cut(
            tile=everything,
            first=tiles.first_split,
            end=tiles.end_split,
            flags=flags,
            num_opening=len(splits),
        )
    opened, later = np.flatnonzero(opening), splits - opening
    opened_to = tiles.first_split + opening
    single = ragged_range(opened_to, later)
    return _Cut(
        tile=np.concatenate([opened, np.repeat(everything, later)]),
        first=np.concatenate([tiles.first_split[opened], single]),
        end=np.concatenate([opened_to[opened], single + 1]),
        flags=np.concatenate([flags[opened], np.full(len(single), KEEPS)]),
        num_opening=len(opened),
    )


def _classes(tiles: Tiles, geometry: Geometry) -> Ints:
    """The lowest class with room for a tile's tokens; above what follows it, if anything does,
    since classes are launched from the tallest down."""
    room = [rows // geometry.group for rows in TILE_ROWS]
    classes: Ints = np.searchsorted(room, tiles.counts)
    followed = tiles.follows[tiles.follows >= 0]
    if len(followed):
        classes[followed] = np.maximum(classes[followed], np.searchsorted(room, 1) + 1)
    return classes


def _opening_length(
    splits: Ints, counts: Ints, tile_class: Ints, geometry: Geometry, policy: Policy
) -> Ints:
    """Splits after which each tile would be cut: what one program of its class reads if all are
    equally busy, and more the more tokens would have to keep states."""
    total = np.bincount(tile_class, weights=splits, minlength=len(TILE_ROWS))
    share = np.ceil(total * geometry.kv_heads / np.array(policy.programs))[tile_class]
    length: Ints = np.rint(share * (1 + policy.state_cost * counts)).astype(np.int64)
    return length


def _assign_slots(tokens: Ints, counts: Ints, cut: _Cut, num_tokens: int) -> tuple[Ints, Ints, int]:
    """The slot of each place, the merges, and how many slots there are.

    *tokens* are per place, *counts* per item. A token's slots follow each other: one for the
    splits that are folded before any is read alone, and one for each of those that are.
    """
    item = np.repeat(np.arange(len(counts)), counts)
    first, end, flag, single = (
        cut.first[item],
        cut.end[item],
        cut.flags[item],
        item >= cut.num_opening,
    )
    count = np.zeros(num_tokens, dtype=np.int64)
    count[tokens[flag > 0]] = 1
    count += np.bincount(tokens[single], minlength=num_tokens)
    folded_to = np.zeros(num_tokens, dtype=np.int64)
    for of_kind in (flag == KEEPS) & ~single, flag & RESUMES > 0:
        folded_to[tokens[of_kind]] = end[of_kind]
    base = np.cumsum(count) - count
    slots = base[tokens] + np.where(single, 1 + first - folded_to[tokens], 0)
    kept = count > 0
    kept[tokens[flag & KEEPS == 0]] = False
    merged = np.flatnonzero(kept)
    merges = np.stack([merged, base[merged], count[merged], np.zeros_like(merged)], axis=1)
    return slots, merges, int(count.sum())


def ragged_range(starts: Ints, counts: Ints) -> Ints:
    """``start, start + 1, ...`` of each start, *counts* of them, one after the other."""
    ends = np.cumsum(counts)
    shift = starts - ends + counts
    values: Ints = np.repeat(shift, counts) + np.arange(ends[-1] if len(ends) else 0)
    return values


def _first_key(position: Ints, geometry: Geometry) -> Ints:
    """The first key that a query at *position* sees."""
    if geometry.window is None:
        return np.zeros_like(position)
    first: Ints = np.maximum(position - geometry.window + 1, 0)
    return first


def _joined(parts: list[Tiles]) -> Tiles:
    fields = Tiles.__dataclass_fields__
    return Tiles(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in fields})
