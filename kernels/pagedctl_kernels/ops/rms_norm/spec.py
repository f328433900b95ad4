"""The leaves of rms_norm."""

from __future__ import annotations

from pagedctl_kernels.house import RMS_NORM_CPU, RMS_NORM_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
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

TRITON = LeafSpec(
    name="triton.rms_norm",
    op="rms_norm",
    entry="pagedctl_kernels.ops.rms_norm.triton_leaf:build",
    formats=formats("x", "w", dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=RMS_NORM_HOPPER,
    limits=(
        Limit(fact="width", minimum=1, maximum=32768),
        Limit(fact="norm_cast", allowed=NORM_CASTS),
    ),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
