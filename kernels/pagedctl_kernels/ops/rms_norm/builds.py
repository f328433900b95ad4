"""The forms of the RMSNorm kernel that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build
from pagedctl_kernels.ops.rms_norm import programs


def _rows(width: int, dtype: str, registers: int, *, residual: bool = True) -> Build:
    pointers = dict.fromkeys(("x", "residual", "weight", "y", "stream"), f"*{dtype}:16")
    return Build(
        kernel="pagedctl_kernels.ops.rms_norm.triton_kernel:rms_norm_row",
        label=f"{width} wide, {dtype}{', residual' if residual else ''}",
        signature={**pointers, "eps": "fp32", "x_stride": "i32:16", "residual_stride": "i32:16"},
        constants={
            "WIDTH": width,
            "BLOCK": programs.block(width),
            "HAS_RESIDUAL": residual,
            "CAST_BEFORE": True,
        },
        options={"num_warps": programs.warps(width), "enable_fp_fusion": False},
        registers=registers,
    )


BUILDS: tuple[Build, ...] = (
    _rows(1024, "bf16", 64),
    _rows(4096, "bf16", 64),
    _rows(4096, "bf16", 64, residual=False),
    _rows(5120, "fp16", 64),
    _rows(4096, "fp32", 80),
    _rows(32768, "bf16", 128),
)
