"""What an engine must do, as checks that a mutant has to fail: each raises where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, RequestId, SamplingParams
from tests.engine.harness import (
    POISON,
    assert_prefix_bits,
    assert_same_bits,
    assert_same_floats,
    drain,
    run,
    tiny_engine,
)
from tests.reference.tiny_models import tiny_model

Oracle = Callable[[Path], None]

PROMPTS = (tuple(range(3, 20)), tuple(range(40, 49)), tuple(range(60, 85)))


def asked(name: RequestId, prompt: tuple[int, ...] = PROMPTS[0], **params: Any) -> Request:
    salt = params.pop("cache_salt", None)
    chosen = {"seed": 7, "max_tokens": 8, "ignore_eos": True, **params}
    return Request(
        id=name, prompt_token_ids=prompt, params=SamplingParams(**chosen), cache_salt=salt
    )


def build(folder: Path, **options: Any) -> Engine:
    chosen = {"dtype": torch.float32, "block_size": 4, **options}
    return tiny_engine(tiny_model("qwen3"), folder, **chosen)


def greedy(folder: Path) -> None:
    """Greedy ids equal the float64 reference, packed, in chunks."""
    requests = [asked(n, prompt, temperature=0.0) for n, prompt in enumerate(PROMPTS)]
    with build(folder, dtype=torch.float64, chunk_size=5) as engine:
        trace = run(engine, requests)
    for number, prompt in enumerate(PROMPTS):
        ids, _ = tiny_model("qwen3").reference().greedy(list(prompt), 8)
        assert trace.completions[number, 0].token_ids.tolist() == ids


def greedy_at_lag_1(folder: Path) -> None:
    """There the sampled token feeds the next step on the device."""
    with build(folder, dtype=torch.float64, lag=1) as engine:
        (done,) = engine.generate([asked(0, temperature=0.0)])
    ids, _ = tiny_model("qwen3").reference().greedy(list(PROMPTS[0]), 8)
    assert done.token_ids.tolist() == ids


def stream(folder: Path) -> None:
    """A seeded request draws the same tokens first and last in line, chunked and not."""
    needle = asked("needle", max_tokens=10)
    others = [asked(n, prompt, seed=None) for n, prompt in enumerate(PROMPTS)]
    with build(folder / "alone") as engine:
        single = run(engine, [needle]).completions["needle", 0]
    for name, requests, chunk in (
        ("last", [*others, needle], 64),
        ("chunks", [needle, *others], 4),
    ):
        with build(folder / name, chunk_size=chunk) as engine:
            trace = run(engine, requests)
        assert trace.max_rows > 1
        assert_same_bits(trace.completions["needle", 0], single)


def samples(folder: Path) -> None:
    with build(folder) as engine:
        done = engine.generate([asked(0, n=4)])
    assert len({tuple(one.token_ids.tolist()) for one in done}) == 4


def preemption(folder: Path) -> None:
    """A small pool preempts, and every request still gets the tokens of an ample one."""
    requests = [asked(n, prompt, max_tokens=20) for n, prompt in enumerate(PROMPTS)]
    results = {}
    for name, blocks in (("ample", 400), ("small", 15)):
        with build(folder / name, pool_blocks=blocks, prefix_cache=False) as engine:
            results[name] = run(engine, requests)
    assert results["small"].preemptions > 0
    for key, done in results["small"].completions.items():
        assert len(done.token_ids) == 20
        assert_same_bits(done, results["ample"].completions[key])


def top_k(folder: Path) -> None:
    """Of one token, the best, and it is certain."""
    _certain(folder, top_k=1)


def top_p(folder: Path) -> None:
    _certain(folder, top_p=1e-9)


def _certain(folder: Path, **params: Any) -> None:
    with build(folder, logprob_basis="processed") as engine:
        (best,) = engine.generate([asked(0, temperature=0.0)])
        (done,) = engine.generate([asked(0, temperature=1.5, **params)])
    assert done.logprobs.tolist() == [0.0] * 8
    assert done.token_ids.tolist() == best.token_ids.tolist()


def scaled_logprobs(folder: Path) -> None:
    """They are of all tokens at the temperature, whatever was truncated."""
    with build(folder) as engine:
        trace = run(engine, [asked(0, temperature=0.7, top_k=5)])
    done = trace.completions[0, 0]
    for token, logprob, row in zip(done.token_ids, done.logprobs, trace.logits[0, 0], strict=True):
        assert abs(float((row.double() / 0.7).log_softmax(-1)[token]) - logprob) < 1e-5


def stops(folder: Path) -> None:
    """A stop token ends a sample, at any length; the same ids up to there."""
    with build(folder) as engine:
        (free,) = engine.generate([asked(0)])
        ids = free.token_ids.tolist()
        (done,) = engine.generate([asked(0, stop_token_ids=(ids[4],))])
    assert len(done.token_ids) == ids.index(ids[4]) + 1
    assert (done.finish_reason, done.stop_reason) == ("stop", ids[4])
    assert_prefix_bits(done, free)


def faults(folder: Path) -> None:
    """A NaN in a prompt's past, beyond every window, fails the request and is never cached."""
    prompt = (*range(3, 12), POISON, *range(12, 30))
    model = tiny_model("mistral", sliding_window=5, windows_by_layer={0: 5, 1: 5})
    options: dict[str, Any] = {"dtype": torch.float32, "block_size": 4, "chunk_size": 4}
    with tiny_engine(model, folder, poisoned=True, **options) as engine:
        for _ in range(2):
            found = run(engine, [asked("bad", prompt), asked("good", PROMPTS[1])])
            done = found.completions["bad", 0]
            assert done.error is not None
            assert len(done.token_ids) == 0
            assert done.cached_tokens == 0
            assert found.completions["good", 0].error is None


