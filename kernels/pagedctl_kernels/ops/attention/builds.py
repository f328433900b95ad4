"""The forms of the attention kernels that are compiled ahead of time."""

from __future__ import annotations

from pagedctl_kernels.builds import CAPABILITIES, Build
from pagedctl_kernels.house import SPLIT_TOKENS, TILE_KEYS
from pagedctl_kernels.ops.attention.tile_forms import tall_form, tile_form

TEXT = {"bf16": "tl.bfloat16", "fp16": "tl.float16", "fp32": "tl.float32"}


def _items(
    rows: int,
    head_dim: int,
    *,
    dtype: str = "bf16",
    window: int = 0,
    overlaps: bool = False,
    spills: int = 0,
) -> Build:
    """*overlaps*: of a list with merges, whose launch may begin early; Hopper's alone."""
    block_dim = max(1 << (head_dim - 1).bit_length(), 16)
    float32 = dtype == "fp32"
    form = tile_form(rows, block_dim, not float32)
    lists = ("items", "tokens", "slots", "positions", "block_tables")
    return Build(
        kernel="pagedctl_kernels.ops.attention.triton_kernel:attend_items",
        label=f"{rows} rows, head_dim {head_dim}, {dtype}, "
        f"{f'window {window}' if window else 'no window'}{', overlapping' if overlaps else ''}",
        signature={
            **{"q": f"*{dtype}:16", "out": f"*{dtype}:16", "state_a": "*fp32:16"},
            **dict.fromkeys(("k_cache", "v_cache"), f"*{dtype}:16"),
            **dict.fromkeys(lists, "*i32:16"),
            **{"item_count": "*i32", "table_stride": "i32", "scale": "fp32"},
            **dict.fromkeys(("state_m", "state_l"), "*fp32"),
        },
        constants={
            **{"Q_HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_DIM": block_dim},
            **{"BLOCK_SIZE": 16, "WINDOW": window, "ROWS": rows},
            **{"P_DTYPE": TEXT[dtype], "TILE": TILE_KEYS},
            **{"SPLIT_TILES": SPLIT_TOKENS // TILE_KEYS, "SUM_COLUMNS": form.sum_columns},
            **{"STAGES": form.stages, "RESUMES": rows == 16, "OVERLAPS": overlaps},
        },
        options={
            **{"num_warps": form.warps, "num_stages": form.stages, "enable_fp_fusion": False},
            **({} if form.registers is None else {"maxnreg": form.registers}),
        },
        registers=255,
        spills=spills,
        written_fma=float32,
        capabilities=(90,) if overlaps else CAPABILITIES,
    )


def _tall(head_dim: int, *, window: int = 0, spills: int = 0) -> Build:
    form = tall_form(128, head_dim, True)
    assert form is not None
    lists = ("items", "tokens", "slots", "positions", "block_tables")
    return Build(
        kernel="pagedctl_kernels.ops.attention.triton_tall:attend_tall_items",
        label=f"head_dim {head_dim}, bf16, {f'window {window}' if window else 'no window'}",
        signature={
            **dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16:16"),
            **dict.fromkeys(lists, "*i32:16"),
            **{"item_count": "*i32", "table_stride": "i32", "scale": "fp32"},
            **{"state_m": "*fp32", "state_l": "*fp32", "state_a": "*fp32:16"},
        },
        constants={
            **{"Q_HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_DIM": head_dim},
            **{"BLOCK_SIZE": 16, "WINDOW": window, "TILE": TILE_KEYS},
            **{"SPLIT_TILES": SPLIT_TOKENS // TILE_KEYS, "STAGES": form.stages},
            "LOAD_REGISTERS": form.load_registers,
            "ROW_REGISTERS": form.row_registers,
        },
        options={"num_warps": 4, "enable_fp_fusion": False},
        registers=168,
        spills=spills,
        capabilities=(90,),
    )


def _merge(head_dim: int, dtype: str) -> Build:
    return Build(
        kernel="pagedctl_kernels.ops.attention.triton_merge:merge_states",
        label=f"head_dim {head_dim}, {dtype}",
        signature={
            **{"out": f"*{dtype}:16", "merges": "*i32:16", "merge_count": "*i32:16"},
            **{"state_m": "*fp32", "state_l": "*fp32", "state_a": "*fp32:16"},
        },
        constants={
            **{
                "Q_HEADS": 32,
                "HEAD_DIM": head_dim,
                "BLOCK_DIM": head_dim,
                "CHUNK": 8,
                "OVERLAPS": True,
            }
        },
        options={"num_warps": 1, "enable_fp_fusion": False, "launch_pdl": True},
        registers=128,
        capabilities=(90,),
    )


BUILDS: tuple[Build, ...] = (
    *(_items(rows, 64) for rows in (16, 64, 128)),
    *(_items(rows, 128, spills=192) for rows in (16, 64, 128)),
    *(_items(rows, 128, overlaps=True, spills=192) for rows in (16, 64)),
    _tall(64, spills=64),
    _items(16, 128, dtype="fp16", window=300, spills=192),
    _items(16, 128, dtype="fp32", spills=512),
    _items(64, 80, spills=192),
    _items(16, 256, spills=192),
    _tall(128, spills=64),
    _tall(128, window=300, spills=64),
    _merge(128, "bf16"),
)
