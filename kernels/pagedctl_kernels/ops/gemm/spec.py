"""The leaves of gemm: tensor cores; packed products, row blocks, their stand-in, the library."""

from __future__ import annotations

from pagedctl_kernels.house import (
    GEMM_CPU,
    GEMM_CPU_BFLOAT16,
    GEMM_CPU_LIBRARY,
    GEMM_CPU_PACKED,
    GEMM_CPU_PER_ROW,
    GEMM_HOPPER,
    GEMM_HOPPER_FLOAT32,
    GEMM_HOPPER_LIBRARY,
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

_FORMATS = formats("x", "w", "y", dtypes=DTYPES)

ROW_BLOCKS = LeafSpec(
    name="torch.gemm_row_blocks",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.torch_reference:build_row_blocks",
    formats=_FORMATS,
    capability=Capability(kind="cpu"),
    order=GEMM_CPU,
    limits=(Limit(fact="k", minimum=2),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
    priority=10,
)

PACKED = LeafSpec(
    name="torch.gemm_packed",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.torch_reference:build_packed",
    formats=formats("x", "w", "y", dtypes=("float32", "float16")),
    capability=Capability(kind="cpu"),
    order=GEMM_CPU_PACKED,
    limits=(Limit(fact="k", minimum=2),),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
    priority=25,
)

NATIVE_PACKED = LeafSpec(
    name="torch.gemm_packed_bfloat16",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.torch_reference:build_native_packed",
    formats=formats("x", "w", "y", dtypes=("bfloat16",)),
    capability=Capability(kind="cpu"),
    order=GEMM_CPU_BFLOAT16,
    limits=(Limit(fact="k", minimum=2), Limit(fact="bias", allowed=(False,))),
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
    priority=30,
)

PER_ROW = LeafSpec(
    name="torch.gemm_per_row",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.torch_reference:build_per_row",
    formats=_FORMATS,
    capability=Capability(kind="cpu"),
    order=GEMM_CPU_PER_ROW,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC}),
    priority=0,
)

LIBRARY = LeafSpec(
    name="torch.gemm_library",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.torch_reference:build_library",
    formats=_FORMATS,
    capability=Capability(kind="cpu"),
    order=GEMM_CPU_LIBRARY,
    features=frozenset({DETERMINISTIC}),
    priority=20,
)

TENSOR_CORES = LeafSpec(
    name="triton.gemm",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.triton_leaf:build",
    formats=formats("x", "w", "y", dtypes=("bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=GEMM_HOPPER,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
    priority=20,
)

FLOAT32 = LeafSpec(
    name="triton.gemm_ieee",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.triton_ieee_leaf:build",
    formats=formats("x", "w", "y", dtypes=("float32",)),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=GEMM_HOPPER_FLOAT32,
    features=frozenset({BATCH_INVARIANT, DETERMINISTIC, CUDA_GRAPH}),
    priority=10,
)

CUBLAS = LeafSpec(
    name="cublas.gemm",
    op="gemm",
    entry="pagedctl_kernels.ops.gemm.cublas_leaf:build",
    formats=formats("x", "w", "y", dtypes=("float32", "bfloat16", "float16")),
    capability=Capability(kind="cuda", minimum=(9, 0), maximum=(9, 0)),
    order=GEMM_HOPPER_LIBRARY,
    features=frozenset({DETERMINISTIC, CUDA_GRAPH}),
    priority=15,
)

LEAVES: tuple[LeafSpec, ...] = (
    NATIVE_PACKED,
    PACKED,
    ROW_BLOCKS,
    PER_ROW,
    LIBRARY,
    TENSOR_CORES,
    FLOAT32,
    CUBLAS,
)
