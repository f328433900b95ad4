"""The leaves of sample."""

from __future__ import annotations

from pagedctl_kernels.house import SAMPLE_CPU, SAMPLE_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
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

TRITON = LeafSpec(
    name="triton.sample",
    op="sample",
    entry="pagedctl_kernels.ops.sample.triton_leaf:build",
    formats=formats("x", dtypes=("float32",)),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=SAMPLE_HOPPER,
    limits=(Limit(fact="temperature_form", allowed=TEMPERATURE_FORMS),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
