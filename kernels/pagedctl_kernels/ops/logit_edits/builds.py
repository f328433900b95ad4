"""The forms of the edits' kernels that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build
from pagedctl_kernels.ops.logit_edits import programs

_MODULE = "pagedctl_kernels.ops.logit_edits.triton_kernel"
_LOGITS = {"logits": "*fp32:16", "logits_stride": "i32:16"}
_OPTIONS = {"num_warps": programs.WARPS, "enable_fp_fusion": False}

BUILDS: tuple[Build, ...] = (
    Build(
        kernel=f"{_MODULE}:edit_kernel",
        label="151936 columns",
        signature={
            **_LOGITS,
            **dict.fromkeys(("row", "slot"), "*i64:16"),
            **dict.fromkeys(("repetition", "presence", "frequency", "bias"), "*fp32:16"),
            "in_prompt": "*u8:16",
            "counts": "*i32:16",
            "vocab": "i32:16",
        },
        constants={"BLOCK": programs.BLOCK},
        options=_OPTIONS,
        registers=112,
    ),
    Build(
        kernel=f"{_MODULE}:bar_kernel",
        label="barred tokens",
        signature={
            **_LOGITS,
            **dict.fromkeys(("barred_row", "barred_token"), "*i64:16"),
            **{"rows": "i32", "vocab": "i32:16", "barred": "i32"},
        },
        constants={"BLOCK": programs.BARRED_BLOCK},
        options=_OPTIONS,
        registers=48,
    ),
)
