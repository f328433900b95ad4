"""The CPU leaf of QK-norm, RoPE and the cache write."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.qk_norm_rope_write.heads_site import HeadsSite
from pagedctl_kernels.ops.root_mean_square import rms_normalise


class TorchQkNormRopeWrite(HeadsSite):
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
        self.check(
            qkv,
            q_weight=q_weight,
            k_weight=k_weight,
            cos_sin=cos_sin,
            positions=positions,
            slot_mapping=slot_mapping,
            k_cache=k_cache,
            v_cache=v_cache,
        )
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
