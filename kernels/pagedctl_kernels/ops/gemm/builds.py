"""The forms of the linear layers' kernel for few rows that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build

_KERNEL = "pagedctl_kernels.ops.triton_linear_kernel:linear_tile"
_GATED = "pagedctl_kernels.ops.triton_gated_kernel:gated_tile"
_SIZES = {"rows": "i32", "n": "i32:16", "k": "i32:16"}
_DESCRIPTORS = (90,)
"""Without the hardware's descriptors, these forms would be plain loads by another kernel."""

_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

BUILDS: tuple[Build, ...] = (
    Build(
        kernel=_KERNEL,
        label="bfloat16 by descriptors, 16 rows, 32 outputs",
        signature={
            "x": "tensordesc<bf16[16, 256]>",
            "weight": "tensordesc<bf16[32, 256]>",
            "y": "*bf16:16",
            "weight_bytes": "*bf16:16",
            **_SIZES,
            "prefetch": "i32",
        },
        constants={
            "bias": None,
            "BLOCK_M": 16,
            "BLOCK_N": 32,
            "BLOCK_K": 256,
            "STAGES": 4,
            "SWAPPED": False,
            "DESCRIPTORS": True,
            "K_FITS": True,
            "HAS_BIAS": False,
            "OVERLAP": True,
        },
        options={**_OPTIONS, "launch_pdl": True},
        registers=64,
        capabilities=_DESCRIPTORS,
    ),
    Build(
        kernel=_KERNEL,
        label="bfloat16 by descriptors, 64 rows, swapped, to float32",
        signature={
            "x": "tensordesc<bf16[64, 128]>",
            "weight": "tensordesc<bf16[64, 128]>",
            "y": "*fp32:16",
            "weight_bytes": "*bf16:16",
            **_SIZES,
            "prefetch": "i32",
        },
        constants={
            "bias": None,
            "BLOCK_M": 64,
            "BLOCK_N": 64,
            "BLOCK_K": 128,
            "STAGES": 5,
            "SWAPPED": True,
            "DESCRIPTORS": True,
            "K_FITS": True,
            "HAS_BIAS": False,
            "OVERLAP": False,
        },
        options=_OPTIONS,
        registers=96,
        capabilities=_DESCRIPTORS,
    ),
    Build(
        kernel=_KERNEL,
        label="float16 by pointers, any K, with a bias",
        signature={
            "x": "*fp16:16",
            "weight": "*fp16:16",
            "bias": "*fp16:16",
            "y": "*fp16:16",
            "weight_bytes": "*fp16:16",
            "rows": "i32",
            "n": "i32",
            "k": "i32",
            "prefetch": "i32",
        },
        constants={
            "BLOCK_M": 64,
            "BLOCK_N": 64,
            "BLOCK_K": 32,
            "STAGES": 3,
            "SWAPPED": False,
            "DESCRIPTORS": False,
            "K_FITS": False,
            "HAS_BIAS": True,
            "OVERLAP": False,
        },
        options=_OPTIONS,
        registers=200,
    ),
    Build(
        kernel=_GATED,
        label="bfloat16, 64 rows, swapped",
        signature={
            "x": "tensordesc<bf16[64, 64]>",
            "weight": "tensordesc<bf16[64, 64]>",
            "y": "*bf16:16",
            "weight_bytes": "*bf16:16",
            "rows": "i32",
            "width": "i32:16",
            "k": "i32:16",
            "prefetch": "i32",
        },
        constants={
            "bias": None,
            "BLOCK_M": 64,
            "BLOCK_N": 64,
            "BLOCK_K": 64,
            "STAGES": 4,
            "SWAPPED": True,
            "HAS_BIAS": False,
            "ROUND_ACTIVATION": True,
            "OVERLAP": True,
        },
        options={"num_warps": 8, "enable_fp_fusion": False, "launch_pdl": True},
        registers=96,
        capabilities=_DESCRIPTORS,
    ),
)
