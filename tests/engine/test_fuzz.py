"""Random requests, mates, faults, cancels and pauses on random small engines.

After every event the books are audited. In the end everything is free, every sample was
answered exactly once, and a share of the answers is compared bit for bit with lone runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Completion, Request, SamplingParams, ScoreRequest
from tests.engine.harness import (
    POISON,
    Key,
    assert_all_free,
    assert_prefix_bits,
    assert_same_bits,
    assert_same_floats,
    drain,
    tiny_engine,
)
from tests.reference.tiny_models import FAMILIES, VOCAB, tiny_model

CAP = 48
PIECES = ["<unk>", *(chr(ord("a") + place % 26) * (place // 26 + 1) for place in range(VOCAB - 1))]
MODES = ("keep", "wait", "abort")


def build(folder: Path, family: str, **options: Any) -> Engine:
    model = tiny_model(family, tie_word_embeddings=False)
    fixed = {"dtype": torch.float32, "pieces": PIECES, "poisoned": True, "max_model_len": CAP}
    return tiny_engine(model, folder, **{**fixed, **options})


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    block_size = int(rng.choice([1, 2, 4, 8]))
    needed = -(-(CAP - 1) // block_size)
    return {
        "block_size": block_size,
        "pool_blocks": needed + int(rng.integers(0, needed)),
        "chunk_size": int(rng.choice([1, 3, 7, 64])),
        "max_num_batched_tokens": int(rng.choice([4, 9, 32, 256])),
        "max_num_seqs": int(rng.choice([2, 5, 16])),
        "lag": int(rng.integers(0, 2)),
        "prefix_cache": bool(rng.random() < 0.8),
        "debug_force_preemption_interval": [None, None, 1, 3, -1][int(rng.integers(0, 5))],
    }


def random_ids(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.choice(VOCAB, count, replace=False).tolist())


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Each field is off more often than not; all of them come together at times."""
    chosen: dict[str, Any] = {"max_tokens": int(rng.integers(1, 24))}
    fields: dict[str, Any] = {
        "n": int(rng.integers(2, 5)),
        "seed": int(rng.integers(0, 100)),
        "temperature": float(rng.choice([0.0, 1e-4, 0.5, 0.9, 2.0])),
        "top_k": int(rng.choice([1, 4, 40])),
        "top_p": float(rng.choice([1e-9, 0.5, 0.95])),
        "min_p": float(rng.choice([0.05, 0.5, 1.0])),
        "repetition_penalty": float(rng.choice([0.8, 1.3])),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "logit_bias": tuple((token, float(rng.normal(0, 3))) for token in random_ids(rng, 3)),
        "allowed_token_ids": random_ids(rng, 30),
        "stop_token_ids": random_ids(rng, 8),
        "min_tokens": int(rng.integers(1, chosen["max_tokens"] + 1)),
        "stop": tuple(PIECES[token] for token in random_ids(rng, 3)),
        "include_stop": True,
        "ignore_eos": True,
        "top_logprobs": int(rng.integers(1, 5)),
        "prompt_logprobs": True,
    }
    density = rng.choice([0.1, 0.3, 0.6])
    chosen |= {name: value for name, value in fields.items() if rng.random() < density}
    return SamplingParams(**chosen)


def random_request(rng: np.random.Generator, number: int, stems: Any) -> Request:
    ids = rng.integers(1, POISON, rng.integers(1, CAP - 12))
    shared = int(rng.integers(0, len(ids) + 1)) if rng.random() < 0.7 else 0
    stem = stems[rng.integers(0, len(stems))]
    ids[:shared] = stem[:shared]
    if rng.random() < 0.12:
        ids[rng.integers(0, len(ids))] = POISON
    return Request(
        id=number if rng.random() < 0.5 else f"r{number}",
        prompt_token_ids=tuple(ids.tolist()),
        params=random_params(rng),
        cache_salt="salt" if rng.random() < 0.1 else None,
    )


