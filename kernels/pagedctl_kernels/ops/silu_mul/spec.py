"""The leaves of silu_mul."""

from __future__ import annotations

from pagedctl_kernels.house import SILU_MUL_CPU
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    formats,
)
from pagedctl_kernels.sites import DTYPES

REFERENCE = LeafSpec(
    name="torch.silu_mul",
    op="silu_mul",
    entry="pagedctl_kernels.ops.silu_mul.torch_reference:build",
    formats=formats("x", dtypes=DTYPES),
    capability=Capability(kind="cpu"),
    order=SILU_MUL_CPU,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
