"""The engine's oracles have power: each mutant is caught, beside a control that passes.

Every mutant counts how often its site was reached; a mutant that never ran proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.engine import batch_rows, completions
from pagedctl.engine.batch_rows import BatchRows, StepBatch
from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request, SamplingParams
from pagedctl.engine.sequence import Sequence
from tests.engine.harness import assert_same_bits, run, tiny_engine
from tests.reference.tiny_models import tiny_model

PROMPTS = (tuple(range(3, 20)), tuple(range(40, 49)), tuple(range(60, 85)))


class Site:
    """Counts how often a mutated site was reached."""

    def __init__(self) -> None:
        self.reached = 0


def greedy_oracle(folder: Path) -> None:
    """Greedy ids equal the float64 reference, packed, in chunks."""
    model = tiny_model("qwen3")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [
        Request(id=number, prompt_token_ids=prompt, params=params)
        for number, prompt in enumerate(PROMPTS)
    ]
    with tiny_engine(model, folder, chunk_size=5, block_size=4) as engine:
        trace = run(engine, asked)
    for number, prompt in enumerate(PROMPTS):
        ids, _ = model.reference().greedy(list(prompt), 8)
        assert trace.completions[number, 0].token_ids.tolist() == ids


def stream_oracle(folder: Path) -> None:
    """A seeded request draws the same tokens first and last in line, chunked and not."""
    params = SamplingParams(seed=7, max_tokens=10, ignore_eos=True)
    needle = Request(id="needle", prompt_token_ids=PROMPTS[0], params=params)
    others = [
        Request(id=number, prompt_token_ids=prompt, params=SamplingParams(max_tokens=10))
        for number, prompt in enumerate(PROMPTS)
    ]
    model = tiny_model("qwen3")
    with tiny_engine(model, folder / "alone", dtype=torch.float32) as engine:
        single = run(engine, [needle]).completions["needle", 0]
    for name, asked, chunk in (("last", [*others, needle], 64), ("chunks", [needle, *others], 4)):
        options: dict[str, Any] = {"dtype": torch.float32, "chunk_size": chunk}
        with tiny_engine(model, folder / name, **options) as engine:
            trace = run(engine, asked)
        assert trace.max_rows > 1
        assert_same_bits(trace.completions["needle", 0], single)


def preemption_oracle(folder: Path) -> None:
    """A small pool preempts, and every request still gets the tokens of an ample one."""
    model = tiny_model("qwen3")
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    asked = [
        Request(id=number, prompt_token_ids=prompt, params=params)
        for number, prompt in enumerate(PROMPTS)
    ]
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4
    results = {}
    for name, blocks in (("ample", 400), ("small", 15)):
        options: dict[str, Any] = {"dtype": torch.float32, "block_size": 4}
        options["kv_cache_memory_bytes"] = blocks * block_bytes
        with tiny_engine(model, folder / name, **options) as engine:
            results[name] = run(engine, asked)
    assert results["small"].preemptions > 0
    for key, done in results["small"].completions.items():
        assert len(done.token_ids) == 20
        assert_same_bits(done, results["ample"].completions[key])


def mutate_batch(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[StepBatch, Any], StepBatch]
) -> Site:
    """Change every step's batch on its way to the model."""
    site = Site()
    plain = BatchRows.step_batch

    def mutated(self: BatchRows, plan: Any, sequences: Any) -> StepBatch:
        site.reached += 1
        return change(plain(self, plan, sequences), plan)

    monkeypatch.setattr(BatchRows, "step_batch", mutated)
    return site


def positions_restart(batch: StepBatch, plan: Any) -> StepBatch:
    starts = torch.tensor([row.start for row in plan.rows for _ in range(row.num_tokens)])
    decoder = replace(batch.decoder, positions=batch.decoder.positions - starts)
    return replace(batch, decoder=decoder)


