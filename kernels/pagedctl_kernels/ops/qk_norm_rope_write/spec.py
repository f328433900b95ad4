"""The leaves of qk_norm_rope_write."""

from __future__ import annotations

from pagedctl_kernels.house import QK_ROPE_CPU
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
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

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
