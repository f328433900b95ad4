"""Cases of the row kernels: embedding, norms, RoPE with the cache write, activation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as functional

from pagedctl.bench.kernels.bench import Bench
from pagedctl.bench.kernels.case import Case, copies
from pagedctl.bench.kernels.shapes import BLOCK_SIZE, Batch
from pagedctl_kernels.sites import (
    embedding_site,
    qk_norm_rope_write_site,
    rms_norm_site,
    silu_mul_site,
)

EPS = 1e-6
EAGER = "torch eager"


def embedding_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    model, tokens = batch.model, batch.tokens
    weight = bench.gaussian(model.vocabulary, model.hidden)
    moved = tokens * (8 + 4 * model.hidden)
    ids = [
        torch.randint(model.vocabulary, (tokens,), device=bench.device)
        for _ in range(copies(moved))
    ]
    run = bench.leaf(
        embedding_site(
            "embedding", vocab_size=model.vocabulary, width=model.hidden, dtype="bfloat16"
        )
    )
    yield Case(
        op="embedding",
        workload=batch.workload,
        shape=f"{tokens} x {model.hidden}",
        moved_bytes=moved,
        product=run and [partial(run, one, weight) for one in ids],
        peers={EAGER: [partial(functional.embedding, one, weight) for one in ids]},
    )


def rms_norm_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    """With the residual sum: two inputs, two outputs."""
    width, tokens = batch.model.hidden, batch.tokens
    weight = bench.gaussian(width)
    moved = 4 * 2 * tokens * width
    pairs = [
        (bench.gaussian(tokens, width), bench.gaussian(tokens, width)) for _ in range(copies(moved))
    ]
    run = bench.leaf(rms_norm_site("input_layernorm", width=width, eps=EPS, dtype="bfloat16"))
    yield Case(
        op="rms_norm",
        workload=batch.workload,
        shape=f"{tokens} x {width}",
        moved_bytes=moved,
        product=run and [partial(run, x, weight, residual) for x, residual in pairs],
        peers={EAGER: [partial(_norm_of_sum, x, weight, residual) for x, residual in pairs]},
    )


def qk_norm_rope_write_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    model, tokens = batch.model, batch.tokens
    q_width, kv_width = model.q_heads * model.head_dim, model.kv_heads * model.head_dim
    moved = 2 * 2 * tokens * (q_width + 2 * kv_width) + tokens * (4 * model.head_dim + 16)
    weights = bench.gaussian(model.head_dim), bench.gaussian(model.head_dim)
    cos_sin = bench.gaussian(max(batch.keys), model.head_dim, dtype=torch.float32)
    spans = zip(batch.queries, batch.keys, strict=True)
    positions = torch.cat([torch.arange(k - q, k, device=bench.device) for q, k in spans])
    shape = (-(-tokens // BLOCK_SIZE) + 1, model.kv_heads, BLOCK_SIZE, model.head_dim)
    launches = [
        (
            bench.gaussian(tokens, q_width + 2 * kv_width),
            *weights,
            cos_sin,
            positions,
            torch.randperm(shape[0] * BLOCK_SIZE, device=bench.device)[:tokens],
            bench.gaussian(*shape),
            bench.gaussian(*shape),
        )
        for _ in range(copies(moved))
    ]
    run = bench.leaf(
        qk_norm_rope_write_site(
            "qk_norm_rope_write",
            q_heads=model.q_heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            rotary_dim=model.head_dim,
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
            qk_norm=True,
            eps=EPS,
        )
    )
    yield Case(
        op="qk_norm_rope_write",
        workload=batch.workload,
        shape=f"{tokens} x ({model.q_heads} + 2 x {model.kv_heads}) x {model.head_dim}",
        moved_bytes=moved,
        product=run and [partial(run, *operands) for operands in launches],
    )


def silu_mul_cases(batch: Batch, bench: Bench) -> Iterator[Case]:
    width, tokens = batch.model.intermediate, batch.tokens
    moved = 3 * 2 * tokens * width
    inputs = [bench.gaussian(tokens, 2 * width) for _ in range(copies(moved))]
    run = bench.leaf(silu_mul_site("act", width=width, dtype="bfloat16"))
    yield Case(
        op="silu_mul",
        workload=batch.workload,
        shape=f"{tokens} x {width}",
        moved_bytes=moved,
        product=run and [partial(run, gate_up) for gate_up in inputs],
        peers={EAGER: [partial(_silu_mul, gate_up) for gate_up in inputs]},
    )


def _norm_of_sum(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x + residual, weight.shape, weight, EPS)


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
