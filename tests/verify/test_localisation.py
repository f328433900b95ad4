"""A difference between two runs is traced to the op that made it, and to its layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.engine.engine import Engine
from pagedctl.engine.request import Request
from pagedctl.verify.localisation import Suspect, first_difference, suspect_of
from pagedctl.verify.recorder import Recorder
from pagedctl.verify.trace import Trace
from tests.engine.harness import assert_same_bits
from tests.reference.tiny_models import FAMILIES, VOCAB, TinyModel, tiny_model
from tests.verify.op_mutants import (
    Mutated,
    Reached,
    batch_mutated,
    method_mutated,
    next_token,
    nudged,
    other_first_block,
    plan_mutated,
    with_decoder,
    with_sampling,
)
from tests.verify.power_harness import engine_over, requests

PROBE = 3
LAYERS = 2
BLOCK = 4
EDITS: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "top_logprobs": 3,
    "prompt_logprobs": True,
    "top_k": 40,
}


@contextmanager
def built(folder: Path, model: TinyModel | None = None, **options: Any) -> Iterator[Engine]:
    chosen = {"prefix_cache": False, "block_size": BLOCK, **options}
    with engine_over(model or tiny_model("qwen3"), folder, **chosen) as engine:
        yield engine


def asked(count: int = 6, **sampling: Any) -> list[Request]:
    return requests(count, VOCAB, tokens=6, shortest=7, **{**EDITS, **sampling})


def recorded(engine: Engine, batch: list[Request]) -> Trace:
    """What request PROBE met while *batch* was computed."""
    with Recorder(engine, PROBE) as trace:
        engine.generate(batch)
    return trace


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """``put`` breaks an engine for a while; the suspect must be ``op`` at ``site``, ``layer``."""

    put: Callable[[Engine], AbstractContextManager[Reached]]
    op: str
    site: str
    switch: str = "batch_invariant"
    layer: int | None = None
    options: dict[str, Any]


def at(name: str, *, op: str, layer: int = 1, site: str | None = None) -> Mutant:
    """One layer's call of the plan *name*."""
    return Mutant(
        put=lambda engine: plan_mutated(engine, name, turn=layer, turns=LAYERS),
        op=op,
        site=site or name,
        layer=layer,
        options={},
    )


def norm(turn: int, site: str, layer: int | None) -> Mutant:
    return Mutant(
        put=lambda engine: plan_mutated(engine, "norm", turn=turn, turns=2 * LAYERS + 1),
        op="rms_norm",
        site=site,
        layer=layer,
        options={},
    )


def output(
    name: str, switch: str, change: Any = nudged, op: str | None = None, **options: Any
) -> Mutant:
    """Every call of a plan behind the layers."""
    return Mutant(
        put=lambda engine: plan_mutated(engine, name, change=change),
        op=op or name,
        site=name,
        switch=switch,
        options=options,
    )


def fed(site: str, switch: str, op: str, change: Any, layer: int | None = None) -> Mutant:
    """What the engine gives to an op is wrong."""
    return Mutant(
        put=lambda engine: batch_mutated(change),
        op=op,
        site=site,
        switch=switch,
        layer=layer,
        options={},
    )


def edits_mutated(engine: Engine) -> AbstractContextManager[Reached]:
    def changed(original: Any, reached: Reached) -> Any:
        def edited(logits: Any, edits: Any) -> Any:
            reached.count += edits is not None
            return nudged(original(logits, edits))

        return edited

    return method_mutated(engine.parts.runner.sampler, "_edited", changed)


def method_of_leaf(plan: str, name: str, change: Any) -> Any:
    """A method beside the call of a leaf."""

    def put(engine: Engine) -> AbstractContextManager[Reached]:
        def changed(original: Any, reached: Reached) -> Any:
            return Mutated(original, change, 0, 1, reached)

        return method_mutated(getattr(engine.parts.plans, plan).run, name, changed)

    return put


def written_keys_mutated(engine: Engine) -> AbstractContextManager[Reached]:
    """Layer 1 writes other keys; the queries are sound."""
    reached = Reached()

    def write(q: torch.Tensor) -> torch.Tensor:
        k_cache, _ = engine.parts.runner.caches[1]
        k_cache.copy_(nudged(k_cache))
        return q

    @contextmanager
    def put() -> Iterator[Reached]:
        with plan_mutated(
            engine, "qk_norm_rope_write", turn=1, turns=LAYERS, change=write
        ) as counted:
            yield counted
        reached.count += counted.count

    return put()


