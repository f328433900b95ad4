"""The leaves of logit_edits."""

from __future__ import annotations

from pagedctl_kernels.house import LOGIT_EDITS_CPU, LOGIT_EDITS_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    formats,
)

REFERENCE = LeafSpec(
    name="torch.logit_edits",
    op="logit_edits",
    entry="pagedctl_kernels.ops.logit_edits.torch_reference:build",
    formats=formats("x", dtypes=("float32", "float64")),
    capability=Capability(kind="cpu"),
    order=LOGIT_EDITS_CPU,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

TRITON = LeafSpec(
    name="triton.logit_edits",
    op="logit_edits",
    entry="pagedctl_kernels.ops.logit_edits.triton_leaf:build",
    formats=formats("x", dtypes=("float32",)),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=LOGIT_EDITS_HOPPER,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