def exact_pool(folder: Path) -> None:
    """block 4, prompt 3, 6 new tokens: eight cached tokens are two blocks."""
    with build(folder, pool_blocks=2) as engine:
        (done,) = engine.generate([asked(0, PROMPTS[0][:3], max_tokens=6)])
    assert len(done.token_ids) == 6


def prefixes(folder: Path) -> None:
    """[A][X] and [B][X], with [B] cached before: X is not the same there."""
    a, b, x = PROMPTS[0][:4], PROMPTS[1][:4], PROMPTS[2][:4]
    requests = [asked(0, (*a, *x, 1)), asked(1, (*b, 1)), asked(2, (*b, *x, 1))]
    with build(folder / "cold", prefix_cache=False) as engine:
        cold = [engine.generate([one])[0] for one in requests]
    with build(folder / "warm") as engine:
        warm = [engine.generate([one])[0] for one in requests]
    assert warm[2].cached_tokens == 4
    for one, other in zip(warm, cold, strict=True):
        assert_same_bits(one, other)


def salts(folder: Path) -> None:
    with build(folder) as engine:
        found = [engine.generate([asked(0, cache_salt=salt)])[0] for salt in ("a", "b", "a")]
    assert [one.cached_tokens for one in found] == [0, 0, 16]


def scores(folder: Path) -> None:
    """Equal to what was generated, from any start, with the cache warm."""
    with build(folder, chunk_size=5) as engine:
        (done,) = engine.generate([asked(0, temperature=0.6, max_tokens=12)])
        ids = [*PROMPTS[0], *done.token_ids.tolist()]
        for start in (17, 21):
            (found,) = engine.score([ids], start=start, temperature=0.6)
            assert_same_floats(found.logprobs, done.logprobs[start - 17 :])
        (whole,) = engine.score([ids], temperature=0.6)
    rows = tiny_model("qwen3").reference().logits(ids)[:-1] / 0.6
    expected = torch.from_numpy(rows).log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(whole.logprobs, expected.numpy(), rtol=0, atol=1e-4)


def cancels(folder: Path) -> None:
    """With a token in flight: what was committed comes back, and no more."""
    with build(folder, lag=1) as engine:
        (whole,) = engine.generate([asked("x")])
        before = engine.stats().output_tokens
        engine.submit(asked("x"))
        for _ in range(5):
            engine.step()
        (sequence,) = engine.parts.scheduler.sequences()
        committed = engine.stats().output_tokens - before
        assert sequence.num_in_flight > 0
        assert engine.cancel() == 1
        partial = drain(engine)["x", 0]
        assert sequence.num_output_tokens == committed  # what came later was dropped
    assert len(partial.token_ids) == committed > 0
    assert_prefix_bits(partial, whole)


ALL: tuple[Oracle, ...] = (
    greedy,
    greedy_at_lag_1,
    stream,
    samples,
    preemption,
    top_k,
    top_p,
    scaled_logprobs,
    stops,
    faults,
    exact_pool,
    prefixes,
    salts,
    scores,
    cancels,
)
