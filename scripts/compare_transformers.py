#!/usr/bin/env python3
"""Measures output tokens/s beside transformers on the CPU: same requests, one process, in turns.

    export OMP_NUM_THREADS=2 GOMP_SPINCOUNT=1000
    python scripts/compare_transformers.py SNAPSHOT --json out.json

Each repeat runs every system once, each repeat beginning with another one; a ratio compares two
systems within one repeat. Every system serves the same prompts greedily to the same lengths, the
end token ignored:

    generate    transformers' generate: one left-padded batch, as long as its longest answer
    continuous  transformers' continuous batching
    fast, invariant  this engine under each contract; it also returns every token's logprob
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from pagedctl import Engine, EngineConfig, Request, SamplingParams
from pagedctl.errors import PagedctlError
from pagedctl.manifest.files import refuse_existing, write_new
from pagedctl.manifest.hardware import cpu_info
from pagedctl.manifest.strict_json import dumps

SYSTEMS = ("generate", "continuous", "fast", "invariant")
PEERS = SYSTEMS[:2]
PAGE_TOKENS = 32
"""Of the continuous batching's cache: as quick as its default of 256 or quicker (measured)."""

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Run = Callable[[], list[int]]
"""Serves the whole batch and returns how many tokens each request got."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The requests of one batch: random prompts, and how many tokens each gets."""

    prompts: list[list[int]]
    output_tokens: list[int]

    @classmethod
    def draw(cls, args: argparse.Namespace, count: int, vocabulary: int) -> Work:
        """*count* requests; the first ones of a larger batch with the same seed."""
        random = Random(args.seed)
        drawn = [
            (
                [random.randrange(vocabulary) for _ in range(random.randint(*args.prompt))],
                random.randint(*args.output),
            )
            for _ in range(count)
        ]
        return cls(
            prompts=[prompt for prompt, _ in drawn], output_tokens=[tokens for _, tokens in drawn]
        )


def padded_generate(model: PreTrainedModel, work: Work) -> Run:
    """Left-padded and masked; rows that have their tokens already wait for the longest."""
    width = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (width - len(one)) + one for one in work.prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in work.prompts])
    chosen = _generation_config(max(work.output_tokens))

    def run() -> list[int]:
        model.set_attn_implementation("sdpa")
        made = model.generate(input_ids=ids, attention_mask=mask, generation_config=chosen)
        return [min(made.shape[1] - width, tokens) for tokens in work.output_tokens]

    return run


def continuous_batching(model: PreTrainedModel, work: Work, attention: str) -> Run:
    """A manager whose cache holds all requests at once; starting and stopping it is timed too."""
    lengths = [len(p) + n for p, n in zip(work.prompts, work.output_tokens, strict=True)]

    def run() -> list[int]:
        model.set_attn_implementation(attention)
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=sum(-(-length // PAGE_TOKENS) + 1 for length in lengths),
            max_batch_tokens=max(2048, len(lengths)),
            max_requests_per_batch=len(lengths),
            allow_block_sharing=False,
            use_cuda_graph=False,
        )
        made: dict[str, int] = {}
        with model.continuous_batching_context_manager(
            generation_config=_generation_config(max(work.output_tokens)),
            continuous_batching_config=config,
        ) as manager:
            for place, prompt in enumerate(work.prompts):
                tokens = work.output_tokens[place]
                manager.add_request(prompt, request_id=str(place), max_new_tokens=tokens)
            while len(made) < len(lengths):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("transformers' continuous batching stopped early")
                if result.is_finished():
                    made[result.request_id] = len(result.generated_tokens)
        return [made[str(place)] for place in range(len(lengths))]

    return run


def this_engine(engine: Engine, work: Work) -> Run:
    requests = [
        Request(
            id=place,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        )
        for place, (prompt, tokens) in enumerate(zip(work.prompts, work.output_tokens, strict=True))
    ]
    return lambda: [len(one.token_ids) for one in engine.generate(requests)]


def _generation_config(max_new_tokens: int) -> GenerationConfig:
    """Greedy, and no end token."""
    return GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=-1, pad_token_id=0
    )


