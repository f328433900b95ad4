"""Under ``invariant``, ids, logprobs and full logits do not depend on what shares the batch.

Each leg counts what it exercised; a leg that exercised nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from tests.engine.harness import Key, Trace, assert_same_bits, run, tiny_engine
from tests.reference.tiny_models import FAMILIES, VOCAB, tiny_model

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_logprobs": 4},
    {"temperature": 0.7, "top_p": 0.9, "prompt_logprobs": True},
    {"temperature": 1.3, "top_k": 12},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.8, "stop": ("ab", "q")},
    {"repetition_penalty": 1.3, "presence_penalty": 0.7, "min_p": 0.02},
    {"frequency_penalty": -0.6, "logit_bias": ((5, 2.0), (7, -3.0)), "temperature": 0.0},
    {"allowed_token_ids": tuple(range(30, 70)), "top_logprobs": 2, "prompt_logprobs": True},
    {"min_tokens": 6, "repetition_penalty": 0.8},
    {"n": 2, "temperature": 0.9, "prompt_logprobs": True},
)
PIECES = ["<unk>", *(chr(ord("a") + place % 26) * (place // 26 + 1) for place in range(VOCAB - 1))]
STEMS = np.random.default_rng(99).integers(1, VOCAB, (2, 16))
"""Prompts begin with one of these, so that some of them share blocks."""


def request(
    number: int, rng: np.random.Generator, *, tokens: int = 12, longest_prompt: int = 30
) -> Request:
    """A random request; every second one may stop early."""
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    stops = rng.integers(0, VOCAB, 16).tolist() if number % 2 else []
    ids = rng.integers(1, VOCAB, rng.integers(2, longest_prompt + 1))
    shared = min(int(rng.integers(0, 17)), len(ids))
    ids[:shared] = STEMS[number % 2][:shared]
    return Request(
        id=number,
        prompt_token_ids=tuple(ids.tolist()),
        params=SamplingParams(
            seed=1000 + number, max_tokens=tokens, stop_token_ids=tuple(stops), **sampling
        ),
    )


def requests(count: int, seed: int, **shape: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [request(number, rng, **shape) for number in range(count)]


def build(folder: Path, family: str, dtype: str, **options: Any) -> Engine:
    chosen = {"dtype": DTYPES[dtype], "block_size": 4, "pieces": PIECES, **options}
    return tiny_engine(tiny_model(family), folder, **chosen)


def alone(asked: list[Request], folder: Path, dtype: str, family: str) -> Trace:
    """Every sample of every request by itself and cold, in one engine, one after the other."""
    trace = Trace()
    with build(folder, family, dtype, prefix_cache=False, max_num_seqs=1) as engine:
        for one in asked:
            own = run(engine, [one])
            assert (own.max_rows, own.hit_tokens, own.preemptions) == (1, 0, 0)
            trace.completions |= own.completions
            trace.logits |= own.logits
    return trace


@cache
def ten(family: str, dtype: str, longest_prompt: int, tokens: int) -> tuple[list[Request], Trace]:
    """Ten requests, and what each gives by itself."""
    shape = {"longest_prompt": longest_prompt, "tokens": tokens}
    asked = requests(10, FAMILIES.index(family), **shape)
    with TemporaryDirectory() as folder:
        return asked, alone(asked, Path(folder), dtype, family)


def assert_equal_traces(packed: Trace, single: Trace) -> None:
    """Completions, and each token's full row of logits, bit for bit."""
    assert set(packed.completions) == set(single.completions)
    for key, done in packed.completions.items():
        assert_same_bits(done, single.completions[key])
        count = len(done.token_ids)
        for one, other in zip(rows(packed, key, count), rows(single, key, count), strict=True):
            assert torch.equal(one, other)


def rows(trace: Trace, key: Key, count: int) -> list[torch.Tensor]:
    """The rows behind the committed tokens; what overshot a stop comes after them."""
    assert len(trace.logits[key]) >= count
    return trace.logits[key][:count]


LEGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "no cache": {"prefix_cache": False},
    "chunks": {"chunk_size": 3, "max_num_batched_tokens": 16},
    "tiny budget": {"max_num_batched_tokens": 5},
    "few rows": {"max_num_seqs": 3},
    "small pool": {"pool_blocks": 12},
    "lag 1": {"lag": 1},
    "lag 1, small pool, chunks": {"lag": 1, "pool_blocks": 12, "chunk_size": 5},
    "block 16": {"block_size": 16},
    "block 1": {"block_size": 1},
    "a preemption every step": {"debug_force_preemption_interval": 1},
    "a preemption every third step, lag 1": {"debug_force_preemption_interval": 3, "lag": 1},
    "preempted in the prompt": {"debug_force_preemption_interval": -1, "chunk_size": 2},
    "preempted in the prompt, lag 1": {
        "debug_force_preemption_interval": -2,
        "chunk_size": 3,
        "lag": 1,
        "prefix_cache": False,
    },
}


