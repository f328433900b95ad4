"""The engine's oracles have power: each mutant is caught, beside a control that passes.

Every mutant counts how often its site was reached; a mutant that never ran proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl.engine import build, completions, engine
from pagedctl.engine.batch_rows import BatchRows, StepBatch
from pagedctl.engine.block_pool import BlockPool
from pagedctl.engine.prefix_index import PrefixIndex
from pagedctl.engine.prefix_sharing import PrefixSharing
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.runner import LaunchedStep
from pagedctl.engine.sampler import Sampler
from pagedctl.engine.sequence import Sequence
from pagedctl_kernels.ops.attention import masks, units
from pagedctl_kernels.ops.qk_norm_rope_write import torch_reference as rope
from pagedctl_kernels.ops.sample import truncation
from tests.engine import oracles
from tests.engine.oracles import Oracle
from tests.kernels.test_mutants import (
    drop_last_key,
    flip_kv_head,
    ignore_offset,
    keep_one_extra,
    mask_off_by_one,
    top_k_plus_one,
)


@dataclass(frozen=True)
class Mutant:
    """``replace(original)`` returns what stands in place of ``where.name``."""

    where: Any
    name: str
    replace: Callable[[Any], Any]
    oracle: Oracle


def on_batch(change: Callable[[StepBatch, Any], StepBatch]) -> Callable[[Any], Any]:
    """Change every step's batch on its way to the model."""

    def mutated(original: Any) -> Any:
        def step_batch(self: BatchRows, plan: Any, sequences: Any) -> StepBatch:
            return change(original(self, plan, sequences), plan)

        return step_batch

    return mutated


def positions_restart(batch: StepBatch, plan: Any) -> StepBatch:
    starts = torch.tensor([row.start for row in plan.rows for _ in range(row.num_tokens)])
    decoder = replace(batch.decoder, positions=batch.decoder.positions - starts)
    return replace(batch, decoder=decoder)


