"""What the leaves of QK-norm, RoPE and the cache write share: the site's facts, the checks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.ops.torch_checks import (
    dtype_fact,
    expect,
    float_fact,
    int_fact,
    operand_dtype,
)

WHAT = "qk_norm_rope_write"


class HeadsSite:
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

    def check(self, qkv: torch.Tensor, **others: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        """Raise ValueError unless the operands are those of ``QkNormRopeWrite``.

        *others* has all of them but qkv, by name; returns those that are there.
        """
        width = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        expect(f"{WHAT}: qkv", qkv, self.dtype, ("T", width))
        for name in ("q_weight", "k_weight"):
            if (others[name] is not None) != self.qk_norm:
                declared = "declares QK-norm" if self.qk_norm else "declares no QK-norm"
                raise ValueError(f"{WHAT}: this call site {declared}, see {name}")
        given = {name: tensor for name, tensor in others.items() if tensor is not None}
        blocks = ("num_blocks", self.kv_heads, self.block_size, self.head_dim)
        forms: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
            "q_weight": (self.dtype, (self.head_dim,)),
            "k_weight": (self.dtype, (self.head_dim,)),
            "cos_sin": (self.internal, ("P", self.rotary_dim)),
            "positions": (torch.int64, (qkv.shape[0],)),
            "slot_mapping": (torch.int64, (qkv.shape[0],)),
            "k_cache": (self.kv_dtype, blocks),
            "v_cache": (self.kv_dtype, blocks),
        }
        for name, tensor in given.items():
            expect(f"{WHAT}: {name}", tensor, *forms[name])
        return given
