"""The house's leaves, collected from the ops. Reading them imports no torch."""

from __future__ import annotations

from pagedctl_kernels.ops.attention import spec as attention
from pagedctl_kernels.ops.block_sumexp import spec as block_sumexp
from pagedctl_kernels.ops.embedding import spec as embedding
from pagedctl_kernels.ops.gemm import spec as gemm
from pagedctl_kernels.ops.head import spec as head
from pagedctl_kernels.ops.logit_edits import spec as logit_edits
from pagedctl_kernels.ops.logprob import spec as logprob
from pagedctl_kernels.ops.qk_norm_rope_write import spec as qk_norm_rope_write
from pagedctl_kernels.ops.rms_norm import spec as rms_norm
from pagedctl_kernels.ops.sample import spec as sample
from pagedctl_kernels.ops.silu_mul import spec as silu_mul
from pagedctl_kernels.registry import Registry


def house_registry() -> Registry:
    """A registry of every leaf that the package ships; plug-ins add theirs to it."""
    specs = (
        embedding,
        rms_norm,
        gemm,
        qk_norm_rope_write,
        attention,
        silu_mul,
        head,
        block_sumexp,
        logprob,
        logit_edits,
        sample,
    )
    return Registry(leaf for spec in specs for leaf in spec.LEAVES)
