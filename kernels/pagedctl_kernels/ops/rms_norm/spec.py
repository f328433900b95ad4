"""The leaves of rms_norm."""

from __future__ import annotations

from pagedctl_kernels.house import RMS_NORM_CPU
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    Limit,
    formats,
)
from pagedctl_kernels.sites import DTYPES, NORM_CASTS

REFERENCE = LeafSpec(
    name="torch.rms_norm",
    op="rms_norm",
    entry="pagedctl_kernels.ops.rms_norm.torch_reference:build",
    formats=formats("x", "w", dtypes=DTYPES),
    capability=Capability(kind="cpu"),
    order=RMS_NORM_CPU,
    limits=(Limit(fact="norm_cast", allowed=NORM_CASTS),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
