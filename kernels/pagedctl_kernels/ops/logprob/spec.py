"""The leaves of logprob."""

from __future__ import annotations

from pagedctl_kernels.house import LOGPROB_CPU
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
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

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
