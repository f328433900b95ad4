"""The leaves of head: the contract's row blocks, their stand-in, and the library's own call."""

from __future__ import annotations

from pagedctl_kernels.house import HEAD_CPU, HEAD_CPU_LIBRARY, HEAD_CPU_PER_ROW
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

LEAVES: tuple[LeafSpec, ...] = (ROW_BLOCKS, PER_ROW, LIBRARY)
