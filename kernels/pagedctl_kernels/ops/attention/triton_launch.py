"""Launching the Hopper kernels of attention over one step's work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagedctl_kernels.house import SPLIT_TOKENS, TILE_KEYS
from pagedctl_kernels.ops.attention.device_work import DeviceWork, TileClass
from pagedctl_kernels.ops.attention.tile_forms import tall_form, tile_form
from pagedctl_kernels.ops.attention.triton_kernel import attend_items
from pagedctl_kernels.ops.attention.triton_merge import merge_states
from pagedctl_kernels.ops.attention.triton_tall import attend_tall_items

MERGE_CHUNK = 8
"""States that a program of the merge loads at once."""

MERGE_PROGRAMS = 16
"""Programs of the merge on one SM, each of one warp."""

INTERPRETED_SMS = 2
"""Stands for the number of SMs where the kernels are interpreted."""

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Static facts of a call site. ``scale``: log2(e) / sqrt(head_dim), rounded once to float32
    when it is passed; ``window``: keys that a query sees, or None; ``p_dtype``: of the rounded
    probabilities."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_dim: int
    block_size: int
    window: int | None
    scale: float
    p_dtype: torch.dtype


def plan_launch(
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    scale: float,
    p_dtype: torch.dtype,
) -> Launch:
    """Launch facts of a call site."""
    return Launch(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_dim=max(triton.next_power_of_2(head_dim), 16),
        block_size=block_size,
        window=window,
        scale=scale,
        p_dtype=p_dtype,
    )


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    work: DeviceWork,
    launch: Launch,
) -> None:
    """Write out D[T, Hq, Dh]: every class of tiles, then the merge of the states they kept.

    The merge is launched while the last class still runs, and waits for it on the device.
    """
    # The tallest first: a short tile may resume a state that a tall one keeps.
    for index, tiles in reversed(list(enumerate(work.classes))):
        count = work.item_counts[index : index + 1]
        _attend_class(q, k_cache, v_cache, out, work, tiles, count, launch)
    if work.merges.shape[0]:
        _merge(out, work, launch)


def _attend_class(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    work: DeviceWork,
    tiles: TileClass,
    count: torch.Tensor,
    launch: Launch,
) -> None:
    narrow = q.element_size() == 2 and launch.p_dtype != torch.float32
    most = tiles.items.shape[0] * launch.kv_heads
    lists = (tiles.items, count, work.tokens, work.slots, work.positions)
    tables = (work.block_tables, work.block_tables.shape[1])
    states = (work.state_m, work.state_l, work.state_a)
    operands = (q, k_cache, v_cache, out, *lists, *tables, *states, launch.scale)
    facts = {
        "Q_HEADS": launch.q_heads,
        "KV_HEADS": launch.kv_heads,
        "HEAD_DIM": launch.head_dim,
        "BLOCK_DIM": launch.block_dim,
        "BLOCK_SIZE": launch.block_size,
        "WINDOW": launch.window or 0,
        "TILE": TILE_KEYS,
        "SPLIT_TILES": SPLIT_TOKENS // TILE_KEYS,
        "enable_fp_fusion": False,
    }
    tall = tall_form(tiles.rows, launch.block_dim, narrow)
    if tall is not None and q.is_cuda:  # warp specialisation is not interpreted
        attend_tall_items[(min(most, sm_count(q.device)),)](
            *operands,
            STAGES=tall.stages,
            LOAD_REGISTERS=tall.load_registers,
            ROW_REGISTERS=tall.row_registers,
            num_warps=4,
            **facts,
        )
        return
    form = tile_form(tiles.rows, launch.block_dim, narrow)
    attend_items[(min(most, form.programs * sm_count(q.device)),)](
        *operands,
        ROWS=tiles.rows,
        P_DTYPE=TRITON_DTYPES[launch.p_dtype],
        SUM_COLUMNS=form.sum_columns,
        STAGES=form.stages,
        RESUMES=tiles.rows == work.classes[0].rows,
        OVERLAPS=work.merges.shape[0] > 0 and q.is_cuda,
        num_warps=form.warps,
        num_stages=form.stages,
        maxnreg=form.registers,
        **facts,
    )


def _merge(out: torch.Tensor, work: DeviceWork, launch: Launch) -> None:
    pairs = work.merges.shape[0] * launch.q_heads
    programs = min(pairs, MERGE_PROGRAMS * sm_count(out.device))
    merge_states[(programs,)](
        out,
        work.merges,
        work.merge_count,
        work.state_m,
        work.state_l,
        work.state_a,
        Q_HEADS=launch.q_heads,
        HEAD_DIM=launch.head_dim,
        BLOCK_DIM=launch.block_dim,
        CHUNK=MERGE_CHUNK,
        OVERLAPS=out.is_cuda,
        num_warps=1,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if out.is_cuda else {}),
    )


def sm_count(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
