"""Which block holds the keys and values of which prefix. No torch.

The key of a block is chained: a digest over the key before it and the block's own tokens, so it
stands for the whole prefix. The first link is what the values depend on besides the tokens: the
arithmetic and the request's cache salt. A digest proves nothing by itself, so every hit compares
the tokens, the block's own and those before it, and the first link.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

KEY_BYTES = 16


def root_key(arithmetic_id: str, cache_salt: str | None) -> bytes:
    """The link before the first block."""
    salt = "" if cache_salt is None else f":{cache_salt}"
    return f"pagedctl.prefix/1:{arithmetic_id}{salt}".encode()


def chained_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that holds *tokens*, behind the prefix of *parent*."""
    return _digest(parent + array("q", tokens).tobytes())


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], *, block_size: int, num_blocks: int
) -> None:
    """Bring *keys*, those of the first blocks of *tokens*, up to *num_blocks*."""
    for block in range(len(keys), num_blocks):
        parent = keys[-1] if keys else root
        keys.append(chained_key(parent, tokens[block * block_size : (block + 1) * block_size]))


@dataclass(frozen=True, kw_only=True, eq=False)
class CachedBlock:
    """A full block under its key, with its own tokens; ``parent`` has those before them."""

    block: int
    key: bytes
    tokens: tuple[int, ...]
    parent: CachedBlock | bytes = field(repr=False)


Link = CachedBlock | bytes
"""What a block stands behind: the block before it, or the root key."""


class PrefixIndex:
    """Key to block and back; a block has at most one key, a key at most one block."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, key: bytes, tokens: Sequence[int], parent: Link) -> CachedBlock | None:
        """What stands under *key*, if it was computed from these very *tokens* behind *parent*."""
        found = self._by_key.get(key)
        if found is None or found.tokens != tuple(tokens):
            return None
        return found if _is_same_prefix(found.parent, parent) else None

    def put(self, key: bytes, tokens: Sequence[int], block: int, parent: Link) -> CachedBlock:
        """Enter *block*, unless its key is taken or it has one already.

        What the next block stands behind: the entry of this very prefix, if need be one that
        nobody can find.
        """
        found = self.find(key, tokens, parent)
        if found is not None:
            return found
        entry = CachedBlock(block=block, key=key, tokens=tuple(tokens), parent=parent)
        if key not in self._by_key and block not in self._by_block:
            self._by_key[key] = self._by_block[block] = entry
        return entry

    def drop(self, block: int) -> bool:
        """Forget *block*; False if it has no key."""
        entry = self._by_block.pop(block, None)
        if entry is None:
            return False
        del self._by_key[entry.key]
        return True

    def blocks(self) -> tuple[int, ...]:
        """The blocks that have a key, in the order of entry."""
        return tuple(self._by_block)

    def audit(self) -> None:
        """Raise RuntimeError if the two directions disagree."""
        forward = {entry.block: entry for entry in self._by_key.values()}
        if forward != self._by_block or len(forward) != len(self._by_key):
            raise RuntimeError("the prefix index has keys without blocks, or blocks without keys")


def _is_same_prefix(one: Link, other: Link) -> bool:
    """Whether all tokens up to the roots agree; most often both are one object."""
    while one is not other:
        if not isinstance(one, CachedBlock) or not isinstance(other, CachedBlock):
            return one == other
        if one.tokens != other.tokens:
            return False
        one, other = one.parent, other.parent
    return True


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:KEY_BYTES]
