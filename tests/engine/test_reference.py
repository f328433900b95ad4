"""The engine against an independent float64 transformer, in every family and contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pagedctl.engine.request import Request, SamplingParams
from tests.engine.harness import Trace, run, tiny_engine
from tests.reference.tiny_models import FAMILIES, VOCAB, TinyModel, tiny_model

PROMPT_LENGTHS = (3, 9, 17)
NEW_TOKENS = 10


def prompts(seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, length).tolist() for length in PROMPT_LENGTHS]


def greedy_requests(count: int = NEW_TOKENS) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [
        Request(id=number, prompt_token_ids=tuple(prompt), params=params)
        for number, prompt in enumerate(prompts())
    ]


def trace_of(model: TinyModel, folder: Path, dtype: torch.dtype, **options: object) -> Trace:
    with tiny_engine(model, folder, dtype=dtype, **options) as engine:
        return run(engine, greedy_requests())


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_a_float64_transformer(
    tmp_path: Path, family: str, chunk_size: int, numerics: str
) -> None:
    model = tiny_model(family)
    trace = trace_of(
        model,
        tmp_path,
        torch.float64,
        numerics=numerics,
        chunk_size=chunk_size,
        block_size=4,
    )
    reference = model.reference()
    for number, prompt in enumerate(prompts()):
        ids, logprobs = reference.greedy(prompt, NEW_TOKENS)
        done = trace.completions[number, 0]
        assert done.token_ids.tolist() == ids
        np.testing.assert_allclose(done.logprobs, logprobs, rtol=0, atol=1e-5)
        last = trace.logits[number, 0][-1]
        expected = reference.logits([*prompt, *ids[:-1]])[-1]
        # The RoPE table is float32 by the arithmetic page, hence not 1e-12.
        np.testing.assert_allclose(last.numpy(), expected, rtol=0, atol=2e-5)
    assert trace.chunk_splits > 0 or chunk_size == 64


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_ids_equal_the_float64_transformer(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    trace = trace_of(model, tmp_path, torch.float32, block_size=4, chunk_size=5)
    for number, prompt in enumerate(prompts()):
        ids, logprobs = model.reference().greedy(prompt, NEW_TOKENS)
        done = trace.completions[number, 0]
        assert done.token_ids.tolist() == ids
        np.testing.assert_allclose(done.logprobs, logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_and_invariant_differ_by_rounding_alone(
    tmp_path: Path, family: str, seed: int
) -> None:
    """float64: logits within 1e-9 and the same greedy ids over random compositions."""
    rng = np.random.default_rng(seed)
    model = tiny_model(family, seed=seed)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    requests = [
        Request(
            id=number,
            prompt_token_ids=tuple(rng.integers(1, VOCAB, rng.integers(2, 31)).tolist()),
            params=params,
        )
        for number in range(8)
    ]
    arrivals = {number: int(rng.integers(0, 6)) for number in range(8)}
    options = {
        "chunk_size": int(rng.choice([3, 5, 64])),
        "max_num_batched_tokens": int(rng.choice([8, 16, 64])),
        "max_num_seqs": int(rng.choice([2, 4, 16])),
        "block_size": int(rng.choice([2, 4, 16])),
    }
    traces = {}
    for numerics in ("fast", "invariant"):
        with tiny_engine(model, tmp_path / numerics, numerics=numerics, **options) as engine:
            traces[numerics] = run(engine, requests, arrivals=arrivals)
    assert traces["fast"].max_rows > 1
    for key, done in traces["fast"].completions.items():
        assert done.token_ids.tolist() == traces["invariant"].completions[key].token_ids.tolist()
        pairs = zip(traces["fast"].logits[key], traces["invariant"].logits[key], strict=True)
        assert max(float((one - other).abs().max()) for one, other in pairs) < 1e-9
