#!/usr/bin/env python3
"""Times whole decode steps on the GPU in a CUDA graph, beside their byte floor and cuBLAS.

    python scripts/bench_decode_step.py --model qwen3-8b --rows 1 16 64 256 --context 384

A step is the decoder over the bound leaves, the head, one draw per row and its logprob: what an
engine runs between two tokens, without the engine. Weights are random. The floor is one read
of the weights and of the live keys and values at the measured read bandwidth; the vendor's line
is the same linear layers by cuBLAS in a graph of their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from pagedctl.bench.kernels.ceilings import Ceilings, measure_ceilings
from pagedctl.bench.kernels.replay import Launch, replayed
from pagedctl.engine.sampler import Sampler
from pagedctl.models.binding import bind_plans
from pagedctl.models.builtin import BUILTIN
from pagedctl.models.decoder import Decoder, DecoderBatch
from pagedctl.models.random_weights import random_weights
from pagedctl.models.resolve import spec_from_config
from pagedctl.models.spec import ModelSpec
from pagedctl.numerics.envelopes import house_envelopes
from pagedctl.numerics.resolution import resolve_numerics
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.machine import this_machine
from pagedctl_kernels.ops.interfaces import AttentionMetadata, SamplingRows

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One line of the table; times in ms."""

    rows: int
    context: int
    step_ms: float
    spread_ms: float
    floor_ms: float
    cublas_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(BUILTIN))
    parser.add_argument("--layers", type=int, help="of the model, fewer to try a change quickly")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[384], help="keys per sequence")
    parser.add_argument("--shared", type=int, default=0, help="keys that groups of 16 rows share")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--numerics", default="invariant", choices=["invariant", "fast"])
    args = parser.parse_args()
    config = dict(BUILTIN[args.model])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    bench = StepBench(spec_from_config(config, dtype="bfloat16"), args.numerics)
    ceilings = measure_ceilings()
    lines = [
        bench.measure(rows, context, ceilings, shared=args.shared, top_p=args.top_p)
        for rows in args.rows
        for context in args.context
    ]
    Console(width=110).print(table(lines, args.model, ceilings))


