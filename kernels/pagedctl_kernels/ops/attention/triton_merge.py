"""The Hopper kernel that folds a token's states, split by split, into its output row."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from pagedctl_kernels.ops.attention.triton_kernel import fold


@triton.jit(do_not_specialize_on_alignment=["state_m", "state_l"])
def merge_states(
    out,
    merges,
    merge_count,
    state_m,
    state_l,
    state_a,
    Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Programs take (listed token, head) pairs in turns; out D[T, Hq, Dh].

    CHUNK states are on their way at once. A token without states gets a row of zeros. OVERLAPS:
    launched while the kernel before it, which writes the states, still runs.
    """
    dims = tl.arange(0, BLOCK_DIM)
    in_dims = dims < HEAD_DIM
    count = tl.load(merge_count) * Q_HEADS
    if OVERLAPS:
        gdc_wait()
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = merges + (index // Q_HEADS) * 4
        head = index % Q_HEADS
        token = tl.load(entry).to(tl.int64)
        first_slot = tl.load(entry + 1).to(tl.int64)
        num_slots = tl.load(entry + 2)
        run_m = tl.full([1], float("-inf"), tl.float32)
        run_l = tl.zeros([1, 1], tl.float32)
        run_a = tl.zeros([1, BLOCK_DIM], tl.float32)
        for first in range(0, num_slots, CHUNK):
            for i in tl.static_range(CHUNK):
                slot = first + i
                # Where there is no such state, an empty one: it changes nothing.
                there = tl.full([1], slot, tl.int32) < num_slots
                state = tl.full([1], (first_slot + slot) * Q_HEADS + head, tl.int64)
                m = tl.load(state_m + state, mask=there, other=float("-inf"))
                l = tl.load(state_l + state, mask=there, other=0.0)[:, None]  # noqa: E741
                a_at = state[:, None] * HEAD_DIM + dims[None, :]
                a = tl.load(state_a + a_at, mask=there[:, None] & in_dims[None, :], other=0.0)
                run_m, run_l, run_a = fold(run_m, run_l, run_a, m, l, a)
        if num_slots == 0:
            run_l += 1.0
        y = tl.div_rn(run_a + 0.0, tl.broadcast_to(run_l, run_a.shape))
        y_at = (token * Q_HEADS + head) * HEAD_DIM + dims[None, :]
        tl.store(out + y_at, y.to(out.dtype.element_ty), mask=in_dims[None, :])
