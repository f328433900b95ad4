"""The leaves of head: tensor cores; packed products, row blocks, their stand-in, the library."""

from __future__ import annotations

from pagedctl_kernels.house import (
    HEAD_CPU,
    HEAD_CPU_LIBRARY,
    HEAD_CPU_PACKED,
    HEAD_CPU_PER_ROW,
    HEAD_HOPPER,
    HEAD_HOPPER_FLOAT32,
    HEAD_HOPPER_LIBRARY,
)
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
    CUDA_GRAPH,
    DETERMINISTIC,
    Capability,
    LeafSpec,
    Limit,
    formats,
)
from pagedctl_kernels.sites import DTYPES

_FORMATS = formats("x", "w", dtypes=DTYPES)

ROW_BLOCKS = LeafSpec(
    name="torch.head_row_blocks",
    op="head",
    entry="pagedctl_kernels.ops.head.torch_reference:build_row_blocks",
    formats=_FORMATS,
    capability=Capability(kind="cpu"),
    order=HEAD_CPU,
    limits=(Limit(fact="k", minimum=2),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
    priority=10,
)

PACKED = LeafSpec(
    name="torch.head_packed",
    op="head",
    entry="pagedctl_kernels.ops.head.torch_reference:build_packed",
    formats=formats("x", "w", dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cpu"),
    order=HEAD_CPU_PACKED,
    limits=(Limit(fact="k", minimum=2),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
    priority=25,
)

PER_ROW = LeafSpec(
    name="torch.head_per_row",
    op="head",
    entry="pagedctl_kernels.ops.head.torch_reference:build_per_row",
    formats=_FORMATS,
    capability=Capability(kind="cpu"),
    order=HEAD_CPU_PER_ROW,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
    priority=0,
)

LIBRARY = LeafSpec(
    name="torch.head_library",
    op="head",
    entry="pagedctl_kernels.ops.head.torch_reference:build_library",
    formats=_FORMATS,
    capability=Capability(kind="cpu"),
    order=HEAD_CPU_LIBRARY,
    features=frozenset({DETERMINISTIC}),
    priority=20,
)

TENSOR_CORES = LeafSpec(
    name="triton.head",
    op="head",
    entry="pagedctl_kernels.ops.head.triton_leaf:build",
    formats=formats("x", "w", dtypes=("bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=HEAD_HOPPER,
    limits=(Limit(fact="head_dtype", allowed=("bfloat16", "float16")),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
    priority=20,
)

FLOAT32 = LeafSpec(
    name="triton.head_ieee",
    op="head",
    entry="pagedctl_kernels.ops.head.triton_ieee_leaf:build",
    formats=formats("x", "w", dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=HEAD_HOPPER_FLOAT32,
    limits=(Limit(fact="head_dtype", allowed=("float32",)),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
    priority=10,
)

CUBLAS = LeafSpec(
    name="cublas.head",
    op="head",
    entry="pagedctl_kernels.ops.head.cublas_leaf:build",
    formats=formats("x", "w", dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=HEAD_HOPPER_LIBRARY,
    features=frozenset({DETERMINISTIC, CUDA_GRAPH}),
    priority=15,
)

LEAVES: tuple[LeafSpec, ...] = (PACKED, ROW_BLOCKS, PER_ROW, LIBRARY, TENSOR_CORES, FLOAT32, CUBLAS)
