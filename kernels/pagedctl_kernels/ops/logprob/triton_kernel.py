"""Kernels of the logprob: a row's maximum, its block sums of exp, and its tokens' logprobs.

The maximum is of the logits: scaling by a positive temperature keeps the order of what it rounds,
so the scaled maximum is the maximum of the scaled logits. A NaN is passed over there and comes
back with the block sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.block_sumexp.triton_kernel import (
    block_sum,
    segment_columns,
    segment_sums,
)
from pagedctl_kernels.ops.triton_math import natural_log, scaled, temperature_operand


@triton.jit
def row_maxima_kernel(logits, maxima, columns, row_stride, parts, PART: tl.constexpr):
    """logits [R, columns] -> maxima [R, parts]: of PART columns each, NaNs passed over."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    column = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * row_stride + column, mask=column < columns, other=float("-inf"))
    tl.store(maxima + row * parts + part, tl.max(values, axis=0))


@triton.jit
def row_scale(temperature, maxima, row, parts, MULTIPLY: tl.constexpr, PARTS: tl.constexpr):
    """What row's logits are scaled by, and its maximum z."""
    operand = temperature_operand(tl.load(temperature + row), MULTIPLY)
    part = tl.arange(0, PARTS)
    highest = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
    return operand, scaled(tl.max(highest, axis=0), operand, MULTIPLY)


@triton.jit
def shift_kernel(
    logits,
    temperature,
    maxima,
    shifted,
    columns,
    row_stride,
    parts,
    PART: tl.constexpr,
    MULTIPLY: tl.constexpr,
    PARTS: tl.constexpr,
):
    """shifted [R, columns] = fl(z - max z), for block sums that are another's."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = (tl.program_id(0) % parts) * PART + tl.arange(0, PART)
    operand, highest = row_scale(temperature, maxima, row, parts, MULTIPLY, PARTS)
    values = tl.load(logits + row * row_stride + column, mask=column < columns, other=0.0)
    tl.store(
        shifted + row * columns + column,
        scaled(values, operand, MULTIPLY) - highest,
        mask=column < columns,
    )


@triton.jit
def quotients(values, divisor, highest):
    """z of values, by fused multiply-adds where that gives the sums the bits of a division.

    Two products and one exact rest round as a division does (the reciprocal is rounded correctly
    and the first guess lies within one unit), as long as the rest does not underflow. It may do
    so below |value| = 2^-78, where z is below 2^-58: then either fl(z - highest) is -highest, or
    both are so small that their exp is 1. Values of 2^100 and more can only be negative here, or
    a NaN, and have an exp of 0, or a NaN, divided or not.
    """
    z = values
    if divisor != 1.0:
        if (divisor > 2.0**-20) & (divisor < 2.0**20) & (tl.abs(highest) < 2.0**60):
            minus = divisor * -1.0
            reciprocal = tl.div_rn(1.0, divisor)
            rest = tl.fma(reciprocal, minus, 1.0) * reciprocal
            near = tl.fma(values, reciprocal, values * rest)
            exact = tl.fma(tl.fma(near, minus, values), reciprocal, near)
            z = tl.where(tl.abs(values) < 2.0**100, exact, values)
        else:
            z = tl.div_rn(values, divisor)
    return z


@triton.jit
def scaled_segment_sums_kernel(
    logits,
    temperature,
    maxima,
    sums,
    columns,
    row_stride,
    parts,
    segments,
    BLOCK_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    MULTIPLY: tl.constexpr,
    PARTS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """The block sums' own kernel on fl(z - max z), which is not stored: sums [R, segments]."""
    row, segment, column, exists = segment_columns(
        columns, segments, BLOCK_SIZE, CHUNKS, GROUP, WIDTH
    )
    operand, highest = row_scale(temperature, maxima, row, parts, MULTIPLY, PARTS)
    values = tl.load(logits + row * row_stride + column, mask=exists, other=float("-inf"))
    z = quotients(values, operand, highest) if FUSED else scaled(values, operand, MULTIPLY)
    totals = segment_sums(z - highest, GROUP, WIDTH)
    tl.store(sums + row * segments + segment, totals, mask=segment < segments)


@triton.jit(do_not_specialize=["tokens"])
def token_logprobs_kernel(
    logits,
    temperature,
    maxima,
    sums,
    token_ids,
    out,
    columns,
    row_stride,
    parts,
    blocks,
    tokens,
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,
    DIRECT: tl.constexpr,
    MULTIPLY: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Chunk sums [R, blocks x CHUNKS] and token_ids [R, tokens] -> logprobs [R, tokens].

    The sums of AHEAD blocks are under way together; they are added left to right. A token that
    has no column gets a NaN.
    """
    tiles = tl.cdiv(tokens, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    total = 0.0
    for first in range(0, blocks, AHEAD):
        for ahead in tl.static_range(AHEAD):
            total += block_sum(sums + row * blocks * CHUNKS, first + ahead, blocks, CHUNKS)
    log_total = tl.where(total == total, natural_log(total), float("nan"))
    operand, highest = row_scale(temperature, maxima, row, parts, MULTIPLY, PARTS)
    place = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    asked = place < tokens
    token = tl.load(token_ids + row * tokens + place, mask=asked, other=-1)
    present = (token >= 0) & (token < columns)
    logit = tl.load(logits + row * row_stride + token, mask=present, other=float("nan"))
    shifted = scaled(logit, operand, MULTIPLY) - highest
    logprob = shifted - log_total if DIRECT else (log_total - shifted) * -1.0
    tl.store(out + row * tokens + place, logprob, mask=asked)
