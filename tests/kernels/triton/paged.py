"""Paged batches on the device for tests of attention: shared prefixes, and a float64 reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pagedctl_kernels.ops.interfaces import AttentionMetadata
from pagedctl_kernels.sites import attention_site
from tests.kernels import harness
from tests.kernels.harness import Sequences, sequences
from tests.kernels.triton.harness import DEVICE, bind_leaf

Span = tuple[int, int, int]
"""Sequence, first and end position of its queries."""


class DevicePaged(harness.Paged):
    """A poisoned cache on the device. ``forks``: entry i names the sequence whose first blocks
    sequence i reads, and how many keys of it; its own keys and values are made equal there."""

    def __init__(
        self, batch: Sequences, *, forks: Sequence[tuple[int, int] | None] = (), **paging: Any
    ) -> None:
        for i, fork in enumerate(forks):
            if fork is not None:
                parent, keys = fork
                batch.k[i][:keys] = batch.k[parent][:keys]
                batch.v[i][:keys] = batch.v[parent][:keys]
        super().__init__(batch, **paging)
        for i, fork in enumerate(forks):
            if fork is not None:
                shared = fork[1] // self.block_size
                self.block_tables[i, :shared] = self.block_tables[fork[0], :shared]
        self.k_cache, self.v_cache = self.k_cache.to(DEVICE), self.v_cache.to(DEVICE)
        self.batch = Sequences(*([t.to(DEVICE) for t in of] for of in (batch.q, batch.k, batch.v)))
        self.bound: Any = None

    def leaf(self) -> Any:
        if self.bound is None:
            site = attention_site(
                "attention",
                q_heads=self.q_heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                block_size=self.block_size,
                dtype=self.dtype,
                **self.site,
            )
            self.bound = bind_leaf(site, "triton.attention")
        return self.bound

    def metadata(self, spans: Sequence[Span]) -> AttentionMetadata:
        return AttentionMetadata(
            query_start_loc=np.cumsum([0] + [e - s for _, s, e in spans]).astype(np.int32),
            seq_lens=np.array([e for _, _, e in spans], dtype=np.int32),
            block_tables=self.block_tables[[i for i, _, _ in spans]],
        )

    def queries(self, spans: Sequence[Span]) -> torch.Tensor:
        return torch.cat([self.batch.q[i][s:e] for i, s, e in spans])

    def ends(self) -> list[Span]:
        """The last position of every sequence: one decode step."""
        return [(i, n - 1, n) for i, n in enumerate(self.batch.lengths)]

    def reference(self, span: Span) -> torch.Tensor:
        """float64[end - start, Hq, Dh]: the softmax of the field, nothing tiled."""
        i, start, end = span
        q = self.batch.q[i][start:end].double()
        group = self.q_heads // self.kv_heads
        k = self.batch.k[i][:end].double().repeat_interleave(group, 1)
        v = self.batch.v[i][:end].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        at = torch.arange(start, end, device=DEVICE)[:, None]
        keys = torch.arange(end, device=DEVICE)
        hidden = keys > at
        if self.site.get("window") is not None:
            hidden |= keys <= at - self.site["window"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def paged(seed: int, lengths: Sequence[int], **options: Any) -> DevicePaged:
    """Sequences of these lengths; options of ``sequences`` and of DevicePaged. ``order``: of the
    physical blocks."""
    of_batch = ("q_heads", "kv_heads", "head_dim", "dtype")
    shape = {name: options.pop(name) for name in of_batch if name in options}
    options["seed"] = options.pop("order", 0)
    return DevicePaged(sequences(seed, lengths, **shape), **options)
