"""The Triton leaf of QK-norm, RoPE and the cache write."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.qk_norm_rope_write.programs import WARPS, HeadPrograms
from pagedctl_kernels.ops.qk_norm_rope_write.triton_kernel import qk_norm_rope_write_heads
from pagedctl_kernels.ops.torch_checks import (
    dtype_fact,
    expect,
    float_fact,
    int_fact,
    operand_dtype,
)
from pagedctl_kernels.ops.triton_rows import expect_contiguous, expect_device, row_stride

WHAT = "qk_norm_rope_write"


class TritonQkNormRopeWrite:
    def __init__(self, site: CallSite) -> None:
        self.q_heads = int_fact(site, "q_heads")
        self.kv_heads = int_fact(site, "kv_heads")
        self.head_dim = int_fact(site, "head_dim")
        self.rotary_dim = int_fact(site, "rotary_dim")
        self.programs = HeadPrograms(
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim,
        )
        self.block_size = int_fact(site, "block_size")
        self.qk_norm = bool(site.facts["qk_norm"])
        self.eps = float_fact(site, "eps")
        self.cast_before = site.facts["norm_cast"] == "before"
        self.dtype = operand_dtype(site, "x")
        self.kv_dtype = operand_dtype(site, "kv")
        self.internal = dtype_fact(site, "internal")
        self.early = False

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
        self._check(qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache)
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
                CAST_BEFORE=self.cast_before,
                num_warps=WARPS,
                EARLY=self.early,
                launch_pdl=self.early,
                enable_fp_fusion=False,
            )
        return q

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
        width = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        expect(f"{WHAT}: qkv", qkv, self.dtype, ("T", width))
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            if (weight is not None) != self.qk_norm:
                declared = "declares QK-norm" if self.qk_norm else "declares no QK-norm"
                raise ValueError(f"{WHAT}: this call site {declared}, see {name}")
            if weight is not None:
                expect(f"{WHAT}: {name}", weight, self.dtype, (self.head_dim,))
                self._check_place(name, weight, qkv.device)
        blocks = ("num_blocks", self.kv_heads, self.block_size, self.head_dim)
        for name, tensor, dtype, shape in (
            ("cos_sin", cos_sin, self.internal, ("P", self.rotary_dim)),
            ("positions", positions, torch.int64, (len(qkv),)),
            ("slot_mapping", slot_mapping, torch.int64, (len(qkv),)),
            ("k_cache", k_cache, self.kv_dtype, blocks),
            ("v_cache", v_cache, self.kv_dtype, blocks),
        ):
            expect(f"{WHAT}: {name}", tensor, dtype, shape)
            self._check_place(name, tensor, qkv.device)

    def _check_place(self, name: str, tensor: torch.Tensor, device: torch.device) -> None:
        expect_contiguous(f"{WHAT}: {name}", tensor)
        expect_device(f"{WHAT}: {name}", tensor, device)


def build(site: CallSite, machine: Machine) -> TritonQkNormRopeWrite:
    return TritonQkNormRopeWrite(site)
