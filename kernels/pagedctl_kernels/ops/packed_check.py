"""The construction check of products with packed weights: at which heights may they be issued?

oneDNN may add K in another order at another number of rows. A height that does is not issued;
products at the heights that are left must keep a row's bits like any (``product_check``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import torch

from pagedctl_kernels.house import CPU_ROW_BLOCK
from pagedctl_kernels.ops.product_check import (
    COMPARED_COLUMNS,
    NARROWEST,
    STRIDE,
    TAIL,
    LinearCheck,
    Verdict,
    num_threads,
    same_bits,
)
from pagedctl_kernels.ops.product_payloads import KINDS, address_offsets, moved_by, payload
from pagedctl_kernels.ops.row_blocks import (
    COLUMN_STEPS,
    PACKED_HEIGHTS,
    packed_product,
    packed_weight,
    split_rows,
)
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES


@cache
def check_packed(k: int, columns: int, dtype: str, threads: int) -> Verdict:
    """Check oneDNN's products with a packed [columns, k] weight, columns padded.

    ``short_blocks`` holds the heights to issue, ascending: 16, and those of 1 and
    PACKED_HEIGHTS that gave the bits of 16 rows.
    """
    drawn = TORCH_DTYPES[dtype]
    width = max(columns, NARROWEST * COLUMN_STEPS[dtype])
    x, wide = payload(2 * CPU_ROW_BLOCK, width, k, drawn)
    whole = packed_weight(wide)
    expected = torch.cat([packed_product(rows, whole) for rows in split_rows(x, CPU_ROW_BLOCK)])
    sums = _cancelling(k, columns, drawn, threads)

    def checked(heights: tuple[int, ...]) -> LinearCheck:
        product = partial(packed_product, heights=heights)
        return LinearCheck(product, packed_weight, x, wide, columns, expected, threads)

    heights = _equal_heights(checked((CPU_ROW_BLOCK,)), sums)
    batches = (heights[-1] + TAIL, CPU_ROW_BLOCK, 1)
    failures = chain(sums.failures(), checked(heights).failures(batches, COLUMN_STEPS[dtype]))
    failure = next(failures, None)
    if failure is not None:
        reason = f"packed [T, {k}] x [{k}, {columns}] {dtype} products at {threads} threads"
        return Verdict(reason=f"{reason} {failure}", short_blocks=())
    return Verdict(reason=None, short_blocks=heights)


def _equal_heights(check: LinearCheck, sums: _Cancelling) -> tuple[int, ...]:
    """16, and the heights that give its bits; what 16 rows keep is for the check to say."""
    packed = check.prepare(check.weight)
    return tuple(
        height
        for height in (1, *PACKED_HEIGHTS)
        if height == CPU_ROW_BLOCK
        or (sums.agree(height) and _drawn_rows_agree(check, packed, height))
    )


def _drawn_rows_agree(check: LinearCheck, packed: torch.Tensor, height: int) -> bool:
    """A block of *height* drawn rows, in other places, has the bits of 16-row blocks.

    At one thread and at the leaf's. Of one row, each kind is tried wherever it may lie.
    """
    for count in sorted({1, check.threads}):
        with num_threads(count):
            for rows, places in _blocks(check, height):
                if not check.agrees(packed_product(rows, packed, (height,)), places):
                    return False
    return True


def _blocks(check: LinearCheck, height: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of *height* drawn rows and their places."""
    if height > 1:
        places = torch.arange(height) * STRIDE % len(check.x)
        yield check.x[places], places
        return
    offsets = (0, *address_offsets(check.x))
    for place in range(KINDS * len(offsets)):
        row = moved_by(check.x[place : place + 1], offsets[place % len(offsets)])
        yield row, torch.tensor([place])


@dataclass(frozen=True)
class _Cancelling:
    """Products whose exact sums are zero: what is left is rounding alone, at full size.

    A sum that is rounded to bfloat16 hides the order in which it was added; these do not.
    ``expected`` are those of 16-row blocks.
    """

    x: torch.Tensor
    packed: torch.Tensor
    expected: torch.Tensor
    threads: int

    def failures(self) -> Iterator[str]:
        """Why not even 16-row blocks keep a row's bits, as the end of a sentence."""
        if not self.agree(CPU_ROW_BLOCK):
            yield "change a row's bits with thread count or place (of sums that cancel)"

    def agree(self, height: int) -> bool:
        """Blocks of *height* rows, in other places, have the bits of 16-row ones.

        At one thread and at the leaf's.
        """
        places = torch.arange(len(self.x)).flip(0)[: max(height, CPU_ROW_BLOCK)]
        for count in sorted({1, self.threads}):
            with num_threads(count):
                for block in torch.split(places, height):
                    got = packed_product(self.x[block], self.packed, (height,))
                    if not same_bits(got, self.expected[block]):
                        return False
        return True


def _cancelling(k: int, columns: int, dtype: torch.dtype, threads: int) -> _Cancelling:
    """The second half of K takes back what the first half adds; an odd last one is zero.

    In bfloat16 the weight has the call site's columns, since their number may decide an order;
    in float32 the drawn rows of ``check_packed`` show that of theirs, so few columns do here.
    """
    generator = torch.Generator().manual_seed(2)
    half = k // 2
    x = torch.zeros(PACKED_HEIGHTS[-1], k, dtype=dtype)
    weight = torch.zeros(COMPARED_COLUMNS, k, dtype=dtype)
    for numbers, sign in ((x, 1), (weight, -1)):
        numbers[:, :half] = torch.randn(len(numbers), half, generator=generator).to(dtype)
        numbers[:, half : 2 * half] = numbers[:, :half] * sign
    if dtype == torch.bfloat16:
        weight = weight.repeat(-(-columns // COMPARED_COLUMNS), 1)[:columns]
    packed = packed_weight(weight)
    blocks = [packed_product(rows, packed) for rows in split_rows(x, CPU_ROW_BLOCK)]
    return _Cancelling(x, packed, torch.cat(blocks), threads)
