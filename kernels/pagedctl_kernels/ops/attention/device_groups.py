"""Decode tokens that share KV: found from the block tables, read once a step for all of them.

Sequences that continue one prompt name the same physical blocks for it. Their decode tokens are
put in one item over the splits that they share, so that those splits are loaded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedctl_kernels.house import SPLIT_TOKENS
from pagedctl_kernels.ops.attention.units import Ints

Tables = np.ndarray[Any, np.dtype[np.int32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

NOTHING: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """D decode tokens. ``tables`` [D, B]: their block tables, at least 0 everywhere.

    Int64[D]: ``first_block`` and ``first_split``, the first ones that hold a key the token sees;
    ``full_end``, the end of the splits whose last key it sees.
    """

    tables: Tables
    first_block: Ints
    first_split: Ints
    full_end: Ints


@dataclass(frozen=True, kw_only=True)
class Families:
    """Rows of DecodeRows that read the same blocks of their first splits, family after family.

    Int64[L], by row: ``row``; ``family``, from 0; ``shared_to``, the end of those splits.
    """

    row: Ints
    family: Ints
    shared_to: Ints

    def take(self, kept: Flags) -> Families:
        return Families(
            row=self.row[kept],
            family=_numbered(self.family[kept]),
            shared_to=self.shared_to[kept],
        )


@dataclass(frozen=True, kw_only=True)
class Groups:
    """``members``: rows of DecodeRows, group after group, each at most once. ``counts`` int64[N]:
    members of each group, at least 2. ``end_split`` int64[N]: up to there every member reads the
    blocks of the group's first member, from its own first block on; the first member's is the
    lowest, and all have one first split."""

    members: Ints
    counts: Ints
    end_split: Ints


NO_GROUPS = Groups(members=NOTHING, counts=NOTHING, end_split=NOTHING)


def find_groups(
    rows: DecodeRows, *, block_size: int, cap: int, state_cost: float, least: float
) -> Groups:
    """The groups of at most *cap* rows that save most splits, if they save more than *least*.

    Sharing is a tree (a system prompt, then one prompt each): a row takes the level that saves it
    most, ``splits * (1 - 1 / members)``, less *state_cost* for the state that it has to keep.
    """
    live = np.flatnonzero(rows.full_end > rows.first_split)
    if cap < 2 or len(live) < 2:
        return NO_GROUPS
    first = rows.first_split[live]
    found = _same_next_block(rows, Families(row=live, family=first, shared_to=first), block_size)
    saved_by = np.zeros(len(rows.first_split))
    group_of = np.full(len(saved_by), -1)
    end_of = rows.first_split.copy()
    levels, reach = 0, 4
    while len(found.row):
        found = _common_splits(rows, found, block_size, reach)
        sizes = np.bincount(found.family)[found.family]
        saved = (found.shared_to - rows.first_split[found.row]) * (1 - 1 / np.minimum(sizes, cap))
        better = saved - state_cost > saved_by[found.row]
        chosen = found.row[better]
        saved_by[chosen] = saved[better] - state_cost
        group_of[chosen] = levels + found.family[better]
        end_of[chosen] = found.shared_to[better]
        levels, reach = levels + len(found.row), 2 * reach
        deeper = found.take(rows.full_end[found.row] > found.shared_to)
        found = _same_next_block(rows, deeper, block_size)
    if saved_by.sum() <= least:
        return NO_GROUPS
    return _cut_groups(group_of, end_of, rows.first_block, cap)


def _same_next_block(rows: DecodeRows, found: Families, block_size: int) -> Families:
    """Split families by the last block of their next split; drops rows that are left alone.

    Only a guess: a prefix cache that repeats one block repeats all before it. ``_common_splits``
    compares what is read. Rows of a family are in the order of their first blocks.
    """
    last_block = (found.shared_to * SPLIT_TOKENS + SPLIT_TOKENS - 1) // block_size
    key = (found.family << 32) + rows.tables[found.row, last_block]
    order = _order(key, rows.first_block[found.row])
    family = _numbered(key[order])
    kept = np.bincount(family)[family] > 1
    order = order[kept]
    return Families(
        row=found.row[order], family=_numbered(family[kept]), shared_to=found.shared_to[order]
    )


def _common_splits(rows: DecodeRows, found: Families, block_size: int, reach: int) -> Families:
    """Compare each row with the one before it, block by block, for *reach* splits at most.

    Where they differ within the next split, another family begins. A row is compared from its own
    first block on, since its table is 0 before that. ``shared_to`` is what all of a family share.
    """
    known = np.maximum(found.shared_to * SPLIT_TOKENS // block_size, rows.first_block[found.row])
    limit = np.minimum(rows.full_end[found.row], found.shared_to + reach)
    begin, end = int(known.min()), -(-int(limit.max()) * SPLIT_TOKENS // block_size)
    tables = rows.tables[found.row, begin:end]
    differs = np.zeros(tables.shape, dtype=np.bool_)
    np.not_equal(tables[1:], tables[:-1], out=differs[1:])
    if begin < known.max():
        differs &= np.arange(begin, end) >= known[:, None]
    at = differs.argmax(axis=1)
    equal = np.where(differs[np.arange(len(at)), at], at, end - begin) + begin
    equal_to = np.minimum(equal * block_size // SPLIT_TOKENS, limit)
    begins = np.diff(found.family, prepend=-1) != 0
    equal_to = np.where(begins, limit, equal_to)
    begins |= equal_to <= found.shared_to
    equal_to = np.where(begins, limit, equal_to)
    family = np.cumsum(begins) - 1
    shared_to = np.minimum.reduceat(equal_to, np.flatnonzero(begins))[family]
    return Families(row=found.row, family=family, shared_to=shared_to)


def _cut_groups(group_of: Ints, end_of: Ints, first_block: Ints, cap: int) -> Groups:
    """Groups of at most *cap* members, of nearly equal size; rows left alone are dropped."""
    members = _order(group_of, first_block)
    members = members[np.searchsorted(group_of[members], 0) :]
    if not len(members):
        return NO_GROUPS
    family = _numbered(group_of[members])
    sizes = np.bincount(family)
    place = np.arange(len(members)) - (np.cumsum(sizes) - sizes)[family]
    parts = -(-sizes // cap)
    part = (np.cumsum(parts) - parts)[family] + place * parts[family] // sizes[family]
    counts = np.bincount(part)
    members, part = members[counts[part] > 1], part[counts[part] > 1]
    first = np.flatnonzero(np.diff(part, prepend=-1))
    return Groups(
        members=members,
        counts=counts[counts > 1],
        end_split=end_of[members[first]],
    )


def _order(key: Ints, first_block: Ints) -> Ints:
    """A stable order by key, then by first block; without a window all of those are 0."""
    order: Ints = (
        np.lexsort((first_block, key)) if first_block.any() else key.argsort(kind="stable")
    )
    return order


def _numbered(sorted_keys: Ints) -> Ints:
    """0 for the first run of equal keys, 1 for the next, ..."""
    numbers = np.zeros(len(sorted_keys), dtype=np.int64)
    np.cumsum(sorted_keys[1:] != sorted_keys[:-1], out=numbers[1:])
    return numbers
