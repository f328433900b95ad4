"""The Triton leaf of QK-norm, RoPE and the cache write."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.qk_norm_rope_write.heads_site import WHAT, HeadsSite
from pagedctl_kernels.ops.qk_norm_rope_write.programs import WARPS, HeadPrograms
from pagedctl_kernels.ops.qk_norm_rope_write.triton_kernel import qk_norm_rope_write_heads
from pagedctl_kernels.ops.triton_rows import expect_contiguous, expect_device, row_stride


class TritonQkNormRopeWrite(HeadsSite):
    def __init__(self, site: CallSite) -> None:
        super().__init__(site)
        self.programs = HeadPrograms(
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
        )

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

        Positions and slots live on the device and are not looked at here: a position outside the
        table gives NaN, a slot past the caches writes nothing.
        """
        given = self.check(
            qkv,
            q_weight=q_weight,
            k_weight=k_weight,
            cos_sin=cos_sin,
            positions=positions,
            slot_mapping=slot_mapping,
            k_cache=k_cache,
            v_cache=v_cache,
        )
        for name, tensor in given.items():
            expect_contiguous(f"{WHAT}: {name}", tensor)
            expect_device(f"{WHAT}: {name}", tensor, qkv.device)
        rows = len(qkv)
        q = qkv.new_empty((rows, self.q_heads, self.head_dim))
        if rows:
            qk_norm_rope_write_heads[(rows * self.programs.a_token,)](
                qkv,
                qkv if q_weight is None else q_weight,
                qkv if k_weight is None else k_weight,
                cos_sin,
                positions,
                slot_mapping,
                q,
                k_cache,
                v_cache,
                self.eps,
                row_stride(f"{WHAT}: qkv", qkv),
                len(cos_sin),
                len(k_cache) * self.block_size,
                **self.programs.constants(),
                BLOCK_SIZE=self.block_size,
                QK_NORM=self.qk_norm,
                CAST_BEFORE=self.norm_cast == "before",
                num_warps=WARPS,
                enable_fp_fusion=False,
            )
        return q


def build(site: CallSite, machine: Machine) -> TritonQkNormRopeWrite:
    return TritonQkNormRopeWrite(site)
