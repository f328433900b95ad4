"""Cases of attention over a paged cache, beside torch's fused attention on packed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagedctl.bench.kernels.bench import Bench
from pagedctl.bench.kernels.case import Case, copies
from pagedctl.bench.kernels.replay import Launch
from pagedctl.bench.kernels.shapes import BLOCK_SIZE, Batch
from pagedctl_kernels.ops.interfaces import AttentionMetadata
from pagedctl_kernels.sites import attention_site

PEERS = {"torch FLASH": SDPBackend.FLASH_ATTENTION, "torch CUDNN": SDPBackend.CUDNN_ATTENTION}


def attention_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    """The floor reads a group's shared keys once."""
    model = batch.model
    rows_bytes = 2 * 2 * batch.tokens * model.q_heads * model.head_dim
    moved = batch.distinct_keys * model.token_kv_bytes + rows_bytes
    tables, num_blocks = block_tables(batch)
    cache_shape = (num_blocks, model.kv_heads, BLOCK_SIZE, model.head_dim)
    operands = [
        (
            bench.gaussian(batch.tokens, model.q_heads, model.head_dim),
            bench.gaussian(*cache_shape),
            bench.gaussian(*cache_shape),
        )
        for _ in range(copies(moved))
    ]
    run = bench.leaf(
        attention_site(
            "attention",
            q_heads=model.q_heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
        )
    )
    product: list[Launch] | None = None
    if run is not None:
        work = run.prepare(
            AttentionMetadata(
                query_start_loc=np.cumsum([0, *batch.queries]).astype(np.int32),
                seq_lens=np.array(batch.keys, dtype=np.int32),
                block_tables=tables,
            )
        )
        product = [partial(run, *one, work) for one in operands]
    yield Case(
        op="attention",
        workload=batch.workload,
        shape=_shape(batch),
        moved_bytes=moved,
        operations=4 * batch.scores * model.q_heads * model.head_dim,
        product=product,
        peers=_peers(bench, batch, len(operands)),
    )


def block_tables(batch: Batch) -> tuple[npt.NDArray[np.int32], int]:
    """Shuffled blocks of every sequence, a group's first ones in common; and their number."""
    blocks = [-(-keys // BLOCK_SIZE) for keys in batch.keys]
    common = batch.shared // BLOCK_SIZE
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32)
    tables = np.zeros((len(blocks), max(blocks)), dtype=np.int32)
    taken = 0
    for sequence, count in enumerate(blocks):
        tables[sequence, :count] = order[taken : taken + count]
        tables[sequence, :common] = tables[sequence - sequence % batch.group, :common]
        taken += count
    return tables, len(order)


def _shape(batch: Batch) -> str:
    keys = f"{min(batch.keys)}..{max(batch.keys)}" if len({*batch.keys}) > 1 else f"{batch.keys[0]}"
    shared = f", {batch.shared} shared by {batch.group}" if batch.shared else ""
    return f"{len(batch.queries)} x {max(batch.queries)} queries, {keys} keys{shared}"


def _peers(bench: Bench, batch: Batch, count: int) -> dict[str, list[Launch]]:
    """Where all sequences have one length: what torch takes without padding."""
    if len({*batch.queries}) > 1 or len({*batch.keys}) > 1:
        return {}
    model, sequences = batch.model, len(batch.queries)
    q_shape = (sequences, model.q_heads, batch.queries[0], model.head_dim)
    kv_shape = (sequences, model.kv_heads, batch.keys[0], model.head_dim)
    operands = [
        (bench.gaussian(*q_shape), bench.gaussian(*kv_shape), bench.gaussian(*kv_shape))
        for _ in range(count)
    ]
    found: dict[str, list[Launch]] = {}
    for name, backend in PEERS.items():
        launches: list[Launch] = [
            partial(_attend, backend, one, causal=not batch.decodes) for one in operands
        ]
        try:
            launches[0]()
        except RuntimeError:  # this backend does not take the shape
            continue
        found[name] = launches
    return found


def _attend(
    backend: SDPBackend,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    causal: bool,
) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(*operands, is_causal=causal, enable_gqa=True)
