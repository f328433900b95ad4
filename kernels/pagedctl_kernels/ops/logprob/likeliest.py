"""The likeliest tokens of rows of logits, without a sort of the vocabulary."""

from __future__ import annotations

import torch

from pagedctl_kernels.ops.logprob.triton_likeliest import (
    LAST_ID,
    best_keys_kernel,
    first_ids_kernel,
    rank_keys_kernel,
)

STEPS = 128
"""As many ids are taken one after another; more are taken from the keys of all columns."""

PART = 4096
GROUP = 128
"""Columns of one program, and of one group of them."""


def first_ids(
    logits: torch.Tensor, temperature: torch.Tensor, count: int, *, multiply: bool
) -> torch.Tensor:
    """logits float32[R, V] (rows without gaps), temperature float32[R] -> int64[R, count].

    By (z descending, id ascending); a NaN counts as -infinity. Nothing waits for the device.
    """
    rows, columns = logits.shape
    if not 1 <= count <= columns:
        raise ValueError(f"logprob: count {count} is not in 1..{columns}")
    if not rows:
        return logits.new_empty(0, count, dtype=torch.int64)
    if count > STEPS:
        return _from_all_keys(logits, temperature, count, multiply)
    groups = -(-columns // GROUP)
    parts = -(-columns // PART)
    best = logits.new_empty(rows, groups, dtype=torch.int64)
    best_keys_kernel[(rows * parts,)](
        logits,
        temperature,
        best,
        columns,
        logits.stride(0),
        parts,
        groups,
        GROUPS=PART // GROUP,
        GROUP=GROUP,
        MULTIPLY=multiply,
        num_warps=4,
        enable_fp_fusion=False,
    )
    ids = logits.new_empty(rows, count, dtype=torch.int64)
    first_ids_kernel[(rows,)](
        logits,
        temperature,
        best,
        ids,
        columns,
        logits.stride(0),
        groups,
        count,
        PADDED=1 << (groups - 1).bit_length(),
        GROUP=GROUP,
        MULTIPLY=multiply,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return ids


def _from_all_keys(
    logits: torch.Tensor, temperature: torch.Tensor, count: int, multiply: bool
) -> torch.Tensor:
    """The same by a selection among the keys of all columns, 8 bytes each."""
    rows, columns = logits.shape
    keys = logits.new_empty(rows, columns, dtype=torch.int64)
    parts = -(-columns // PART)
    rank_keys_kernel[(rows * parts,)](
        logits,
        temperature,
        keys,
        columns,
        logits.stride(0),
        parts,
        PART=PART,
        MULTIPLY=multiply,
        num_warps=4,
        enable_fp_fusion=False,
    )
    ids: torch.Tensor = LAST_ID.value - (torch.topk(keys, count).values & 0xFFFFFFFF)
    return ids