def slot_offset_ignored(batch: StepBatch, plan: Any) -> StepBatch:
    slots = batch.decoder.slot_mapping
    return replace(batch, decoder=replace(batch.decoder, slot_mapping=slots // 4 * 4))


def last_key_dropped(batch: StepBatch, plan: Any) -> StepBatch:
    slots = batch.decoder.slot_mapping.clone()
    slots[-1] = -1
    return replace(batch, decoder=replace(batch.decoder, slot_mapping=slots))


def keyed_by_step(batch: StepBatch, plan: Any) -> StepBatch:
    position = torch.full_like(batch.sampling.position, plan.step)
    return replace(batch, sampling=replace(batch.sampling, position=position))


def keyed_by_row(batch: StepBatch, plan: Any) -> StepBatch:
    return replace(batch, sampling=replace(batch.sampling, seed=batch.sample_rows.clone()))


@pytest.mark.parametrize("oracle", [greedy_oracle, stream_oracle, preemption_oracle])
def test_the_controls_pass(tmp_path: Path, oracle: Callable[[Path], None]) -> None:
    oracle(tmp_path)


@pytest.mark.parametrize(
    ("change", "oracle"),
    [
        (positions_restart, greedy_oracle),
        (slot_offset_ignored, greedy_oracle),
        (last_key_dropped, greedy_oracle),
        (keyed_by_step, stream_oracle),
        (keyed_by_row, stream_oracle),
    ],
    ids=lambda one: one.__name__,
)
def test_a_wrong_batch_is_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[StepBatch, Any], StepBatch],
    oracle: Callable[[Path], None],
) -> None:
    site = mutate_batch(monkeypatch, change)
    with pytest.raises(AssertionError):
        oracle(tmp_path)
    assert site.reached > 0


def test_a_preemption_that_forgets_tokens_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site()
    plain = Sequence.rewind

    def forgetful(self: Sequence) -> None:
        site.reached += 1
        plain(self)
        del self.tokens[self.num_prompt_tokens :]

    monkeypatch.setattr(Sequence, "rewind", forgetful)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        preemption_oracle(tmp_path)
    assert site.reached > 0


def test_a_stale_last_token_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At lag 1 the sampled token feeds the next step on the device."""

    def oracle(folder: Path) -> None:
        model = tiny_model("llama")
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        with tiny_engine(model, folder, lag=1) as engine:
            (done,) = engine.generate([Request(id=0, prompt_token_ids=PROMPTS[0], params=params)])
        assert done.token_ids.tolist() == model.reference().greedy(list(PROMPTS[0]), 8)[0]

    oracle(tmp_path / "control")
    site = Site()

    def stale(self: BatchRows, *arguments: Any) -> None:
        site.reached += 1

    monkeypatch.setattr(batch_rows.BatchRows, "store", stale)
    with pytest.raises(AssertionError):
        oracle(tmp_path / "mutant")
    assert site.reached > 0


def test_seeds_shared_by_all_samples_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def oracle(folder: Path) -> None:
        params = SamplingParams(n=4, seed=1, max_tokens=10)
        with tiny_engine(tiny_model("qwen3"), folder) as engine:
            done = engine.generate([Request(id=0, prompt_token_ids=PROMPTS[0], params=params)])
        assert len({tuple(one.token_ids.tolist()) for one in done}) == 4

    oracle(tmp_path / "control")
    site = Site()

    def shared(seed: int, sample: int) -> int:
        site.reached += 1
        return seed

    monkeypatch.setattr(completions, "sample_seed", shared)
    with pytest.raises(AssertionError):
        oracle(tmp_path / "mutant")
    assert site.reached == 4


def test_a_faulty_row_fails_by_id_and_its_mates_keep_their_bits(tmp_path: Path) -> None:
    """huggingface/trl#6166: a NaN is neither laundered into a logprob nor spread to others."""
    model = tiny_model("qwen3")
    poisoned = 77
    tensors = model.tensors(torch.float32)
    broken = dict(tensors)
    embedding = broken["model.embed_tokens.weight"].clone()
    embedding[poisoned] = float("nan")
    broken["model.embed_tokens.weight"] = embedding
    good = [
        Request(id=n, prompt_token_ids=prompt[:9], params=SamplingParams(seed=n, max_tokens=6))
        for n, prompt in enumerate(PROMPTS)
    ]
    bad = Request(id="bad", prompt_token_ids=(5, poisoned, 6), params=SamplingParams(max_tokens=6))
    for lag in (0, 1):
        seen = {}
        for name, weights, asked in (("clean", tensors, good), ("broken", broken, [bad, *good])):
            with tiny_engine(
                model, tmp_path / f"{name}{lag}", dtype=torch.float32, lag=lag
            ) as probe:
                config = probe.config
            with Engine(config, weights=weights) as engine:
                seen[name] = run(engine, asked)
        failed = seen["broken"].completions["bad", 0]
        assert failed.error is not None
        assert failed.error.kind == "non_finite"
        assert failed.finish_reason is None
        assert len(failed.token_ids) == len(failed.logprobs) == 0
        for n in range(len(good)):
            assert_same_bits(seen["broken"].completions[n, 0], seen["clean"].completions[n, 0])
