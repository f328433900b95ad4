"""The summation orders of the house on a CUDA device, as trees that are written out."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.house import GROUP_VALUES


@triton.jit
def halving_tree_sum(values, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sum values [ROWS, SIZE] over the last dimension; returns [ROWS]. SIZE is a power of two.

    Order: the upper half is added to the lower half, element by element, until one value is
    left. Every step is a sum over a dimension of two, so no compiler, layout or warp count has
    a say in it.
    """
    LEVELS: tl.constexpr = SIZE.bit_length() - 1
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, (ROWS, 2, SIZE >> (level + 1))), axis=1)
    return tl.reshape(values, (ROWS,))


@triton.jit
def grouped_tree_sum(
    values, ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr = GROUP_VALUES
):
    """Sum values [ROWS, SIZE] over the last dimension; returns [ROWS]. SIZE is a power of two.

    Order: a halving tree over each group of GROUP neighbours, then one over the groups' sums. The
    neighbours lie in one thread, so this costs a fraction of ``halving_tree_sum`` on whole rows.
    """
    sums = group_sums(values, ROWS, SIZE)
    if SIZE > GROUP:
        total = halving_tree_sum(sums, ROWS, SIZE // GROUP)
    else:
        total = tl.reshape(sums, (ROWS,))
    return total


@triton.jit
def group_sums(values, ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr = GROUP_VALUES):
    """The sums of the groups of values [ROWS, SIZE]: [ROWS, SIZE / GROUP], at least one a row."""
    WIDTH: tl.constexpr = GROUP if SIZE > GROUP else SIZE
    COUNT: tl.constexpr = ROWS * (SIZE // WIDTH)
    sums = halving_tree_sum(tl.reshape(values, (COUNT, WIDTH)), COUNT, WIDTH)
    return tl.reshape(sums, (ROWS, SIZE // WIDTH))
