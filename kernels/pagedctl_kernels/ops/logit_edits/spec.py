"""The leaves of logit_edits."""

from __future__ import annotations

from pagedctl_kernels.house import LOGIT_EDITS_CPU
from pagedctl_kernels.leaf import BATCH_INVARIANT, DETERMINISTIC, Capability, LeafSpec, formats

REFERENCE = LeafSpec(
    name="torch.logit_edits",
    op="logit_edits",
    entry="pagedctl_kernels.ops.logit_edits.torch_reference:build",
    formats=formats("x", dtypes=("float32", "float64")),
    capability=Capability(kind="cpu"),
    order=LOGIT_EDITS_CPU,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
