"""The leaves of attention."""

from __future__ import annotations

from pagedctl_kernels.house import ATTENTION_CPU
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
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

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
