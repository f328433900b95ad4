"""How the RMSNorm kernel is launched: facts of the width alone, torch-free."""

from __future__ import annotations


def block(width: int) -> int:
    """Places of a program: the power of two that holds a row."""
    return 1 << (width - 1).bit_length()


def warps(width: int) -> int:
    """Warps of a program: 16 places a thread."""
    return min(max(block(width) // 512, 1), 16)
