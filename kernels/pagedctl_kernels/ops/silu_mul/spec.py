"""The leaves of silu_mul."""

from __future__ import annotations

from pagedctl_kernels.house import SILU_MUL_CPU, SILU_MUL_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
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

TRITON = LeafSpec(
    name="triton.silu_mul",
    op="silu_mul",
    entry="pagedctl_kernels.ops.silu_mul.triton_leaf:build",
    formats=formats("x", dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=SILU_MUL_HOPPER,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
