"""The CPU leaf of attention: 64-key tiles in 256-key splits, batched over units."""

from __future__ import annotations

import torch

from pagedctl_kernels.house import SPLIT_TOKENS, TILE_KEYS
from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.attention.attention_site import AttentionSite
from pagedctl_kernels.ops.attention.tiles import (
    State,
    merge,
    output_rows,
    score_tiles,
    split_states,
)
from pagedctl_kernels.ops.attention.units import (
    AttentionWork,
    Chunk,
    Part,
    build_work,
    read_batch,
)
from pagedctl_kernels.ops.interfaces import AttentionMetadata
from pagedctl_kernels.ops.linear import require_threads
from pagedctl_kernels.ops.product_check import check_tile_products
from pagedctl_kernels.ops.torch_checks import (
    dtype_fact,
    require_ieee,
)
from pagedctl_kernels.plan import LeafUnfit

KEY_BYTES_AT_ONCE = 16 * 2**20
"""Gathered keys of one part: what stays in a core's cache, and bounds memory."""


class TorchAttention(AttentionSite):
    """Batch-invariant; decode, prefill and any chunking give a row the same bits.

    Raises LeafUnfit if this machine's library does not keep the bits of tile products.
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        super().__init__(site)
        self.internal = dtype_fact(site, "internal")
        split_bytes = SPLIT_TOKENS * self.head_dim * self.internal.itemsize
        self.max_items = max(KEY_BYTES_AT_ONCE // split_bytes, 1)
        require_threads(site, machine)
        require_ieee(site)
        internal = str(site.facts["internal"])
        verdict = check_tile_products(self.head_dim, internal, machine.threads)
        if verdict.reason is not None:
            raise LeafUnfit(verdict.reason)
        self.short_blocks = verdict.short_blocks

    def prepare(self, metadata: AttentionMetadata) -> AttentionWork:
        """The step's units and their keys, on the host; raises ValueError if inconsistent."""
        batch = read_batch(metadata, self.geometry)
        return build_work(batch, self.geometry, self.max_items, self.short_blocks)

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        work: AttentionWork,
    ) -> torch.Tensor:
        """q D[T, Hq, Dh] -> D[T, Hq, Dh]; the step's own keys are in the caches already.

        Caches [num_blocks, Hkv, block_size, Dh] in the site's kv dtype, contiguous. Rows of q
        past the metadata's last query give zeros. Order: ``split_states`` of each unit and
        split, then ``merge`` left to right.
        """
        self.check(q, k_cache, v_cache, queries=work.num_tokens, block_range=work.block_range)
        queries = _with_padding_row(q, self.internal)
        run_width = self.geometry.run * self.head_dim
        keys, values = k_cache.view(-1, run_width), v_cache.view(-1, run_width)
        out = torch.zeros_like(queries, dtype=self.dtype)
        for chunk in work.chunks:
            states = self._chunk_states(chunk, queries, keys, values)
            rows = output_rows(merge_units(states, chunk), self.dtype)
            out[chunk.query_rows] = rows.view(-1, self.head_dim)
        return out[1:].view(q.shape)

    def _chunk_states(
        self, chunk: Chunk, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> State:
        """States of a chunk's items; keys and values are the caches viewed [runs, run * Dh]."""
        if len(chunk.parts) == 1:
            return self._part_states(chunk.parts[0], queries, keys, values)
        states = self._empty_states(chunk)
        for part in chunk.parts:
            states.put(part.items, self._part_states(part, queries, keys, values))
        return states

    def _part_states(
        self, part: Part, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> State:
        shape = (len(part.items), part.tiles, TILE_KEYS, self.head_dim)
        k = keys.index_select(0, part.runs).to(self.internal).view(shape)
        v = values.index_select(0, part.runs).to(self.internal).view(shape)
        scores = score_tiles(queries[part.query_rows], k, self.scale)
        if part.mask is not None:
            part.mask.hide(scores, v)
        return split_states(scores, v, self.p_dtype)

    def _empty_states(self, chunk: Chunk) -> State:
        shape = (chunk.num_items, chunk.height)
        return State(
            torch.empty(shape, dtype=self.internal),
            torch.empty(shape, dtype=self.internal),
            torch.empty((*shape, self.head_dim), dtype=self.internal),
        )


def merge_units(states: State, chunk: Chunk) -> State:
    """Merge each unit's splits left to right: items' states -> units' states."""
    if len(chunk.units_with) == 1:
        return states
    merged = states.at(chunk.first_item)
    for split, count in enumerate(chunk.units_with[1:], start=1):
        left = State(merged.maximum[:count], merged.total[:count], merged.accumulator[:count])
        merged.put(slice(count), merge(left, states.at(chunk.first_item[:count] + split)))
    return merged


def _with_padding_row(q: torch.Tensor, internal: torch.dtype) -> torch.Tensor:
    """[T, Hq, Dh] -> A[1 + T * Hq, Dh], a zero row first."""
    rows = q.reshape(-1, q.shape[-1]).to(internal)
    return torch.cat([rows.new_zeros(1, rows.shape[1]), rows])


def build(site: CallSite, machine: Machine) -> TorchAttention:
    return TorchAttention(site, machine)
