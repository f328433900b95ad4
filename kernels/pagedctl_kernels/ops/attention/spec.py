"""The leaves of attention."""

from __future__ import annotations

from pagedctl_kernels.house import ATTENTION_CPU, ATTENTION_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    Limit,
    cache_formats,
)
from pagedctl_kernels.sites import DTYPES

REFERENCE = LeafSpec(
    name="torch.attention",
    op="attention",
    entry="pagedctl_kernels.ops.attention.torch_reference:build",
    formats=cache_formats(dtypes=DTYPES),
    capability=Capability(kind="cpu"),
    order=ATTENTION_CPU,
    limits=(
        Limit(fact="block_size", minimum=1),
        Limit(fact="head_dim", minimum=8, multiple_of=8),
    ),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

HOPPER = LeafSpec(
    name="triton.attention",
    op="attention",
    entry="pagedctl_kernels.ops.attention.triton_leaf:build",
    formats=cache_formats(dtypes=("bfloat16", "float16", "float32")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=ATTENTION_HOPPER,
    limits=(
        Limit(fact="block_size", minimum=1),
        Limit(fact="head_dim", minimum=8, maximum=256, multiple_of=8),
    ),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, HOPPER)
