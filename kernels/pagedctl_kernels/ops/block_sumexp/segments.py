"""How blocks of columns are cut for the GPU: the order of their sums follows from the width."""

from __future__ import annotations

from dataclasses import dataclass

from pagedctl_kernels.house import SUMEXP_CHUNK

WARPS = 8
"""Warps of a program; no sum depends on it."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The cut of a row of ``columns`` columns into blocks of ``block_size``.

    A block is cut into ``chunks`` of ``width`` columns, the last of them ragged; a program sums
    ``group`` chunks. ``width`` and the chunks' places follow from ``block_size`` alone.

    Example: 151936 columns in blocks of 32768, chunks of 8192: 5 blocks, 4 chunks, group 1.
    """

    columns: int
    block_size: int

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block_size)

    @property
    def width(self) -> int:
        return min(SUMEXP_CHUNK, 1 << (self.block_size - 1).bit_length())

    @property
    def group(self) -> int:
        return SUMEXP_CHUNK // self.width

    @property
    def chunks(self) -> int:
        """Those that hold a column; the others would add exact zeros."""
        return -(-min(self.block_size, self.columns) // self.width)

    @property
    def count(self) -> int:
        """Segments of a row: the chunks of all its blocks."""
        return self.blocks * self.chunks

    @property
    def programs(self) -> int:
        """Programs a row."""
        return -(-self.count // self.group)
