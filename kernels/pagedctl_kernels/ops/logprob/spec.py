"""The leaves of logprob."""

from __future__ import annotations

from pagedctl_kernels.house import LOGPROB_CPU, LOGPROB_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    Limit,
    formats,
)
from pagedctl_kernels.sites import LOGPROB_FORMS, TEMPERATURE_FORMS

REFERENCE = LeafSpec(
    name="torch.logprob",
    op="logprob",
    entry="pagedctl_kernels.ops.logprob.torch_reference:build",
    formats=formats("x", dtypes=("float32", "float64")),
    capability=Capability(kind="cpu"),
    order=LOGPROB_CPU,
    limits=(
        Limit(fact="form", allowed=LOGPROB_FORMS),
        Limit(fact="temperature_form", allowed=TEMPERATURE_FORMS),
        Limit(fact="block_size", minimum=1),
    ),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

TRITON = LeafSpec(
    name="triton.logprob",
    op="logprob",
    entry="pagedctl_kernels.ops.logprob.triton_leaf:build",
    formats=formats("x", dtypes=("float32",)),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=LOGPROB_HOPPER,
    limits=(
        Limit(fact="form", allowed=LOGPROB_FORMS),
        Limit(fact="temperature_form", allowed=TEMPERATURE_FORMS),
        Limit(fact="block_size", minimum=1),
    ),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
