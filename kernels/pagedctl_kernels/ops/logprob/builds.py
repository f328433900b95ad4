"""The forms of the logprob kernels that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build
from pagedctl_kernels.house import LOGPROB_BLOCK
from pagedctl_kernels.ops.block_sumexp.builds import segment_constants
from pagedctl_kernels.ops.block_sumexp.segments import WARPS, Segments

_MODULE = "pagedctl_kernels.ops.logprob.triton_kernel"
_LIKELIEST = "pagedctl_kernels.ops.logprob.triton_likeliest"
_SEGMENTS = Segments(columns=151_936, block_size=LOGPROB_BLOCK)
_ROWS = {"logits": "*fp32:16", "columns": "i32:16", "row_stride": "i32:16", "parts": "i32"}
_SCALED = {"temperature": "*fp32:16", "maxima": "*fp32:16"}
_PARTS = {"PARTS": 32, "MULTIPLY": False}
_PART = {"PART": 8192}
_OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
_FEW_WARPS = {"num_warps": 4, "enable_fp_fusion": False}

BUILDS: tuple[Build, ...] = (
    Build(
        kernel=f"{_MODULE}:row_maxima_kernel",
        label="151936 columns",
        signature={**_ROWS, "maxima": "*fp32:16"},
        constants=_PART,
        options=_OPTIONS,
        registers=64,
    ),
    Build(
        kernel=f"{_MODULE}:shift_kernel",
        label="151936 columns",
        signature={**_ROWS, **_SCALED, "shifted": "*fp32:16"},
        constants={**_PART, **_PARTS},
        options=_OPTIONS,
        registers=96,
    ),
    Build(
        kernel=f"{_MODULE}:scaled_segment_sums_kernel",
        label="151936 columns, blocks of 32768",
        signature={**_ROWS, **_SCALED, "sums": "*fp32:16", "segments": "i32"},
        constants={**segment_constants(_SEGMENTS), **_PARTS, "FUSED": True},
        options=_OPTIONS,
        registers=96,
        spills=8,
        written_fma=True,
    ),
    Build(
        kernel=f"{_MODULE}:token_logprobs_kernel",
        label="151936 columns, blocks of 32768",
        signature={
            **_ROWS,
            **_SCALED,
            "sums": "*fp32:16",
            "token_ids": "*i64:16",
            "out": "*fp32:16",
            "blocks": "i32",
            "tokens": "i32",
        },
        constants={**_PARTS, "CHUNKS": _SEGMENTS.chunks, "AHEAD": 8, "DIRECT": True, "TILE": 32},
        options={"num_warps": 1, "enable_fp_fusion": False},
        registers=128,
    ),
    Build(
        kernel=f"{_LIKELIEST}:rank_keys_kernel",
        label="151936 columns",
        signature={**_ROWS, "temperature": "*fp32:16", "keys": "*i64:16"},
        constants={"PART": 4096, "MULTIPLY": False},
        options=_FEW_WARPS,
        registers=128,
    ),
    Build(
        kernel=f"{_LIKELIEST}:best_keys_kernel",
        label="151936 columns",
        signature={**_ROWS, "temperature": "*fp32:16", "best": "*i64:16", "groups": "i32"},
        constants={"GROUPS": 32, "GROUP": 128, "MULTIPLY": False},
        options=_FEW_WARPS,
        registers=128,
    ),
    Build(
        kernel=f"{_LIKELIEST}:first_ids_kernel",
        label="151936 columns",
        signature={
            "logits": "*fp32:16",
            "temperature": "*fp32:16",
            "best": "*i64:16",
            "ids": "*i64:16",
            "columns": "i32:16",
            "row_stride": "i32:16",
            "groups": "i32",
            "count": "i32",
        },
        constants={"PADDED": 2048, "GROUP": 128, "MULTIPLY": False},
        options=_FEW_WARPS,
        registers=128,
    ),
)
