"""How kernels that take a row in stretches are launched: facts of the width alone, torch-free."""

from __future__ import annotations

_MOST_COLUMNS = 1024
"""Eight columns a thread: one 16-byte access of each operand where D has two bytes."""

WARPS = 4


def constants(width: int) -> dict[str, int]:
    """The kernel's BLOCK columns of a program, and the STRETCHES programs that share a row."""
    block = min(_MOST_COLUMNS, 1 << (width - 1).bit_length())
    return {"WIDTH": width, "BLOCK": block, "STRETCHES": -(-width // block)}
