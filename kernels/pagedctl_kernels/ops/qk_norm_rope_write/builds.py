"""The forms of the QK-norm, RoPE and cache-write kernel that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build
from pagedctl_kernels.ops.qk_norm_rope_write.programs import WARPS, HeadPrograms

_QWEN3_8B = HeadPrograms(q_heads=32, kv_heads=8, head_dim=128, rotary_dim=128)
_LLAMA = HeadPrograms(q_heads=9, kv_heads=3, head_dim=64, rotary_dim=64)
_PARTLY_ROTATED = HeadPrograms(q_heads=32, kv_heads=32, head_dim=80, rotary_dim=32)


def _heads(
    label: str, layer: HeadPrograms, dtype: str, kv_dtype: str, *, qk_norm: bool, registers: int
) -> Build:
    model = dict.fromkeys(("qkv", "q_weight", "k_weight", "q"), f"*{dtype}:16")
    caches = dict.fromkeys(("k_cache", "v_cache"), f"*{kv_dtype}:16")
    places = dict.fromkeys(("positions", "slot_mapping"), "*i64:16")
    counts = {"qkv_stride": "i32:16", "table_rows": "i32", "slots": "i32"}
    return Build(
        kernel="pagedctl_kernels.ops.qk_norm_rope_write.triton_kernel:qk_norm_rope_write_heads",
        label=f"{label}, {dtype}",
        signature={
            **model,
            **caches,
            **places,
            **counts,
            "cos_sin": "*fp32:16",
            "eps": "fp32",
        },
        constants={
            **layer.constants(),
            "BLOCK_SIZE": 16,
            "QK_NORM": qk_norm,
            "CAST_BEFORE": True,
        },
        options={"num_warps": WARPS, "enable_fp_fusion": False},
        registers=registers,
    )


BUILDS: tuple[Build, ...] = (
    _heads("8B", _QWEN3_8B, "bf16", "bf16", qk_norm=True, registers=48),
    _heads("8B, narrow cache", _QWEN3_8B, "fp32", "bf16", qk_norm=True, registers=48),
    _heads("9 heads of 64", _LLAMA, "bf16", "bf16", qk_norm=False, registers=48),
    _heads(
        "80 dimensions, 32 of them rotated",
        _PARTLY_ROTATED,
        "fp16",
        "fp16",
        qk_norm=True,
        registers=48,
    ),
)