def slot_offset_ignored(batch: StepBatch, plan: Any) -> StepBatch:
    slots = batch.decoder.slot_mapping
    return replace(batch, decoder=replace(batch.decoder, slot_mapping=slots // 4 * 4))


def last_key_not_written(batch: StepBatch, plan: Any) -> StepBatch:
    slots = batch.decoder.slot_mapping.clone()
    slots[-1] = -1
    return replace(batch, decoder=replace(batch.decoder, slot_mapping=slots))


def keyed_by_step(batch: StepBatch, plan: Any) -> StepBatch:
    position = torch.full_like(batch.sampling.position, plan.step)
    return replace(batch, sampling=replace(batch.sampling, position=position))


def keyed_by_row(batch: StepBatch, plan: Any) -> StepBatch:
    return replace(batch, sampling=replace(batch.sampling, seed=batch.sample_rows.clone()))


def nothing(original: Any) -> Any:
    return lambda *arguments, **named: None


def tokens_forgotten(original: Any) -> Any:
    def rewind(self: Sequence) -> None:
        original(self)
        del self.tokens[self.num_prompt_tokens :]

    return rewind


def blocks_kept(original: Any) -> Any:
    return lambda self, blocks: None


def one_seed(original: Any) -> Any:
    return lambda seed, sample: seed


def without_stop_tokens(original: Any) -> Any:
    def sequences_of(*arguments: Any, **named: Any) -> list[Sequence]:
        made: list[Sequence] = original(*arguments, **named)
        for sequence in made:
            sequence.stop_token_ids = frozenset()
        return made

    return sequences_of


def faults_unseen(original: Any) -> Any:
    def wait(self: LaunchedStep) -> Any:
        found = original(self)
        return replace(
            found,
            faulty=[False] * len(found.faulty),
            row_faulty=[False] * len(found.row_faulty),
        )

    return wait


def logprob_of_truncated(original: Any) -> Any:
    def reported(self: Sampler, logits: Any, edited: Any, rows: Any) -> Any:
        return self.plans.sample.run.truncated(edited, rows), rows.temperature

    return reported


def pool_counted_on_n(original: Any) -> Any:
    def with_pool(config: Any, spec: Any) -> Any:
        sized, num_blocks = original(config, spec)
        return replace(sized, max_model_len=sized.max_model_len - 1), num_blocks

    return with_pool


def found_by_its_own_tokens(original: Any) -> Any:
    """Whatever stands before them."""

    def find(self: PrefixIndex, key: bytes, tokens: Any, parent: Any) -> Any:
        blocks = self._by_block.values()
        return next((one for one in blocks if one.tokens == tuple(tokens)), None)

    return find


def unsalted(original: Any) -> Any:
    return lambda arithmetic_id, cache_salt: original(arithmetic_id, None)


def scores_skipped(original: Any) -> Any:
    return property(lambda self: len(self.tokens) - 1)


def scores_shifted(original: Any) -> Any:
    def offsets(self: PromptScores, start: int, count: int) -> tuple[int, int]:
        first, end = original(self, start, count)
        return (max(first - 1, 0), end - 1) if end > 1 else (first, end)

    return offsets


def scores_of_the_first_row(original: Any) -> Any:
    def score(self: Sampler, hidden: Any, temperature: Any, token_ids: Any) -> Any:
        return original(self, hidden[:1].expand_as(hidden), temperature, token_ids)

    return score


def scores_unscaled(original: Any) -> Any:
    def score(self: Sampler, hidden: Any, temperature: Any, token_ids: Any) -> Any:
        return original(self, hidden, torch.ones_like(temperature), token_ids)

    return score


def abort_forgets_the_last(original: Any) -> Any:
    def abort(self: Sequence) -> None:
        original(self)
        del self.logprobs[-1:]

    return abort


def late_results_committed(original: Any) -> Any:
    """What arrives for a sequence that was cancelled meanwhile is committed all the same."""

    def commit_step(launched: LaunchedStep, scheduler: Any) -> Any:
        for sequence in launched.sequences:
            if sequence.finish_reason == "abort" and sequence.num_in_flight:
                sequence.commit(1, -1.0)
        yield from original(launched, scheduler)

    return commit_step


GREEDY, STREAM = oracles.greedy, oracles.stream
MUTANTS = {
    "last key dropped": Mutant(masks, "visible_keys", drop_last_key, GREEDY),
    "causal mask off by one": Mutant(masks, "visible_keys", mask_off_by_one, GREEDY),
    "grouped heads flipped": Mutant(units, "build_units", flip_kv_head, GREEDY),
    "slot offset ignored by the kernel": Mutant(rope, "cache_address", ignore_offset, GREEDY),
    "slot offset ignored": Mutant(BatchRows, "step_batch", on_batch(slot_offset_ignored), GREEDY),
    "positions restart": Mutant(BatchRows, "step_batch", on_batch(positions_restart), GREEDY),
    "last key not written": Mutant(BatchRows, "step_batch", on_batch(last_key_not_written), GREEDY),
    "last token stale": Mutant(BatchRows, "store", nothing, oracles.greedy_at_lag_1),
    "noise keyed by step": Mutant(BatchRows, "step_batch", on_batch(keyed_by_step), STREAM),
    "noise keyed by row": Mutant(BatchRows, "step_batch", on_batch(keyed_by_row), STREAM),
    "one stream for all samples": Mutant(completions, "sample_seed", one_seed, oracles.samples),
    "preemption forgets tokens": Mutant(Sequence, "rewind", tokens_forgotten, oracles.preemption),
    "blocks never come back": Mutant(BlockPool, "release", blocks_kept, oracles.preemption),
    "top-p keeps one more": Mutant(truncation, "_first_of_order", keep_one_extra, oracles.top_p),
    "top-k keeps one more": Mutant(truncation, "_prefix_mask", top_k_plus_one, oracles.top_k),
    "logprob after truncation": Mutant(
        Sampler, "_reported", logprob_of_truncated, oracles.scaled_logprobs
    ),
    "stop tokens ignored": Mutant(engine, "sequences_of", without_stop_tokens, oracles.stops),
    "faults unseen": Mutant(LaunchedStep, "wait", faults_unseen, oracles.faults),
    "fault not marked in a prompt": Mutant(BatchRows, "mark_faulty", nothing, oracles.faults),
    "faulty blocks not tainted": Mutant(PrefixSharing, "taint", nothing, oracles.faults),
    "pool counted on N tokens": Mutant(build, "_with_pool", pool_counted_on_n, oracles.exact_pool),
    "found by its own tokens": Mutant(
        PrefixIndex, "find", found_by_its_own_tokens, oracles.prefixes
    ),
    "salt ignored": Mutant(completions, "root_key", unsalted, oracles.salts),
    "scored positions skipped": Mutant(Sequence, "num_skippable", scores_skipped, oracles.scores),
    "scores shifted": Mutant(PromptScores, "offsets", scores_shifted, oracles.scores),
    "scores of one position": Mutant(Sampler, "score", scores_of_the_first_row, oracles.scores),
    "scores without temperature": Mutant(Sampler, "score", scores_unscaled, oracles.scores),
    "cancel forgets a logprob": Mutant(Sequence, "abort", abort_forgets_the_last, oracles.cancels),
    "late results committed": Mutant(
        engine, "commit_step", late_results_committed, oracles.cancels
    ),
}


@pytest.mark.parametrize("oracle", oracles.ALL, ids=lambda one: one.__name__)
def test_the_controls_pass(tmp_path: Path, oracle: Oracle) -> None:
    oracle(tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_reached_and_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Mutant
) -> None:
    assert mutant.oracle in oracles.ALL
    reached = 0
    original = getattr(mutant.where, mutant.name)
    broken = mutant.replace(original)

    def spy(*arguments: Any, **named: Any) -> Any:
        nonlocal reached
        reached += 1
        return (broken.fget if isinstance(broken, property) else broken)(*arguments, **named)

    put = property(spy) if isinstance(broken, property) else spy
    monkeypatch.setattr(mutant.where, mutant.name, put)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        mutant.oracle(tmp_path)
    assert reached > 0
