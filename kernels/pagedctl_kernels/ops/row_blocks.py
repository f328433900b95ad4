"""The CPU's matrix product: rows in blocks of one fixed shape, issued as one batched product."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as functional

from pagedctl_kernels.house import CPU_ROW_BLOCK

COLUMN_STEPS: Mapping[str, int] = MappingProxyType({"float32": 16, "float64": 48, "bfloat16": 16})
"""Columns of a CPU product come in multiples of this, by the dtype of its operands."""

NATIVE_BLOCKS = (64, CPU_ROW_BLOCK)
"""Heights of bfloat16 blocks, the largest first."""

CACHE_LINE_BYTES = 64


def row_block_product(
    x: torch.Tensor, weight: torch.Tensor, short_blocks: tuple[int, ...] = ()
) -> torch.Tensor:
    """x A[T, K] times weight A[N, K] transposed, to A[T, N].

    Order: every row's bits are those of the library's [16, K] x [K, N] product. A batch that
    fits one of *short_blocks* is issued as one shorter block; the caller lists only heights
    whose bits its construction check proved equal.
    """
    rows, columns = x.shape[0], weight.shape[0]
    blocks = split_rows(x, block_height(rows, short_blocks))
    product = torch.bmm(blocks, weight.t().expand(blocks.shape[0], -1, -1)).view(-1, columns)
    return product if product.shape[0] == rows else product[:rows]


def native_block_product(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x bfloat16[T, K] times *columns* bfloat16[K, N], to bfloat16[T, N].

    Rows are zero-padded to 16 and issued as blocks of 64 while they last, then of 16; the
    construction check proves that both heights give the same bits. Measured on two threads: the
    library takes [K, N] four times as fast as a transposed [N, K] (576 x 1536), and 16 blocks
    in one batched product cost 6 times as much as one after the other (576 x 3072).
    """
    rows = x.shape[0]
    padded = split_rows(x, CPU_ROW_BLOCK).view(-1, x.shape[1])
    product = x.new_empty(padded.shape[0], columns.shape[1])
    start = 0
    while start < padded.shape[0]:
        height = next(h for h in NATIVE_BLOCKS if start + h <= padded.shape[0])
        end = start + height
        torch.mm(padded[start:end], columns, out=product[start:end])
        start = end
    return product[:rows]


def row_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x A[T, K] times weight A[N, K] transposed, to A[T, N]: one [1, K] product a row.

    The library's one-row product follows the address of its operands (measured: MKL, one
    element past a cache line changes bits), so a row is put at the start of a line first; the
    weight must lie at one already (``aligned``).
    """
    columns = weight.t().unsqueeze(0)
    product = x.new_empty(x.shape[0], weight.shape[0])
    for row, target in zip(x, product, strict=True):
        target.copy_(torch.bmm(row.clone().view(1, 1, -1), columns)[0, 0])
    return product


def aligned(matrix: torch.Tensor) -> torch.Tensor:
    """*matrix* itself if it starts on a cache line, else a copy that does."""
    return matrix if on_cache_line(matrix) else matrix.clone()


def on_cache_line(matrix: torch.Tensor) -> bool:
    return matrix.data_ptr() % CACHE_LINE_BYTES == 0


def padded_columns(columns: int, internal: str) -> int:
    """*columns* rounded up to the width at which every column is an inner one of the library's.

    16 in float32. In float64 48: MKL takes the last N mod 12 columns in another order.
    """
    step = COLUMN_STEPS[internal]
    return columns + -columns % step


def block_height(rows: int, short_blocks: tuple[int, ...]) -> int:
    """The smallest proved block that holds *rows*, else the full one."""
    return min((height for height in short_blocks if height >= rows), default=CPU_ROW_BLOCK)


def split_rows(x: torch.Tensor, height: int) -> torch.Tensor:
    """[T, K] -> [ceil(T / height), height, K], the last block padded with zero rows."""
    missing = -x.shape[0] % height
    padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
    return padded.reshape(-1, height, x.shape[1])
