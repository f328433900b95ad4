"""The forms of the block-sum kernels that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import Build
from pagedctl_kernels.house import LOGPROB_BLOCK
from pagedctl_kernels.ops.block_sumexp.segments import WARPS, Segments

_MODULE = "pagedctl_kernels.ops.block_sumexp.triton_kernel"
_WIDE = Segments(columns=151_936, block_size=LOGPROB_BLOCK)
_NARROW = Segments(columns=50_257, block_size=100)


def segment_constants(segments: Segments) -> dict[str, int]:
    """What every kernel that walks over segments is compiled for."""
    return {
        "BLOCK_SIZE": segments.block_size,
        "CHUNKS": segments.chunks,
        "GROUP": segments.group,
        "WIDTH": segments.width,
    }


def _segment_sums(label: str, segments: Segments, multiple: str, registers: int) -> Build:
    return Build(
        kernel=f"{_MODULE}:segment_sums_kernel",
        label=label,
        signature={
            "shifted": "*fp32:16",
            "sums": "*fp32:16",
            "columns": f"i32{multiple}",
            "row_stride": f"i32{multiple}",
            "segments": "i32",
        },
        constants=segment_constants(segments),
        options={"num_warps": WARPS, "enable_fp_fusion": False},
        registers=registers,
    )


BUILDS: tuple[Build, ...] = (
    _segment_sums("151936 columns, blocks of 32768", _WIDE, ":16", 96),
    _segment_sums("50257 columns, blocks of 100", _NARROW, "", 128),
    Build(
        kernel=f"{_MODULE}:block_sums_kernel",
        label="blocks of 32768",
        signature={"sums": "*fp32:16", "out": "*fp32:16", "blocks": "i32"},
        constants={"CHUNKS": _WIDE.chunks, "TILE": 128},
        options={"num_warps": 4, "enable_fp_fusion": False},
        registers=32,
    ),
)
