"""The forms of the embedding kernel that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build
from pagedctl_kernels.ops import row_stretches


def _stretches(vocab_size: int, width: int, dtype: str) -> Build:
    return Build(
        kernel="pagedctl_kernels.ops.embedding.triton_kernel:embedding_stretch",
        label=f"{vocab_size} rows {width} wide, {dtype}",
        signature={"token_ids": "*i64:16", "weight": f"*{dtype}:16", "y": f"*{dtype}:16"},
        constants={"VOCAB_SIZE": vocab_size, **row_stretches.constants(width)},
        options={"num_warps": row_stretches.WARPS, "enable_fp_fusion": False},
        registers=32,
    )


BUILDS: tuple[Build, ...] = (
    _stretches(151_936, 4096, "bf16"),
    _stretches(49_152, 576, "fp32"),
)
