"""Numbers in sentences."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """``1 token``, ``1,024 tokens``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
