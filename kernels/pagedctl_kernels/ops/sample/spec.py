"""The leaves of sample."""

from __future__ import annotations

from pagedctl_kernels.house import SAMPLE_CPU
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    Limit,
    formats,
)
from pagedctl_kernels.sites import TEMPERATURE_FORMS

REFERENCE = LeafSpec(
    name="torch.sample",
    op="sample",
    entry="pagedctl_kernels.ops.sample.torch_reference:build",
    formats=formats("x", dtypes=("float32", "float64")),
    capability=Capability(kind="cpu"),
    order=SAMPLE_CPU,
    limits=(Limit(fact="temperature_form", allowed=TEMPERATURE_FORMS),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE,)
