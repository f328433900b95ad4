"""The leaves of block_sumexp."""

from __future__ import annotations

from pagedctl_kernels.house import BLOCK_SUMEXP_CPU, BLOCK_SUMEXP_HOPPER
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    Limit,
    formats,
)

REFERENCE = LeafSpec(
    name="torch.block_sumexp",
    op="block_sumexp",
    entry="pagedctl_kernels.ops.block_sumexp.torch_reference:build",
    formats=formats("x", dtypes=("float32", "float64")),
    capability=Capability(kind="cpu"),
    order=BLOCK_SUMEXP_CPU,
    limits=(Limit(fact="block_size", minimum=1),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
)

TRITON = LeafSpec(
    name="triton.block_sumexp",
    op="block_sumexp",
    entry="pagedctl_kernels.ops.block_sumexp.triton_leaf:build",
    formats=formats("x", dtypes=("float32",)),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=BLOCK_SUMEXP_HOPPER,
    limits=(Limit(fact="block_size", minimum=1),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
)

LEAVES: tuple[LeafSpec, ...] = (REFERENCE, TRITON)
