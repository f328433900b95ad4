"""How tiles of attention are launched on Hopper, as data: a function of static facts alone.

No choice here changes a bit: every row's arithmetic is the same in a tile of any height.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TileForm:
    """``warps`` and pipeline ``stages`` of a program, and how many ``programs`` run on one SM.

    ``sum_columns``: columns of ones in the dot that sums a row's probabilities; all of them get
    the same sum. ``registers``: the most that a thread may use, or None.
    """

    warps: int
    stages: int
    programs: int
    sum_columns: int = 8
    registers: int | None = None


_TENSOR_CORE = {
    (16, 64): TileForm(warps=4, stages=3, programs=4),
    (16, 128): TileForm(warps=4, stages=2, programs=4, registers=128),
    (16, 256): TileForm(warps=8, stages=2, programs=2),
    (64, 64): TileForm(warps=4, stages=3, programs=2),
    (64, 128): TileForm(warps=4, stages=3, programs=2),
    (64, 256): TileForm(warps=8, stages=2, programs=1),
    (128, 64): TileForm(warps=8, stages=3, programs=1, sum_columns=16),
    (128, 128): TileForm(warps=8, stages=3, programs=1, sum_columns=16),
    (128, 256): TileForm(warps=8, stages=2, programs=1, sum_columns=16),
}
"""By (rows, head_dim rounded up to one of these), of two-byte operands."""


@dataclass(frozen=True, kw_only=True)
class TallForm:
    """Tiles of 128 rows in two warpgroups beside one that loads ``stages`` tiles ahead, with the
    ``registers`` that their threads may use."""

    stages: int
    load_registers: int
    row_registers: int


_TALL = {
    64: TallForm(stages=6, load_registers=56, row_registers=224),
    128: TallForm(stages=4, load_registers=56, row_registers=224),
}
"""By head_dim rounded up, of two-byte operands."""

_CUDA_CORE = TileForm(warps=8, stages=2, programs=1)
"""Of IEEE float32 products."""


def tile_form(rows: int, block_dim: int, tensor_cores: bool) -> TileForm:
    """The launch of tiles of *rows* rows; *block_dim*: head_dim as a power of two."""
    if not tensor_cores:
        return _CUDA_CORE
    return _TENSOR_CORE[rows, max(block_dim, 64)]


def tall_form(rows: int, block_dim: int, tensor_cores: bool) -> TallForm | None:
    """The launch of tiles that a warpgroup of loads feeds, where there is such a kernel."""
    return _TALL.get(block_dim) if rows == 128 and tensor_cores else None
