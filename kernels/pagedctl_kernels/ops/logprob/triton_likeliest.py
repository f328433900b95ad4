"""Kernels of the likeliest tokens: the first ids of a row by (z descending, id ascending).

A row's columns are cut into groups. The first id is that of the largest group's best key, and the
next one comes from another group or from the rest of that group: as many steps as ids, none of
which looks at more than one group and the groups' best keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.triton_math import scaled, temperature_operand

LAST_ID = tl.constexpr(2**31 - 1)
"""The id whose key ends in zeros."""

_NONE = tl.constexpr(-(2**63))


@triton.jit
def rank_keys(logits, column, columns, operand, MULTIPLY: tl.constexpr):
    """Keys int64 of a row's columns: the larger one comes first; no two are equal.

    The upper half has the order of z (-0.0 as +0.0, NaN as -infinity), the lower half is LAST_ID
    minus the id. A column that does not exist has the least key of all.
    """
    exists = column < columns
    z = scaled(tl.load(logits + column, mask=exists, other=0.0), operand, MULTIPLY)
    z = tl.where(z == z, tl.where(z == 0.0, 0.0, z), float("-inf"))
    pattern = z.to(tl.int32, bitcast=True)
    rising = pattern ^ ((pattern >> 31) & 0x7FFFFFFF)
    key = (rising.to(tl.int64) << 32) | (column ^ LAST_ID).to(tl.int64)
    return tl.where(exists, key, _NONE)


@triton.jit
def rank_keys_kernel(
    logits,
    temperature,
    keys,
    columns,
    row_stride,
    parts,
    PART: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """keys [R, columns] of all columns."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = (tl.program_id(0) % parts) * PART + tl.arange(0, PART)
    operand = temperature_operand(tl.load(temperature + row), MULTIPLY)
    key = rank_keys(logits + row * row_stride, column, columns, operand, MULTIPLY)
    tl.store(keys + row * columns + column, key, mask=column < columns)


@triton.jit
def best_keys_kernel(
    logits,
    temperature,
    best,
    columns,
    row_stride,
    parts,
    groups,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """best [R, groups]: the largest key of each group of GROUP columns, GROUPS a program."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    group = (tl.program_id(0) % parts) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    operand = temperature_operand(tl.load(temperature + row), MULTIPLY)
    key = rank_keys(logits + row * row_stride, column, columns, operand, MULTIPLY)
    tl.store(best + row * groups + group, tl.max(key, axis=1), mask=group < groups)


@triton.jit(do_not_specialize=["count"])
def first_ids_kernel(
    logits,
    temperature,
    best,
    ids,
    columns,
    row_stride,
    groups,
    count,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    MULTIPLY: tl.constexpr,
):
    """best [R, groups] -> ids [R, count]; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    operand = temperature_operand(tl.load(temperature + row), MULTIPLY)
    group = tl.arange(0, PADDED)
    left = tl.load(best + row * groups + group, mask=group < groups, other=_NONE)
    for place in range(count):
        key = tl.max(left, axis=0)
        token = (key & 0xFFFFFFFF).to(tl.int32) ^ LAST_ID
        tl.store(ids + row * count + place, token.to(tl.int64))
        column = (token // GROUP) * GROUP + tl.arange(0, GROUP)
        keys = rank_keys(logits + row * row_stride, column, columns, operand, MULTIPLY)
        rest = tl.max(tl.where(keys < key, keys, _NONE), axis=0)
        left = tl.where(group == token // GROUP, rest, left)
