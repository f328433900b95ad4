"""The leaves of head: packed products, row blocks, their stand-in, and the library's own call."""

from __future__ import annotations

from pagedctl_kernels.house import (
    HEAD_CPU,
    HEAD_CPU_LIBRARY,
    HEAD_CPU_PACKED,
    HEAD_CPU_PER_ROW,
)
from pagedctl_kernels.leaf import (
    BATCH_INVARIANT,
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

LEAVES: tuple[LeafSpec, ...] = (PACKED, ROW_BLOCKS, PER_ROW, LIBRARY)
