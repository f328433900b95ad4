"""QK-norm, RoPE and the cache write: a few heads of one token a program."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedctl_kernels.ops.triton_halving_tree import (
    group_sums,
    grouped_tree_sum,
    halving_tree_sum,
)
from pagedctl_kernels.ops.triton_root_mean_square import normalised, reciprocal_root


@triton.jit
def qk_norm_rope_write_heads(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    slot_mapping,
    q,
    k_cache,
    v_cache,
    eps,
    qkv_stride,
    table_rows,
    slots,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QK_NORM: tl.constexpr,
    CAST_BEFORE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HALF_GROUPS: tl.constexpr,
):
    """qkv D[T, (Hq + 2 Hkv) Dh] -> q D[T, Hq, Dh], and k and v to slots of the caches.

    A program takes HEADS heads of one token, all of q, of k or of v. HEAD_BLOCK, HALF_BLOCK and
    REST_BLOCK are the powers of two that hold a head, half of its rotated dimensions and those
    past them; HALF_GROUPS counts the groups of the sum in half a head, 0 where the rotated halves
    are not those of the head. A position past the table's ``table_rows`` gives NaN; a negative
    slot, or one past the caches' ``slots``, writes nothing.
    """
    Q_TILES: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    TILES: tl.constexpr = Q_TILES + 2 * KV_TILES
    program = tl.program_id(0)
    token = (program // TILES).to(tl.int64)
    tile = program % TILES
    line = qkv + token * qkv_stride
    slot = tl.load(slot_mapping + token)
    position = tl.load(positions + token)
    angle_count = tl.where((position >= 0) & (position < table_rows), ROTARY_DIM // 2, 0)
    angles = cos_sin + position * ROTARY_DIM
    if tile < Q_TILES:
        heads = tile * HEADS + tl.arange(0, HEADS)
        inside = heads < Q_HEADS
        turn_heads(
            line + heads * HEAD_DIM,
            inside,
            q_weight,
            angles,
            angle_count,
            q + (token * Q_HEADS + heads) * HEAD_DIM,
            inside,
            eps,
            HEAD_DIM,
            ROTARY_DIM,
            QK_NORM,
            CAST_BEFORE,
            HEADS,
            HEAD_BLOCK,
            HALF_BLOCK,
            REST_BLOCK,
            HALF_GROUPS,
        )
    else:
        written_heads = tl.where((slot >= 0) & (slot < slots), KV_HEADS, 0)
        heads = (tile - Q_TILES) % KV_TILES * HEADS + tl.arange(0, HEADS)
        inside = heads < KV_HEADS
        written = heads < written_heads
        cache_rows = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        if tile < Q_TILES + KV_TILES:
            turn_heads(
                line + (Q_HEADS + heads) * HEAD_DIM,
                inside,
                k_weight,
                angles,
                angle_count,
                k_cache + cache_rows * HEAD_DIM,
                written,
                eps,
                HEAD_DIM,
                ROTARY_DIM,
                QK_NORM,
                CAST_BEFORE,
                HEADS,
                HEAD_BLOCK,
                HALF_BLOCK,
                REST_BLOCK,
                HALF_GROUPS,
            )
        else:
            dims = tl.arange(0, HEAD_BLOCK)
            place = written[:, None] & (dims < HEAD_DIM)[None, :]
            source = (line + (Q_HEADS + KV_HEADS + heads) * HEAD_DIM)[:, None] + dims[None, :]
            values = tl.load(source, mask=place)
            target = (v_cache + cache_rows * HEAD_DIM)[:, None] + dims[None, :]
            tl.store(target, values.to(v_cache.dtype.element_ty), mask=place)


@triton.jit
def turn_heads(
    source,
    inside,
    weight,
    angles,
    angle_count,
    target,
    written,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    QK_NORM: tl.constexpr,
    CAST_BEFORE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HALF_GROUPS: tl.constexpr,
):
    """Norm and rotate the heads at source [HEADS] (those inside) to target [HEADS] (if written).

    Order: ``grouped_tree_sum`` over the squares of a head; two products and one sum, each rounded,
    for either half of a pair; one rounding to D, and one to the target's dtype.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    half = tl.arange(0, HALF_BLOCK)
    in_half = half < HALF
    halves = inside[:, None] & in_half[None, :]
    first_places = source[:, None] + half[None, :]
    first = tl.load(first_places, mask=halves, other=0.0)
    second = tl.load(first_places + HALF, mask=halves, other=0.0)
    known = half < angle_count
    cos = tl.load(angles + half, mask=known, other=float("nan"))[None, :]
    sin = tl.load(angles + HALF + half, mask=known, other=float("nan"))[None, :]
    if QK_NORM:
        if HALF_GROUPS:
            # The halves that the tree over the groups adds first are at hand.
            lower, upper = first.to(tl.float32), second.to(tl.float32)
            sums = group_sums(lower * lower, HEADS, HALF) + group_sums(upper * upper, HEADS, HALF)
            sums = halving_tree_sum(sums, HEADS, HALF_GROUPS)
        else:
            dims = tl.arange(0, HEAD_BLOCK)
            head = inside[:, None] & (dims < HEAD_DIM)[None, :]
            wide = tl.load(source[:, None] + dims[None, :], mask=head, other=0.0).to(tl.float32)
            sums = grouped_tree_sum(wide * wide, HEADS, HEAD_BLOCK)
        rstd = reciprocal_root(sums, eps, HEAD_DIM)[:, None]
        first_weight = tl.load(weight + half, mask=in_half, other=0.0)[None, :]
        second_weight = tl.load(weight + HALF + half, mask=in_half, other=0.0)[None, :]
        first = normalised(first, rstd, first_weight, CAST_BEFORE)
        second = normalised(second, rstd, second_weight, CAST_BEFORE)
    y1 = (first.to(tl.float32) * cos - second.to(tl.float32) * sin).to(first.dtype)
    y2 = (second.to(tl.float32) * cos + first.to(tl.float32) * sin).to(first.dtype)
    stored = written[:, None] & in_half[None, :]
    first_targets = target[:, None] + half[None, :]
    tl.store(first_targets, y1.to(target.dtype.element_ty), mask=stored)
    tl.store(first_targets + HALF, y2.to(target.dtype.element_ty), mask=stored)
    if ROTARY_DIM < HEAD_DIM:
        rest = ROTARY_DIM + tl.arange(0, REST_BLOCK)
        in_rest = rest < HEAD_DIM
        kept = tl.load(
            source[:, None] + rest[None, :], mask=inside[:, None] & in_rest[None, :], other=0.0
        )
        if QK_NORM:
            rest_weight = tl.load(weight + rest, mask=in_rest, other=0.0)[None, :]
            kept = normalised(kept, rstd, rest_weight, CAST_BEFORE)
        tl.store(
            target[:, None] + rest[None, :],
            kept.to(target.dtype.element_ty),
            mask=written[:, None] & in_rest[None, :],
        )
