"""The edits of logits, one stretch of an edited row a program, and the barred tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def edit_kernel(
    logits,
    logits_stride,
    row,
    slot,
    repetition,
    presence,
    frequency,
    bias,
    in_prompt,
    counts,
    vocab,
    BLOCK: tl.constexpr,
):
    """logits A[R, V] in the rows that *row* int64[E] names; tables [S, V] in the rows of *slot*.

    A row without a penalty does not read the tables that only the penalties need: dividing by
    one and subtracting zero change no bit.
    """
    stretches = tl.cdiv(vocab, BLOCK)
    edited = tl.program_id(0) // stretches
    column = (tl.program_id(0) % stretches) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    target = logits + tl.load(row + edited) * logits_stride + column
    entry = tl.load(slot + edited) * vocab + column
    penalty = tl.load(repetition + edited)
    once = tl.load(presence + edited)
    each = tl.load(frequency + edited)
    z = tl.load(target, mask=inside, other=0.0) + tl.load(bias + entry, mask=inside, other=0.0)
    if (penalty != 1.0) | (once != 0.0) | (each != 0.0):
        count = tl.load(counts + entry, mask=inside, other=0)
        if penalty != 1.0:
            prompted = tl.load(in_prompt + entry, mask=inside, other=0) != 0
            repeated = tl.where(z > 0.0, tl.div_rn(z, penalty), z * penalty)
            z = tl.where(prompted | (count > 0), repeated, z)
        penalised = (z - count.to(tl.float32) * each) - once
        z = tl.where(count > 0, penalised, z)
    tl.store(target, z, mask=inside)


@triton.jit(do_not_specialize=["rows", "barred"])
def bar_kernel(
    logits, logits_stride, barred_row, barred_token, rows, vocab, barred, BLOCK: tl.constexpr
):
    """-infinity is added to the logits at (barred_row, barred_token), int64[barred] each.

    A pair outside logits A[rows, vocab] touches nothing.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = pair < barred
    row = tl.load(barred_row + pair, mask=exists, other=0)
    token = tl.load(barred_token + pair, mask=exists, other=0)
    exists = exists & (row >= 0) & (row < rows) & (token >= 0) & (token < vocab)
    place = logits + row * logits_stride + token
    z = tl.load(place, mask=exists, other=0.0)
    tl.store(place, z + float("-inf"), mask=exists)
