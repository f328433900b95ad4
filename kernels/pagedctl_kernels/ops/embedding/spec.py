"""The leaves of embedding."""

from __future__ import annotations

from pagedctl_kernels.house import EMBEDDING_CPU, EMBEDDING_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    formats,
)
from pagedctl_kernels.sites import DTYPES

REFERENCE = LeafSpec(
    name="torch.embedding",
    op="embedding",
    entry="pagedctl_kernels.ops.embedding.torch_reference:build",
    formats=formats("w", dtypes=DTYPES),
    capability=Capability(kind="cpu"),
    order=EMBEDDING_CPU,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

TRITON = LeafSpec(
    name="triton.embedding",
    op="embedding",
    entry="pagedctl_kernels.ops.embedding.triton_leaf:build",
    formats=formats("w", dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=EMBEDDING_HOPPER,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
