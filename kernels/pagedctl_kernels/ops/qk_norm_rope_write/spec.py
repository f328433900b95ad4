"""The leaves of qk_norm_rope_write."""

from __future__ import annotations

from pagedctl_kernels.house import QK_ROPE_CPU, QK_ROPE_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    Limit,
    cache_formats,
)
from pagedctl_kernels.sites import DTYPES, NORM_CASTS

REFERENCE = LeafSpec(
    name="torch.qk_norm_rope_write",
    op="qk_norm_rope_write",
    entry="pagedctl_kernels.ops.qk_norm_rope_write.torch_reference:build",
    formats=cache_formats(dtypes=DTYPES),
    capability=Capability(kind="cpu"),
    order=QK_ROPE_CPU,
    limits=(
        Limit(fact="norm_cast", allowed=NORM_CASTS),
        Limit(fact="rotary_dim", minimum=2, multiple_of=2),
        Limit(fact="block_size", minimum=1),
    ),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

TRITON = LeafSpec(
    name="triton.qk_norm_rope_write",
    op="qk_norm_rope_write",
    entry="pagedctl_kernels.ops.qk_norm_rope_write.triton_leaf:build",
    formats=cache_formats(dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=QK_ROPE_HOPPER,
    limits=(
        Limit(fact="head_dim", minimum=2, maximum=1024),
        *REFERENCE.limits,
    ),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
