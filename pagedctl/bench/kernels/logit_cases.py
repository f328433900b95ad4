"""Cases of what reads rows of logits: edits, the draw, the logprob of the drawn token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pagedctl.bench.kernels.bench import Bench
from pagedctl.bench.kernels.case import Case, copies
from pagedctl.bench.kernels.replay import Launch
from pagedctl.bench.kernels.row_cases import EAGER
from pagedctl.bench.kernels.shapes import Batch
from pagedctl_kernels.ops.interfaces import EditedRows, SamplingRows
from pagedctl_kernels.sites import block_sumexp_site, logit_edits_site, logprob_site, sample_site

LOGIT_DEVIATION = 4.5
"""As of a trained model's rows: a flat row misprices top-p."""


def sample_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    """The floor reads each row once; a truncated draw may have to read it again."""
    rows, moved = _logits(bench, batch)
    sampling = _sampling_rows(bench, batch)
    run = bench.leaf(sample_site("sample", dtype="bfloat16"))
    peers: dict[str, list[Launch]] = {}
    if batch.temperature == 0:
        kind = "greedy"
        peers["torch.argmax"] = [partial(torch.argmax, one, dim=-1) for one in rows]
    elif batch.top_p < 1:
        kind = f"top_p {batch.top_p}"
        peers["torch sort"] = [partial(_draw_sorted, one, batch.top_p) for one in rows]
    else:
        kind = "T = 1"
        peers[EAGER] = [partial(_draw, one) for one in rows]
    yield Case(
        op="sample",
        workload=batch.workload,
        shape=f"{_shape(batch)}, {kind}",
        moved_bytes=moved,
        product=run and [partial(run, one, sampling) for one in rows],
        peers=peers,
    )


def logprob_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    """Of one drawn token a row, block sums included."""
    rows, moved = _logits(bench, batch)
    temperature = torch.full((batch.sampled,), 0.9, device=bench.device)
    ids = torch.randint(batch.model.vocabulary, (batch.sampled, 1), device=bench.device)
    run = bench.leaf(logprob_site("logprob", dtype="bfloat16"))
    sums = bench.leaf(block_sumexp_site("block_sumexp", dtype="bfloat16"))
    product: list[Launch] | None = None
    if run is not None and sums is not None:
        product = [partial(run, one, temperature, ids, block_sumexp=sums) for one in rows]
    yield Case(
        op="logprob",
        workload=batch.workload,
        shape=_shape(batch),
        moved_bytes=moved,
        product=product,
        peers={EAGER: [partial(_logprob, one, temperature, ids) for one in rows]},
    )


def logit_edits_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    """Every edit of every row: logits read and written, bias and counts as wide as the rows."""
    rows, moved = _logits(bench, batch)
    edits = _edited_rows(bench, batch)
    tables = batch.sampled * batch.model.vocabulary * (4 + 1 + 4)
    run = bench.leaf(logit_edits_site("logit_edits", dtype="bfloat16"))
    yield Case(
        op="logit_edits",
        workload=batch.workload,
        shape=_shape(batch),
        moved_bytes=2 * moved + tables,
        product=run and [partial(run, one, edits) for one in rows],
    )


def _logits(bench: Bench, batch: Batch) -> tuple[list[torch.Tensor], int]:
    """Sets of float32 rows, and the bytes of one set."""
    moved = 4 * batch.sampled * batch.model.vocabulary
    shape = (batch.sampled, batch.model.vocabulary)
    return [
        bench.gaussian(*shape, dtype=torch.float32) * LOGIT_DEVIATION for _ in range(copies(moved))
    ], moved


def _shape(batch: Batch) -> str:
    return f"{batch.sampled} x {batch.model.vocabulary}"


def _sampling_rows(bench: Bench, batch: Batch) -> SamplingRows:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch.sampled,), value, dtype=dtype, device=bench.device)

    return SamplingRows(
        temperature=column(batch.temperature, torch.float32),
        top_k=column(0, torch.int64),
        top_p=column(batch.top_p, torch.float64),
        min_p=column(0, torch.float32),
        seed=torch.arange(batch.sampled, device=bench.device),
        position=torch.tensor(batch.keys, device=bench.device),
    )


def _edited_rows(bench: Bench, batch: Batch) -> EditedRows:
    count, shape = batch.sampled, (batch.sampled, batch.model.vocabulary)
    every = torch.arange(count, device=bench.device)
    return EditedRows(
        row=every,
        slot=every,
        repetition=torch.full((count,), 1.1, device=bench.device),
        presence=torch.full((count,), 0.1, device=bench.device),
        frequency=torch.full((count,), 0.1, device=bench.device),
        bias=bench.gaussian(*shape, dtype=torch.float32),
        in_prompt=torch.rand(shape, device=bench.device) < 0.01,
        counts=torch.randint(2, shape, device=bench.device, dtype=torch.int32),
        barred_row=every,
        barred_token=every,
    )


def _draw(logits: torch.Tensor) -> torch.Tensor:
    """Exponential race, as engines draw in eager torch."""
    probabilities = torch.softmax(logits, dim=-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def _draw_sorted(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    values, order = logits.sort(dim=-1, descending=True)
    mass = torch.softmax(values, dim=-1)
    kept = values.masked_fill(mass.cumsum(dim=-1) - mass >= top_p, -torch.inf)
    return order.gather(-1, _draw(kept).unsqueeze(-1))


def _logprob(logits: torch.Tensor, temperature: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits / temperature.unsqueeze(-1), dim=-1).gather(-1, ids)
