"""The CPU's matrix products: rows in blocks of few fixed heights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as functional

from pagedctl_kernels.house import CPU_ROW_BLOCK

COLUMN_STEPS: Mapping[str, int] = MappingProxyType({"float32": 16, "float64": 48, "bfloat16": 16})
"""Columns of a CPU product come in multiples of this, by the dtype of its operands."""

PACKED_HEIGHTS = (2, 4, 8, 16, 24, 32, 48, 64, 128)
"""Heights at which oneDNN may be given a block of rows.

Some add K in another order than 16 rows do (measured: with AMX in bfloat16, 24, 32 and 48 rows
from K = 576 on; with AVX512 in float32, one row at K = 1536). The construction check selects
those that do not.
"""

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


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight [N, K], float32 or bfloat16, in the layout that oneDNN's products read it from.

    The layout is opaque: shape and dtype stay, the values are read by ``packed_product`` alone.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, CPU_ROW_BLOCK)
    return packed


def repack(packed: torch.Tensor, weight: torch.Tensor) -> None:
    """Put *weight* into the tensor *packed*, which must have been packed from one of its shape.

    The tensor is given new memory. A copy between two packed tensors would keep the memory, and
    not the bits: it flushes bfloat16 subnormals (measured).
    """
    packed.data = packed_weight(weight)


def packed_product(
    x: torch.Tensor, packed: torch.Tensor, heights: tuple[int, ...] = (CPU_ROW_BLOCK,)
) -> torch.Tensor:
    """x [T, K] times a packed weight [N, K] transposed, to [T, N], all of one dtype.

    Rows are issued in blocks of the last of *heights* (ascending; those that a construction
    check selected), the rest as the smallest that holds it, zero rows added. Measured on one
    thread against MKL's product of a plain weight (576 x 3072, float32): 0.34x the time at 8
    rows, 0.43x at 32.
    """
    if x.shape[0] <= heights[-1]:
        return _packed_block(x, packed, packed_height(len(x), heights))
    blocks = torch.split(x, heights[-1])
    return torch.cat(
        [_packed_block(one, packed, packed_height(len(one), heights)) for one in blocks]
    )


def _packed_block(x: torch.Tensor, packed: torch.Tensor, height: int) -> torch.Tensor:
    rows = x.shape[0]
    missing = height - rows
    padded = functional.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, packed, None, "none", [], "")
    return product[:rows] if missing else product


def packed_height(rows: int, heights: tuple[int, ...]) -> int:
    """The smallest of *heights* (ascending) that holds *rows*, at most the last."""
    return next(height for height in heights if height >= rows)


def has_packed_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of *dtype* in this build of torch and on this CPU.

    It takes bfloat16 only where the CPU has instructions that help it, and raises elsewhere.
    """
    operators = ("_reorder_linear_weight", "_linear_pointwise")
    if not torch._C._has_mkldnn or not all(hasattr(torch.ops.mkldnn, one) for one in operators):
        return False
    columns = COLUMN_STEPS[str(dtype).removeprefix("torch.")]
    try:
        packed_weight(torch.ones(columns, columns, dtype=dtype))
    except RuntimeError:
        return False
    return True


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
