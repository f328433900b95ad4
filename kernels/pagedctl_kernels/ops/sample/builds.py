"""The forms of the sampling kernels that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping

from pagedctl_kernels.builds import Build, Constant
from pagedctl_kernels.ops.sample import programs

_ARGUMENTS = {
    **dict.fromkeys(("logits", "temperature", "min_p", "out"), "*fp32:16"),
    **dict.fromkeys(("top_k", "seed", "position", "winners", "masses", "weights"), "*i64:16"),
    **dict.fromkeys(("peaks", "peak", "classes", "floor", "taken", "keys"), "*i32:16"),
    **dict.fromkeys(("columns", "ends", "last_tied"), "*i32:16"),
    **dict.fromkeys(("row_stride", "vocab", "capacity"), "i32:16"),
    **dict.fromkeys(("token_offset", "chunks"), "i32"),
    "top_p": "*fp64:16",
    "token_ids": "*i64:16",
    "faulty": "*u8:16",
}
_ROWS = ("logits", "row_stride", "temperature")
_TRUNCATION = ("top_k", "top_p", "min_p")
_CHUNKS = 64
"""151936 columns have 38 chunks."""

_STACK = 8
"""Bytes a thread that Triton 3.9 puts aside in two kernels; nothing else is spilled."""


def _build(
    kernel: str,
    arguments: tuple[str, ...],
    constants: Mapping[str, Constant],
    *,
    registers: int,
    warps: int = programs.WARPS,
    label: str = "151936 columns",
    logarithms: bool = False,
) -> Build:
    """``logarithms``: bounds that only say where to look hold the compiler's own, with its fma."""
    return Build(
        kernel=f"pagedctl_kernels.ops.sample.{kernel}",
        label=label,
        signature={name: _ARGUMENTS[name] for name in arguments},
        constants=constants,
        options={"num_warps": warps, "enable_fp_fusion": False},
        registers=registers,
        spills=_STACK,
        written_fma=logarithms,
    )


_SCAN = (*_ROWS, *_TRUNCATION, "seed", "position", "peaks", "winners", "classes", "vocab")
_SEARCH = (
    *(*_ROWS, *_TRUNCATION, "seed", "position", "winners", "peak", "floor", "taken", "masses"),
    *("keys", "columns", "weights", "vocab", "token_offset", "chunks", "capacity"),
)
_SEARCHED = {"CHUNKS": _CHUNKS, "TILE": programs.SEARCHED, "MULTIPLY": False}

BUILDS: tuple[Build, ...] = (
    _build(
        "triton_scan:scan_kernel",
        (*_SCAN, "token_offset", "chunks"),
        {"GROUPS": programs.CHUNK // 4, "MULTIPLY": False, "DRAW": True},
        registers=128,
        logarithms=True,
    ),
    _build(
        "triton_scan:scan_kernel",
        (*_SCAN, "token_offset", "chunks"),
        {"GROUPS": programs.CHUNK // 4, "MULTIPLY": True, "DRAW": False},
        registers=128,
        label="151936 columns, truncation alone",
    ),
    _build(
        "triton_select:floor_kernel",
        (
            *("temperature", *_TRUNCATION, "peaks", "classes", "peak", "floor", "taken"),
            *("vocab", "chunks", "capacity"),
        ),
        {"CHUNKS": _CHUNKS, "DRAW": True},
        registers=128,
        logarithms=True,
    ),
    _build(
        "triton_select:collect_kernel",
        (
            *(*_ROWS, "top_p", "peak", "floor", "taken", "masses", "keys", "columns", "weights"),
            *("vocab", "chunks", "capacity"),
        ),
        {"TILE": programs.CHUNK, "PART": programs.PART, "MULTIPLY": False, "DRAW": True},
        registers=128,
    ),
    _build(
        "triton_finish:finish_kernel",
        (*_SEARCH, "token_ids", "faulty"),
        {**_SEARCHED, "DRAW": True, "ends": None, "last_tied": None},
        registers=128,
        warps=programs.SEARCH_WARPS,
    ),
    _build(
        "triton_finish:finish_kernel",
        (*_SEARCH, "ends", "last_tied"),
        {**_SEARCHED, "DRAW": False, "token_ids": None, "faulty": None},
        registers=128,
        warps=programs.SEARCH_WARPS,
        label="151936 columns, truncation alone",
    ),
    _build(
        "triton_finish:mask_kernel",
        (*_ROWS, "min_p", "peak", "ends", "last_tied", "out", "vocab", "chunks"),
        {"TILE": programs.CHUNK, "MULTIPLY": False},
        registers=128,
    ),
)
