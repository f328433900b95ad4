"""What the leaves of attention share: the site's facts, and the checks of operands."""

from __future__ import annotations

import math

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.ops.attention.units import Geometry
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect, int_fact, operand_dtype


class AttentionSite:
    def __init__(self, site: CallSite) -> None:
        window = site.facts["window"]
        self.head_dim = int_fact(site, "head_dim")
        self.geometry = Geometry(
            q_heads=int_fact(site, "q_heads"),
            kv_heads=int_fact(site, "kv_heads"),
            block_size=int_fact(site, "block_size"),
            window=None if window is None else int_fact(site, "window"),
        )
        self.dtype = operand_dtype(site, "x")
        self.kv_dtype = operand_dtype(site, "kv")
        self.p_dtype = dtype_fact(site, "softmax_p_dtype")
        self.scale = math.log2(math.e) / math.sqrt(self.head_dim)

    def check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        queries: int,
        block_range: tuple[int, int],
    ) -> None:
        """Raise ValueError unless the operands fit a work of *queries* query rows, which reads
        blocks from the lowest to the highest of *block_range*."""
        geometry = self.geometry
        expect("attention: q", q, self.dtype, ("T", geometry.q_heads, self.head_dim))
        blocks = ("num_blocks", geometry.kv_heads, geometry.block_size, self.head_dim)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            expect(f"attention: {name}", cache, self.kv_dtype, blocks)
            if not cache.is_contiguous():
                raise ValueError(f"attention: {name} must be contiguous")
        if q.shape[0] < queries:
            raise ValueError(f"attention: q has {q.shape[0]} rows, the metadata {queries} queries")
        lowest, highest = block_range
        if lowest < 0 or highest >= min(k_cache.shape[0], v_cache.shape[0]):
            raise ValueError(
                f"attention: block tables name blocks {lowest}..{highest}, the caches hold "
                f"{k_cache.shape[0]} and {v_cache.shape[0]}"
            )