def cases() -> Iterator[Any]:
    """Every leg, family and dtype; by default each leg meets every family and dtype once."""
    for place, leg in enumerate(LEGS):
        for second, family in enumerate(FAMILIES):
            for third, dtype in enumerate(DTYPES):
                quick = (place + second + third) % len(DTYPES) == 0
                marks = () if quick else (pytest.mark.slow,)
                yield pytest.param(leg, family, dtype, marks=marks)


@pytest.mark.parametrize(("leg", "family", "dtype"), list(cases()))
def test_a_request_has_the_same_bits_alone_and_in_any_batch(
    tmp_path: Path, leg: str, family: str, dtype: str
) -> None:
    """vllm-project/vllm#32480: equality of fp32 logprobs, batches proven to form."""
    options = LEGS[leg]
    # Short prompts and long outputs outgrow a small pool after they were admitted.
    asked, single = ten(family, dtype, *((8, 36) if "pool_blocks" in options else (30, 12)))
    rng = np.random.default_rng(list(LEGS).index(leg))
    arrivals = {number: int(rng.integers(0, 7)) for number in range(len(asked))}
    with build(tmp_path, family, dtype, **options) as engine:
        packed = run(engine, asked, arrivals=arrivals)
        warm = run(engine, asked[::-1], arrivals=arrivals)
    assert packed.max_rows > 1
    if "chunk_size" in options or "max_num_batched_tokens" in options:
        assert packed.chunk_splits > 0
    if "pool_blocks" in options or "debug_force_preemption_interval" in options:
        assert packed.preemptions > 0
    if options.get("lag"):
        assert packed.overshoots > 0
    if options.get("block_size", 4) <= 4:
        assert (packed.hit_tokens > 0) == options.get("prefix_cache", True)
    assert_equal_traces(packed, single)
    assert_equal_traces(warm, single)


def test_sixty_four_resident_requests_keep_their_bits_every_time(tmp_path: Path) -> None:
    """vllm-project/vllm#51187: differences there began at about 44 resident rows."""
    rng = np.random.default_rng(4)
    asked = [request(number, rng, tokens=20) for number in range(64)]
    single = alone(asked, tmp_path / "alone", "float32", "qwen3")
    with build(tmp_path / "all", "qwen3", "float32", block_size=16) as engine:
        for _ in range(3):
            packed = run(engine, asked)
            assert packed.max_rows >= 48
            assert_equal_traces(packed, single)


def test_seeded_requests_do_not_depend_on_their_mates_seeds(tmp_path: Path) -> None:
    """vllm-project/vllm#51226: A is reproducible although B is unseeded."""
    ids = tuple(range(5, 25))
    a = Request(id="a", prompt_token_ids=ids, params=SamplingParams(seed=42, max_tokens=8))
    b = Request(id="b", prompt_token_ids=ids[3:], params=SamplingParams(max_tokens=8))
    seen = []
    for number in range(4):
        with tiny_engine(tiny_model("qwen3"), tmp_path / str(number), run_seed=number) as engine:
            trace = run(engine, [a, b])
        seen.append(trace.completions)
    for other in seen[1:]:
        assert_same_bits(other["a", 0], seen[0]["a", 0])
    assert len({tuple(one["b", 0].token_ids.tolist()) for one in seen}) > 1


def test_samples_are_requests_with_derived_seeds(tmp_path: Path) -> None:
    """vllm-project/vllm#10852: n = 4 equals four requests; n = 8 does not move the first four."""
    from pagedctl.numerics.random_stream import sample_seed

    ids = tuple(range(5, 25))

    def asked(name: str, n: int, seed: int) -> Request:
        params = SamplingParams(seed=seed, n=n, max_tokens=10)
        return Request(id=name, prompt_token_ids=ids, params=params)

    with tiny_engine(tiny_model("llama"), tmp_path) as engine:
        four = engine.generate([asked("four", 4, 1234)])
        eight = engine.generate([asked("eight", 8, 1234)])
        singles = [asked(f"one {j}", 1, sample_seed(1234, j)) for j in range(4)]
        ones = engine.generate(singles)
    for one, other, third in zip(four, eight[:4], ones, strict=True):
        assert_same_bits(one, other)
        assert_same_bits(one, third)
    assert len({tuple(one.token_ids.tolist()) for one in eight}) == 8
