"""The CPU leaf of QK-norm, RoPE and the cache write."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.root_mean_square import rms_normalise
from pagedctl_kernels.ops.torch_checks import (
    dtype_fact,
    expect,
    float_fact,
    int_fact,
    operand_dtype,
)


class TorchQkNormRopeWrite:
    def __init__(self, site: CallSite) -> None:
        self.q_heads = int_fact(site, "q_heads")
        self.kv_heads = int_fact(site, "kv_heads")
        self.head_dim = int_fact(site, "head_dim")
        self.rotary_dim = int_fact(site, "rotary_dim")
        self.block_size = int_fact(site, "block_size")
        self.qk_norm = bool(site.facts["qk_norm"])
        self.eps = float_fact(site, "eps")
        self.norm_cast = str(site.facts["norm_cast"])
        self.dtype = operand_dtype(site, "x")
        self.kv_dtype = operand_dtype(site, "kv")
        self.internal = dtype_fact(site, "internal")
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rotary_dim} is above head_dim {self.head_dim}")

    def __call__(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """qkv D[T, (Hq + 2 Hkv) Dh] -> q D[T, Hq, Dh]; shapes as in ``QkNormRopeWrite``.

        Order: per head, ``rms_normalise`` over head_dim rounded to D (with QK-norm), then for
        each half-split pair two products and one sum in A, rounded once to D.
        """
        self._check(qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache)
        heads = qkv.reshape(qkv.shape[0], self.q_heads + 2 * self.kv_heads, self.head_dim)
        qk, v = torch.split(heads, [self.q_heads + self.kv_heads, self.kv_heads], dim=1)
        if q_weight is not None and k_weight is not None:
            q, k = torch.split(qk, [self.q_heads, self.kv_heads], dim=1)
            qk = torch.cat([self._normed(q, q_weight), self._normed(k, k_weight)], dim=1)
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        q, k = torch.split(rotate(qk, cos, sin), [self.q_heads, self.kv_heads], dim=1)
        write_cache(k_cache, v_cache, k, v, slot_mapping)
        return q

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_normalise(heads, weight, eps=self.eps, norm_cast=self.norm_cast)

    def _check(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        what = "qk_norm_rope_write"
        width = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        expect(f"{what}: qkv", qkv, self.dtype, ("T", width))
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if (weight is not None) != self.qk_norm:
                declared = "declares QK-norm" if self.qk_norm else "declares no QK-norm"
                raise ValueError(f"{what}: this call site {declared}, see {name}")
            if weight is not None:
                expect(f"{what}: {name}", weight, self.dtype, (self.head_dim,))
        expect(f"{what}: cos_sin", cos_sin, self.internal, ("P", self.rotary_dim))
        expect(f"{what}: positions", positions, torch.int64, (qkv.shape[0],))
        expect(f"{what}: slot_mapping", slot_mapping, torch.int64, (qkv.shape[0],))
        blocks = ("num_blocks", self.kv_heads, self.block_size, self.head_dim)
        expect(f"{what}: k_cache", k_cache, self.kv_dtype, blocks)
        expect(f"{what}: v_cache", v_cache, self.kv_dtype, blocks)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + rotary_dim / 2) of heads D[T, n, Dh]; cos, sin A[T, 1, rotary / 2]."""
    half = cos.shape[-1]
    first = heads[..., :half].to(cos.dtype)
    second = heads[..., half : 2 * half].to(cos.dtype)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([*(part.to(heads.dtype) for part in turned), heads[..., 2 * half :]], dim=-1)


def write_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write k and v D[T, Hkv, Dh], rounded to the caches' dtype, at slot = block * block_size +
    offset; a negative slot is none."""
    written = slot_mapping >= 0
    if not written.all():
        k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    _, kv_heads, block_size, head_dim = k_cache.shape
    blocks, offsets = cache_address(slot_mapping, block_size)
    heads = torch.arange(0, kv_heads * block_size, block_size)
    rows = (blocks * (kv_heads * block_size) + offsets).unsqueeze(1) + heads
    for cache, values in ((k_cache, k), (v_cache, v)):
        lines = values.reshape(-1, head_dim).to(cache.dtype)
        cache.view(-1, head_dim).index_copy_(0, rows.view(-1), lines)


def cache_address(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical block and offset in it, of each slot."""
    return torch.div(slots, block_size, rounding_mode="floor"), slots % block_size


def build(site: CallSite, machine: Machine) -> TorchQkNormRopeWrite:
    return TorchQkNormRopeWrite(site)
