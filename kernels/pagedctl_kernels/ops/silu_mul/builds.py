"""The forms of the gated activation's kernel that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build
from pagedctl_kernels.ops import row_stretches


def _stretches(width: int, dtype: str, registers: int) -> Build:
    return Build(
        kernel="pagedctl_kernels.ops.silu_mul.triton_kernel:silu_mul_stretch",
        label=f"{width} wide, {dtype}",
        signature={"gate_up": f"*{dtype}:16", "y": f"*{dtype}:16", "stride": "i32:16"},
        constants={
            **row_stretches.constants(width),
            "ROUND_ACTIVATION": dtype != "fp32",
        },
        options={"num_warps": row_stretches.WARPS, "enable_fp_fusion": False},
        registers=registers,
    )


BUILDS: tuple[Build, ...] = (
    _stretches(12288, "bf16", 48),
    _stretches(12288, "fp32", 48),
    _stretches(1408, "fp16", 48),
)
