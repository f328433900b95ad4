"""Rows of the embedding table, one stretch of a row a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embedding_stretch(
    token_ids,
    weight,
    y,
    VOCAB_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    """token_ids int64[T], weight D[VOCAB_SIZE, WIDTH] -> y D[T, WIDTH], all contiguous.

    An id outside the table reads nothing; its row is NaN, which the engine reports as a fault.
    """
    program = tl.program_id(0)
    row = (program // STRETCHES).to(tl.int64)
    columns = (program % STRETCHES) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    token = tl.load(token_ids + row)
    readable = tl.where((token >= 0) & (token < VOCAB_SIZE), WIDTH, 0)
    values = tl.load(weight + token * WIDTH + columns, mask=columns < readable, other=float("nan"))
    tl.store(y + row * WIDTH + columns, values, mask=inside)
