"""How the edits are cut into programs. No bit depends on it. No torch, no triton."""

from __future__ import annotations

BLOCK = 2048
"""Columns that one program edits."""

BARRED_BLOCK = 256
"""Barred tokens of one program."""

WARPS = 4
