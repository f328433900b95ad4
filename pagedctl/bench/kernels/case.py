"""One op at one shape: our launches over rotating buffers, and those of its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagedctl.bench.kernels.replay import Launch

_ROTATED_BYTES = 192 * 2**20
"""Above three times the largest cache."""

_MOST_COPIES = 96


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed.

    ``product`` is None where the house has no leaf for this GPU. ``moved_bytes`` reads each input
    and writes each output once; ``operations`` are those of tensor cores.
    """

    op: str
    workload: str
    shape: str
    moved_bytes: int
    operations: int = 0
    product: Sequence[Launch] | None
    peers: Mapping[str, Sequence[Launch]] = field(default_factory=dict)


def copies(moved_bytes: int) -> int:
    """How many sets of operands a case rotates over."""
    return min(max(_ROTATED_BYTES // moved_bytes + 1, 2), _MOST_COPIES)