@dataclass(kw_only=True)
class Fuzz:
    """One engine under random events, and what came out of it."""

    engine: Engine
    rng: np.random.Generator
    requests: list[Request]
    found: dict[Key, Completion] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    frozen: bool = False

    def run(self) -> None:
        """Submit all requests at random moments, disturb them, and finish them all."""
        coming = list(self.requests)
        paused = False
        while coming or self.engine.has_unfinished():
            for _ in range(int(self.rng.choice([0, 0, 1, 3]))):
                if coming:
                    self.engine.submit(coming.pop(0))
                    self.events["submitted while paused"] += paused
            paused = self._disturb(paused)
            self.engine.parts.scheduler.audit()
            before = self.engine.stats().steps
            for done in self.engine.step():
                assert (done.id, done.sample) not in self.found
                self.found[done.id, done.sample] = done
            assert not self.frozen or self.engine.stats().steps == before
            self.engine.parts.scheduler.audit()
        if paused:
            self.engine.resume()
        assert_all_free(self.engine)
        tokens = sum(len(done.token_ids) for done in self.found.values())
        assert self.engine.stats().output_tokens == tokens

    def _disturb(self, paused: bool) -> bool:
        """At most one event; whether the engine is paused afterwards."""
        draw = self.rng.random()
        if paused and draw < 0.4:
            self.engine.resume()
            self.frozen = False
            return False
        if draw < 0.06:
            target = self.requests[self.rng.integers(0, len(self.requests))].id
            self.events["cancelled"] += self.engine.cancel(target)
        elif draw < 0.065:
            self.events["cancelled all"] += self.engine.cancel()
        elif draw < 0.11:
            mode = MODES[self.rng.choice(3, p=[0.6, 0.35, 0.05])]
            self.engine.pause(mode)  # type: ignore[arg-type]
            self.events[f"paused, {mode}"] += 1
            self.frozen = mode != "wait"
            for sequence in self.engine.parts.scheduler.sequences():
                assert not self.frozen or sequence.num_in_flight == 0
            return True
        elif draw < 0.14:
            self.events["blocks dropped"] += self.engine.reset_prefix_cache()
        return paused


def check(fuzz: Fuzz, lone: Engine, share: float) -> None:
    """All keys are there once; *share* of the requests have the answers of a lone run."""
    assert set(fuzz.found) == {
        (one.id, sample) for one in fuzz.requests for sample in range(one.params.n)
    }
    for request in fuzz.requests:
        failed = any(key[0] == request.id and one.error for key, one in fuzz.found.items())
        if not failed and fuzz.rng.random() > share:
            continue
        for whole in lone.generate([request]):
            done = fuzz.found[whole.id, whole.sample]
            fuzz.events["compared"] += 1
            if done.finish_reason == "abort":
                assert_prefix_bits(done, whole)
                continue
            assert_same_bits(done, whole)
            assert (done.error is None) == (whole.error is None)
            if done.error is not None:
                assert done.error.kind == "non_finite"
                fuzz.events["failed"] += 1


def check_scores(fuzz: Fuzz) -> None:
    """The same engine, its cache as the run left it, scores what it generated."""
    done = [one for one in fuzz.found.values() if one.error is None and len(one.token_ids)]
    asked = [
        ScoreRequest(
            id=place,
            token_ids=(*one.prompt_token_ids.tolist(), *one.token_ids.tolist()),
            start=len(one.prompt_token_ids),
            temperature=one.temperature,
        )
        for place, one in enumerate(done)
    ]
    for scores in fuzz.engine.scores(asked):
        assert scores.error is None
        assert_same_floats(scores.logprobs, done[int(scores.id)].logprobs)
        fuzz.events["scored"] += 1
    assert_all_free(fuzz.engine)


def run_fuzz(folder: Path, seed: int, count: int, share: float) -> Counter[str]:
    rng = np.random.default_rng(seed)
    stems = rng.integers(1, POISON, (3, CAP))
    family = FAMILIES[seed % len(FAMILIES)]
    requests = [random_request(rng, number, stems) for number in range(count)]
    with build(folder / "fuzz", family, **random_options(rng)) as engine:
        fuzz = Fuzz(engine=engine, rng=rng, requests=requests)
        fuzz.run()
        check_scores(fuzz)
        stats = engine.stats()
    lone_options = {"prefix_cache": False, "max_num_seqs": 1, "block_size": 16}
    with build(folder / "lone", family, **lone_options) as lone:
        check(fuzz, lone, share)
        assert drain(lone) == {}
    fuzz.events["requests"] += count
    fuzz.events["preemptions"] += stats.preemptions
    fuzz.events["hit tokens"] += stats.prefix_hit_tokens
    return fuzz.events


EVENTS = (
    "submitted while paused",
    "cancelled",
    "paused, keep",
    "paused, wait",
    "blocks dropped",
    "failed",
    "scored",
    "preemptions",
    "hit tokens",
)


def test_nothing_that_happens_to_others_changes_an_answer(tmp_path: Path) -> None:
    """Eight engines; each kind of event happened."""
    seen: Counter[str] = Counter()
    for seed in range(8):
        seen += run_fuzz(tmp_path / str(seed), seed, count=16, share=0.35)
    assert seen["requests"] > 100
    assert seen["compared"] > 40
    for event in EVENTS:
        assert seen[event] > 0, event


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_nothing_changes_an_answer_in_long_runs(tmp_path: Path, seed: int) -> None:
    seen = run_fuzz(tmp_path, seed, count=60, share=0.5)
    assert seen["compared"] > 20
