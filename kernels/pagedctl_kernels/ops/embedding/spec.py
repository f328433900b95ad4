"""The leaves of embedding."""

from __future__ import annotations

from pagedctl_kernels.house import EMBEDDING_CPU
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
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

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
