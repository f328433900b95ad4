"""Cases of the linear layers and the head, one by one, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pagedctl.bench.kernels.bench import Bench
from pagedctl.bench.kernels.case import Case, copies
from pagedctl.bench.kernels.linear_stack import VENDOR, projection_site
from pagedctl.bench.kernels.replay import Launch
from pagedctl.bench.kernels.shapes import Batch, Projection


def gemm_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    for one in batch.model.projections():
        yield _product_case(bench, "gemm", batch, one, batch.tokens, output_bytes=2)


def head_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    """Ours gives float32 logits; of cuBLAS both that and bfloat16 are timed."""
    yield _product_case(bench, "head", batch, batch.model.head(), batch.sampled, output_bytes=4)


def _product_case(
    bench: Bench, op: str, batch: Batch, one: Projection, rows: int, *, output_bytes: int
) -> Case:
    moved = 2 * one.k * one.n + rows * (2 * one.k + output_bytes * one.n)
    x = bench.gaussian(rows, one.k)
    weights = [bench.gaussian(one.n, one.k) for _ in range(copies(moved))]
    run = bench.leaf(projection_site(one))
    peers: dict[str, list[Launch]] = {
        VENDOR: [partial(torch.mm, x, weight.T) for weight in weights]
    }
    if output_bytes == 4:
        peers[f"{VENDOR} float32"] = [
            partial(torch.mm, x, weight.T, out_dtype=torch.float32) for weight in weights
        ]
    return Case(
        op=op,
        workload=batch.workload,
        shape=f"{one.name} {rows} x {one.k} x {one.n}",
        moved_bytes=moved,
        operations=2 * rows * one.k * one.n,
        product=run and [partial(run, x, run.prepare(weight, None)) for weight in weights],
        peers=peers,
    )