@dataclass(frozen=True, kw_only=True)
class Systems:
    """Every system, loaded with one snapshot in one dtype."""

    model: PreTrainedModel
    engines: dict[str, Engine]
    attention: str

    @classmethod
    def load(cls, snapshot: Path, dtype: str, attention: str) -> Systems:
        return cls(
            model=AutoModelForCausalLM.from_pretrained(snapshot, dtype=getattr(torch, dtype)),
            engines={
                contract: Engine(EngineConfig(model=str(snapshot), dtype=dtype, numerics=contract))
                for contract in SYSTEMS[2:]
            },
            attention=attention,
        )

    def runs(self, work: Work) -> dict[str, Run]:
        return {
            "generate": padded_generate(self.model, work),
            "continuous": continuous_batching(self.model, work, self.attention),
            **{name: this_engine(engine, work) for name, engine in self.engines.items()},
        }


def measure(
    runs: dict[str, Run], work: Work, repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every run by system, after one untimed round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(-1, repeats):
        turn = repeat % len(runs)
        for name in [*runs][turn:] + [*runs][:turn]:
            start = clock()
            made = runs[name]()
            taken = clock() - start
            if made != work.output_tokens:
                raise RuntimeError(f"{name} returned {made} tokens, asked {work.output_tokens}")
            if repeat >= 0:
                seconds[name].append(taken)
    return seconds


def table(dtype: str, work: Work, seconds: dict[str, list[float]]) -> Iterator[str]:
    """One line a system: tokens/s (median, least, most), and medians of ratios to the peers."""
    total = sum(work.output_tokens)
    for name, taken in seconds.items():
        rates = sorted(total / one for one in taken)
        ratios = [
            median(p / own for p, own in zip(seconds[peer], taken, strict=True)) for peer in PEERS
        ]
        yield (
            f"{dtype:9} {len(work.prompts):8} {name:11} {median(rates):8.1f} "
            f"({rates[0]:.1f} to {rates[-1]:.1f})  " + "  ".join(f"{r:5.2f}x" for r in ratios)
        )


def machine() -> dict[str, object]:
    cpu = cpu_info()
    return {
        "cpu": cpu.name,
        "cores_usable": cpu.cores_usable,
        "isa_flags": cpu.isa_flags,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "GOMP_"))},
    }


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("..")
    return int(low), int(high or low)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("snapshot", type=Path, help="folder of the model, as Hugging Face lays it")
    parser.add_argument("--json", type=Path, required=True, help="new file for every sample")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", type=_span, default=(16, 256), help="tokens, LOW..HIGH")
    parser.add_argument("--output", type=_span, default=(32, 128), help="tokens, LOW..HIGH")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: processor seconds, for one thread on a busy machine",
    )
    parser.add_argument("--attention", default="sdpa", help="of the continuous batching")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    args = parse(words)
    refuse_existing(args.json, "--json")
    warnings.filterwarnings("ignore", module="transformers")
    transformers.logging.set_verbosity_error()
    results = []
    print("dtype     requests system      output tokens/s (median, range)  of generate, continuous")
    for dtype in args.dtypes:
        systems = Systems.load(args.snapshot, dtype, args.attention)
        for count in args.requests:
            work = Work.draw(args, count, systems.model.config.vocab_size)
            seconds = measure(systems.runs(work), work, args.repeats, CLOCKS[args.clock])
            print("\n".join(table(dtype, work, seconds)), flush=True)
            results.append({"dtype": dtype, **asdict(work), "seconds": seconds})
    settings = {name: str(value) for name, value in vars(args).items()}
    record = {"settings": settings, "machine": machine(), "results": results}
    write_new(args.json, dumps(record, indent=True))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PagedctlError as error:
        sys.exit(str(error))
