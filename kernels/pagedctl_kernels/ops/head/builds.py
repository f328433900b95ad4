"""The forms of the kernels of float32 products and of many rows that are compiled ahead of time.

The head is where products are widened and where results are float32.
"""

from __future__ import annotations

from pagedctl_kernels.builds import Build


def _float32(dtype: str, rows: int, columns: int, warps: int, stages: int, registers: int) -> Build:
    pointers = dict.fromkeys(("x", "weight"), f"*{dtype}:16")
    return Build(
        kernel="pagedctl_kernels.ops.triton_linear_ieee_kernel:fma_chain",
        label=f"{dtype} widened to float32, tiles of {rows} x {columns}",
        signature={**pointers, "y": "*fp32:16", "rows": "i32", "n": "i32:16", "k": "i32:16"},
        constants={
            "bias": None,
            "BLOCK_M": rows,
            "BLOCK_N": columns,
            "BLOCK_K": 32,
            "HAS_BIAS": False,
        },
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False},
        registers=registers,
        written_fma=True,
    )


def _block(dtype: str, rows: int, columns: int) -> str:
    """A descriptor and the layout of its blocks in shared memory, as Gluon spells it."""
    bits = {"bf16": 16, "fp16": 16, "fp32": 32}[dtype]
    layout = (
        f"NVMMASharedLayout(swizzle_byte_width={min(columns * bits // 8, 128)}, "
        f"element_bitwidth={bits}, rank=2, transposed=False, fp4_padded=False, cga_layout=[])"
    )
    return f"tensordesc<{dtype}[{rows},{columns}],{layout}>"


def _many_rows(
    dtype: str, out: str, *, width: int, tail: int, stages: int, bias: bool = False
) -> Build:
    constants = {"BLOCK_M": 128, "WIDTH": width, "TAIL": tail, "BLOCK_K": 64, "STAGES": stages}
    signature = {
        "x": _block(dtype, 64, 64),
        "weight": _block(dtype, width, 64),
        "weight_tail": _block(dtype, tail or width, 64),
        "y": _block(out, 64, max(width // 4, 32)),
        "rows": "i32",
        "n": "i32",
        "k": "i32",
    }
    if bias:
        signature["bias"] = f"*{dtype}:16"
    return Build(
        kernel="pagedctl_kernels.ops.triton_linear_large_kernel:many_rows",
        label=f"{dtype} to {out}, 128 x {width + tail}{', bias' if bias else ''}",
        signature=signature,
        constants={
            **constants,
            "GROUP_M": 8,
            "HAS_BIAS": bias,
            **({} if bias else {"bias": None}),
        },
        options={"num_warps": 4, "enable_fp_fusion": False},
        registers=168,
        capabilities=(90,),
    )


BUILDS: tuple[Build, ...] = (
    _many_rows("bf16", "bf16", width=256, tail=0, stages=4),
    _many_rows("bf16", "bf16", width=128, tail=64, stages=5, bias=True),
    _many_rows("fp16", "fp32", width=256, tail=0, stages=3),
    _float32("fp32", 16, 32, 2, 4, 96),
    _float32("fp32", 64, 64, 4, 3, 224),
    _float32("fp32", 128, 128, 8, 3, 255),
    _float32("bf16", 16, 32, 2, 4, 96),
    _float32("bf16", 64, 64, 4, 3, 168),
    _float32("bf16", 128, 128, 8, 3, 255),
)