MUTANTS = {
    "embedding": output("embedding", "batch_invariant"),
    "norm before attention": norm(2, "input_norm", 1),
    "norm before the MLP": norm(1, "post_attention_norm", 0),
    "last norm": norm(4, "final_norm", None),
    "qkv": at("qkv_proj", op="gemm"),
    "o": at("o_proj", op="gemm"),
    "gate_up": at("gate_up_proj", op="gemm"),
    "down": at("down_proj", op="gemm", layer=0),
    "silu_mul": at("silu_mul", op="silu_mul"),
    "attention without a window": at("attention", op="attention", layer=0),
    "q after rope": at("qk_norm_rope_write", op="qk_norm_rope_write"),
    "keys after rope": Mutant(
        put=written_keys_mutated,
        op="qk_norm_rope_write",
        site="qk_norm_rope_write",
        layer=1,
        options={},
    ),
    "head": output("head", "batch_invariant"),
    "logit_edits": Mutant(put=edits_mutated, op="logit_edits", site="logit_edits", options={}),
    "sample": output("sample", "sampling_stream", next_token),
    "truncation": Mutant(
        put=method_of_leaf("sample", "truncated", nudged),
        op="sample",
        site="reported",
        switch="sampling_stream",
        options={"logprob_basis": "processed"},
    ),
    "likeliest": Mutant(
        put=method_of_leaf("logprob", "likeliest", lambda ids: (ids + 1) % VOCAB),
        op="logprob",
        site="likeliest",
        switch="logprob_order",
        options={},
    ),
    "block_sumexp": output("block_sumexp", "logprob_order"),
    "logprob": output("logprob", "logprob_order"),
    "seed of the row": fed(
        "stream",
        "sampling_stream",
        "engine",
        lambda batch: with_sampling(batch, seed=batch.sample_rows.clone()),
    ),
    "position of the draw": fed(
        "stream",
        "sampling_stream",
        "engine",
        lambda batch: with_sampling(batch, position=batch.sampling.position + 1),
    ),
    "temperature": fed(
        "sampling",
        "engine",
        "engine",
        lambda batch: with_sampling(batch, temperature=batch.sampling.temperature * 2 + 1),
    ),
    "tokens": fed(
        "token",
        "engine",
        "engine",
        lambda batch: with_decoder(batch, token_ids=(batch.decoder.token_ids + 1) % VOCAB),
    ),
    "positions": fed(
        "position",
        "engine",
        "engine",
        lambda batch: with_decoder(batch, positions=batch.decoder.positions + 1),
        layer=0,
    ),
    "blocks": fed("blocks", "engine", "attention", other_first_block, layer=0),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_suspect_is_the_op_that_was_broken(tmp_path: Path, name: str) -> None:
    mutant = MUTANTS[name]
    batch = asked(prompt_logprobs=False) if mutant.options else asked()
    with built(tmp_path, **mutant.options) as engine:
        alone = recorded(engine, batch[PROBE : PROBE + 1])
        assert first_difference(alone, recorded(engine, batch)) is None
        with mutant.put(engine) as reached:
            packed = recorded(engine, batch)
        found = first_difference(alone, packed)
    assert reached.count > 0
    assert found is not None
    assert (found.op, found.site, found.layer) == (mutant.op, mutant.site, mutant.layer)
    assert found.switch == mutant.switch
    assert found.position is not None
    assert (found.leaf is None) == (found.op == "engine")
    if found.leaf is not None:
        assert found.leaf == f"torch.{mutant.op}" or mutant.op in ("gemm", "head")
        assert found.leaf in found.text or found.site == "blocks"


LEGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "chunks": {"chunk_size": 3, "max_num_batched_tokens": 11},
    "preemption": {"debug_force_preemption_interval": 1},
    "lag": {"lag": 1},
    "prefixes": {"prefix_cache": True},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("leg", LEGS)
def test_a_sound_engine_has_no_suspect(tmp_path: Path, leg: str, family: str) -> None:
    batch, model = asked(prompt_logprobs=leg != "prefixes"), tiny_model(family)
    with built(tmp_path / "alone", model) as engine:
        alone = recorded(engine, batch[PROBE : PROBE + 1])
    with built(tmp_path / "packed", model, **LEGS[leg]) as engine:
        engine.parts.runner.decoder.mlp_rows = 5
        first = recorded(engine, batch)
        steps = engine.stats().steps
        again = recorded(engine, batch)
    assert first_difference(alone, first) is None
    assert first_difference(alone, again) is None
    assert (steps > 12) == (leg in ("chunks", "preemption"))
    assert bool(first.again) == (leg == "preemption")
    assert set(first.digests) == set(alone.digests)
    skipped = set(alone.digests) - set(again.digests)
    assert bool(skipped) == (leg == "prefixes")


def test_every_stage_of_every_position_is_recorded(tmp_path: Path) -> None:
    (request,) = asked()[PROBE : PROBE + 1]
    with built(tmp_path) as engine:
        trace = recorded(engine, [request])
    prompt, tokens = len(request.prompt_token_ids), 6
    assert {point.position for point in trace.digests} == set(range(prompt + tokens - 1))
    in_layers = (prompt + tokens - 1) * (2 + 11 * LAYERS + 1)
    scored, sampled = (prompt - 1) * 5, tokens * 9
    assert len(trace.digests) == in_layers + scored + sampled


def test_recording_changes_no_bit_and_leaves_nothing_behind(tmp_path: Path) -> None:
    batch = asked()
    with built(tmp_path) as engine:
        plain = engine.generate(batch)
        runner = engine.parts.runner
        with Recorder(engine, PROBE), Recorder(engine, 0):
            watched = engine.generate(batch)
        with pytest.raises(ZeroDivisionError), Recorder(engine, PROBE):
            raise ZeroDivisionError
        assert runner.decoder.plans is runner.sampler.plans is engine.parts.plans
        assert runner.launch.__func__ is type(runner).launch
    for one, other in zip(plain, watched, strict=True):
        assert_same_bits(one, other)


def test_only_the_engine_that_is_watched_is_recorded(tmp_path: Path) -> None:
    batch = asked()
    with built(tmp_path) as first:
        config = first.config.with_options(max_num_seqs=2)
        with Engine(config, sharing=first, needs_record=False) as second:
            with Recorder(first, PROBE) as trace:
                second.generate(batch)
            assert trace.digests == {}
            with Recorder(second, PROBE) as trace:
                first.generate(batch)
            assert trace.digests == {}


def test_a_position_that_is_computed_again_with_other_bits_is_a_difference(tmp_path: Path) -> None:
    """The first half of the run is sound: the run differs from itself."""
    batch = asked()
    with built(tmp_path, debug_force_preemption_interval=1) as engine:
        calls = Reached()

        def later(result: Any) -> Any:
            calls.count += 1
            return nudged(result) if calls.count > 3 else result

        with plan_mutated(engine, "o_proj", turn=1, turns=LAYERS, change=later):
            trace = recorded(engine, batch)
    found = first_difference(trace, trace)
    assert calls.count > 3
    assert found is not None
    assert (found.op, found.site, found.layer) == ("gemm", "o_proj", 1)
    assert "computed again" in found.text


def test_scores_are_traced_against_generation(tmp_path: Path) -> None:
    (request,) = requests(1, VOCAB, tokens=6, temperature=1.0)
    with built(tmp_path) as engine:
        with Recorder(engine, 0) as generated:
            (done,) = engine.generate([request])
        sequence = [*request.prompt_token_ids, *done.token_ids.tolist()]
        with Recorder(engine, 0) as scored:
            engine.score([sequence])
        sound = first_difference(generated, scored)
        with plan_mutated(engine, "logprob") as reached, Recorder(engine, 0) as broken:
            engine.score([sequence])
        found = first_difference(generated, broken)
    assert sound is None
    common = [point for point in generated.digests if point in scored.digests]
    assert sum(point.stage == "logprob" for point in common) == len(done.token_ids)
    assert reached.count > 0
    assert found is not None
    assert (found.op, found.site) == ("logprob", "logprob")


def test_what_comes_behind_the_first_divergent_token_is_not_looked_at(tmp_path: Path) -> None:
    batch = asked()
    with built(tmp_path) as engine:
        alone = recorded(engine, batch[PROBE : PROBE + 1])
        with plan_mutated(engine, "down_proj") as reached:
            packed = recorded(engine, batch)
    assert reached.count > 0
    first = first_difference(alone, packed)
    assert first is not None
    assert first.position == 0
    assert first_difference(alone, packed, until_position=1) == first
    assert first_difference(alone, packed, until_position=0) is None


def test_equal_ops_leave_the_engine_itself(tmp_path: Path) -> None:
    batch = asked()
    with built(tmp_path) as engine:
        alone, packed = recorded(engine, batch[PROBE : PROBE + 1]), recorded(engine, batch)
    found = suspect_of(alone, packed, position=9)
    assert isinstance(found, Suspect)
    assert (found.op, found.switch, found.leaf) == ("engine", "engine", None)
    assert "before position 9" in found.text
    broken = replace(
        packed, digests={point: digest + 1 for point, digest in packed.digests.items()}
    )
    assert suspect_of(alone, broken, position=9).site == "token"