class StepBench:
    """A model on the GPU, whose steps are captured and timed."""

    def __init__(self, spec: ModelSpec, numerics: str) -> None:
        self.spec = spec
        started = time.perf_counter()
        self.plans = bind_plans(
            spec,
            resolve_numerics(house_envelopes()[numerics], {}, {}),
            block_size=BLOCK_SIZE,
            kv_dtype=spec.dtype,
            machine=this_machine("cuda"),
            registry=house_registry(),
        )
        weights = random_weights(spec, 0, device="cuda")
        self.weight_bytes = sum(one.numel() * one.element_size() for one in weights.values())
        self.decoder = Decoder(spec, self.plans, weights, num_positions=8192)
        self.embedding_bytes = (
            self.decoder.embedding.numel() * self.decoder.embedding.element_size()
        )
        self.sampler = Sampler(self.decoder, "scaled")
        print(f"loaded in {time.perf_counter() - started:.1f} s: {self.plans.leaves()}")

    @torch.inference_mode()
    def measure(
        self, rows: int, context: int, ceilings: Ceilings, *, shared: int, top_p: float
    ) -> Measured:
        """The step of *rows* sequences that have *context* keys each, this step's included."""
        batch, caches, live_keys = self._batch(rows, context, shared)
        works = self.decoder.attention_works(batch.metadata)
        sampling = _sampling(rows, context, top_p)

        def step() -> None:
            hidden = self.decoder.forward(batch, caches, works)
            self.sampler.sample(self.decoder.logits(hidden), sampling)

        found = replayed({"step": [step], "cuBLAS": [self._cublas_stack(rows)]})
        read_bytes = self.weight_bytes + live_keys * self._token_bytes()
        if not self.spec.tie_word_embeddings:
            read_bytes -= self.embedding_bytes
        return Measured(
            rows=rows,
            context=context,
            step_ms=found["step"].us / 1e3,
            spread_ms=found["step"].spread_us / 1e3,
            floor_ms=read_bytes / ceilings.read / 1e3,
            cublas_ms=found["cuBLAS"].us / 1e3,
        )

    def _token_bytes(self) -> int:
        spec = self.spec
        return 2 * 2 * spec.num_key_value_heads * spec.head_dim * spec.num_hidden_layers

    def _batch(
        self, rows: int, context: int, shared: int
    ) -> tuple[DecoderBatch, list[tuple[torch.Tensor, torch.Tensor]], int]:
        """A decode of every sequence, over a filled cache; and how many keys are live."""
        own_blocks = -(-context // BLOCK_SIZE)
        common = min(shared, context - 1) // BLOCK_SIZE
        tables = np.zeros((rows, own_blocks), dtype=np.int32)
        order = np.random.default_rng(0).permutation(rows * own_blocks).astype(np.int32)
        tables[:] = order.reshape(rows, own_blocks)
        for row in range(rows):
            tables[row, :common] = tables[row - row % 16, :common]
        unused = rows * (own_blocks * BLOCK_SIZE - context)
        live_keys = len(np.unique(tables)) * BLOCK_SIZE - unused
        spec = self.spec
        shape = (rows * own_blocks, spec.num_key_value_heads, BLOCK_SIZE, spec.head_dim)
        caches = []
        for _ in range(spec.num_hidden_layers):
            pair = torch.randn((2, *shape), device="cuda", dtype=torch.bfloat16)
            caches.append((pair[0], pair[1]))
        last = context - 1
        slots = tables[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE
        generator = torch.Generator(device="cuda").manual_seed(1)
        return (
            DecoderBatch(
                token_ids=torch.randint(
                    0, spec.input_vocab_size, (rows,), device="cuda", generator=generator
                ),
                positions=torch.full((rows,), last, device="cuda"),
                slot_mapping=torch.from_numpy(slots).cuda(),
                metadata=AttentionMetadata(
                    query_start_loc=np.arange(rows + 1, dtype=np.int32),
                    seq_lens=np.full(rows, context, dtype=np.int32),
                    block_tables=tables,
                ),
            ),
            caches,
            live_keys,
        )

    def _cublas_stack(self, rows: int) -> Launch:
        """The step's linear layers and head by cuBLAS, over the decoder's own weights."""
        layers = self.decoder.layers
        inputs = {
            k: torch.randn((rows, k), device="cuda", dtype=torch.bfloat16)
            for k in {
                self.spec.hidden_size,
                self.spec.q_size,
                self.spec.intermediate_size,
            }
        }

        def stack() -> None:
            for layer in layers:
                for one in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
                    torch.mm(inputs[one.k], one.weight[: one.n, : one.k].T)
            head = self.decoder.head
            torch.mm(inputs[head.k], head.weight[: head.n].T)

        return stack


def _sampling(rows: int, context: int, top_p: float) -> SamplingRows:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return SamplingRows(
        temperature=column(1.0, torch.float32),
        top_k=column(0, torch.int64),
        top_p=column(top_p, torch.float64),
        min_p=column(0.0, torch.float32),
        seed=torch.arange(rows, device="cuda"),
        position=column(context, torch.int64),
    )


def table(lines: Sequence[Measured], model: str, ceilings: Ceilings) -> Table:
    name = torch.cuda.get_device_name()
    made = Table(title=f"decode step of {model} on {name}, read {ceilings.read / 1e3:,.0f} GB/s")
    for column in ("rows", "keys", "step ms", "spread", "floor ms", "of floor", "cuBLAS linear ms"):
        made.add_column(column, justify="right")
    for one in lines:
        made.add_row(
            str(one.rows),
            str(one.context),
            f"{one.step_ms:.3f}",
            f"{one.spread_ms:.3f}",
            f"{one.floor_ms:.3f}",
            f"{one.floor_ms / one.step_ms:.0%}",
            f"{one.cublas_ms:.3f}",
        )
    return made


if __name__ == "__main__":
    main()
