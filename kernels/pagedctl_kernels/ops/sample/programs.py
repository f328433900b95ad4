"""How the work of sampling is cut into programs; no bit depends on it. No torch, no triton."""

from __future__ import annotations

CHUNK = 4096
"""Columns of a row that one program scans."""

PART = 1024
"""Columns of a chunk whose candidates are collected together."""

CAPACITY = 8192
"""Candidates of a row at least; a row with more of them is searched in its logits."""

CANDIDATES = 2**22
"""Candidates of all rows together, where the rows are few: 64 MiB."""

SEARCHED = 1024
"""Entries of a row that are searched at once."""

WARPS = 4
SEARCH_WARPS = 8


def capacity_of(rows: int, columns: int) -> int:
    """Candidates that a row has room for among *rows* rows of so many columns.

    A multiple of 16, like every other: else kernels would be compiled anew for some row counts.
    """
    return min(max(CAPACITY, CANDIDATES // rows // 16 * 16), -(-columns // 16) * 16)
