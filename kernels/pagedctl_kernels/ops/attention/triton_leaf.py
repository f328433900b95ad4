"""The Hopper leaf of attention: a work list on the device, one launch per tile height, a merge."""

from __future__ import annotations

import torch
import triton

from pagedctl_kernels.house import SPLIT_TOKENS
from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.attention.attention_site import AttentionSite
from pagedctl_kernels.ops.attention.device_tiles import TILE_ROWS, Policy
from pagedctl_kernels.ops.attention.device_work import Capacity, DeviceWork, WorkBuilder
from pagedctl_kernels.ops.attention.triton_launch import attend, plan_launch
from pagedctl_kernels.ops.interfaces import AttentionMetadata
from pagedctl_kernels.ops.triton_rows import expect_contiguous, expect_device
from pagedctl_kernels.plan import LeafUnfit

PROGRAMS = (528, 264, 66)
"""Programs that keep 132 multiprocessors busy, for tiles of 16, 64 and 128 rows."""

ITEM_COST = 0.02
"""What an item takes beside its keys, in splits: its list entry, its queries, its first loads."""


class TritonAttention(AttentionSite):
    """Batch-invariant; decode, prefill, groups and any packing give a row the same bits.

    Raises LeafUnfit if a kv head has more query heads than the tallest tile has rows.
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        super().__init__(site)
        group = self.geometry.group
        if group > TILE_ROWS[-1]:
            raise LeafUnfit(f"{group} query heads per kv head, a tile has {TILE_ROWS[-1]} rows")
        self.launch = plan_launch(
            q_heads=self.geometry.q_heads,
            kv_heads=self.geometry.kv_heads,
            head_dim=self.head_dim,
            block_size=self.geometry.block_size,
            window=self.geometry.window,
            scale=self.scale,
            p_dtype=self.p_dtype,
        )
        state_bytes = 2 * group * (self.head_dim + 2) * torch.float32.itemsize
        split_bytes = 2 * SPLIT_TOKENS * self.head_dim * self.kv_dtype.itemsize
        tensor_cores = torch.float32 not in (self.dtype, self.launch.p_dtype)
        policy = Policy(
            programs=PROGRAMS,
            state_cost=state_bytes / split_bytes + ITEM_COST,
            tallest=TILE_ROWS[-1] if tensor_cores or group > TILE_ROWS[-2] else TILE_ROWS[-2],
        )
        device = torch.device("cpu" if triton.knobs.runtime.interpret else machine.kind)
        self.builder = WorkBuilder(self.geometry, self.head_dim, policy, device)

    def prepare(self, metadata: AttentionMetadata) -> DeviceWork:
        """The step's work list, copied to the device; raises ValueError if inconsistent."""
        return self.builder.prepare(metadata)

    def reserve(self, capacity: Capacity) -> DeviceWork:
        """Memory for the work lists of steps that a recorded CUDA graph serves in turn."""
        return self.builder.reserve(capacity)

    def refill(self, work: DeviceWork, metadata: AttentionMetadata, *, rows: int) -> DeviceWork:
        """Another step in reserved memory. *rows*: the rows of q, which a graph was recorded with;
        those past the metadata's last query give zeros. Raises ValueError if it does not fit."""
        return self.builder.refill(work, metadata, rows)

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        work: DeviceWork,
    ) -> torch.Tensor:
        """q D[T, Hq, Dh] -> D[T, Hq, Dh]; the step's own keys are in the caches already.

        Caches [num_blocks, Hkv, block_size, Dh] in the site's kv dtype, contiguous. Rows of q
        past the metadata's last query give zeros.
        """
        self.check(q, k_cache, v_cache, queries=work.rows, block_range=work.block_range)
        expect_contiguous("attention: q", q)
        for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            expect_device(f"attention: {name}", tensor, work.buffer.device)
        out = torch.empty_like(q) if q.shape[0] == work.rows else torch.zeros_like(q)
        if work.rows:
            attend(q, k_cache, v_cache, out, work, self.launch)
        return out


def build(site: CallSite, machine: Machine) -> TritonAttention:
    return TritonAttention(site, machine)
