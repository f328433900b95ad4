"""Ways to break the engine at its selection points; each counts how often it changed something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl.engine.batch_rows import BatchRows, StepBatch
from pagedctl.engine.edit_rows import EditRows
from pagedctl.engine.prefix_sharing import PrefixSharing
from pagedctl.engine.sampler import Sampler
from pagedctl.models.decoder import Decoder
from pagedctl_kernels.ops.attention import units
from pagedctl_kernels.ops.attention.torch_reference import TorchAttention
from tests.verify.op_mutants import Reached, nudged, with_decoder, with_sampling

FEW_ROWS = 4
"""A call of more rows than this takes the other way, where the rows decide."""

CALLS_OF_A_TACTIC = 50

Replace = Callable[[Any, Reached], Any]
"""Makes, of a function and a counter, what stands in the function's place."""


def moved(result: torch.Tensor) -> torch.Tensor:
    """As far as another order of a long sum moves it: eight steps of float32."""
    return result * (1 + 2.0**-20)


def changed_if(wanted: Callable[..., bool], change: Callable[[Any], Any] = nudged) -> Replace:
    """The result changed wherever *wanted* says so of the arguments."""

    def replacement(original: Any, reached: Reached) -> Any:
        def changed(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            if not wanted(*arguments):
                return result
            reached.count += 1
            return change(result)

        return changed

    return replacement


def many_rows(self: Any, x: torch.Tensor, *rest: Any) -> bool:
    return len(x) > FEW_ROWS


def product_of(op: str, k: int, n: int) -> Callable[..., bool]:
    """Calls of one call site with many rows."""

    def wanted(self: Any, x: torch.Tensor, *rest: Any) -> bool:
        return (self.op, self.k, self.n) == (op, k, n) and many_rows(self, x)

    return wanted


def tuned(op: str, k: int, n: int) -> Replace:
    """One call site's tactic changes from time to time, as a tuner's choice does."""

    def replacement(original: Any, reached: Reached) -> Any:
        calls = Reached()

        def changed(self: Any, x: torch.Tensor, *rest: Any) -> Any:
            result = original(self, x, *rest)
            if (self.op, self.k, self.n) != (op, k, n):
                return result
            calls.count += 1
            if calls.count // CALLS_OF_A_TACTIC % 2 == 0:
                return result
            reached.count += 1
            return nudged(result)

        return changed

    return replacement


def splits_by_live_batch(original: Any, reached: Reached) -> Any:
    """Splits of 128 keys where many sequences are live."""

    def build_work(batch: Any, *rest: Any) -> Any:
        if len(batch.seq_lens) <= FEW_ROWS:
            return original(batch, *rest)
        reached.count += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(units, "TILES_PER_SPLIT", units.TILES_PER_SPLIT // 2)
            return original(batch, *rest)

    return build_work


def attention_changed(wanted: Callable[[TorchAttention, Any], bool]) -> Replace:
    """The row sums of some parts end in other bits."""

    def replacement(original: Any, reached: Reached) -> Any:
        def part_states(self: TorchAttention, part: Any, *rest: Any) -> Any:
            states = original(self, part, *rest)
            if not wanted(self, part):
                return states
            reached.count += 1
            return type(states)(states.maximum, nudged(states.total), states.accumulator)

        return part_states

    return replacement


def of_several_tokens(leaf: TorchAttention, part: Any) -> bool:
    return int((part.query_rows > 0).sum(dim=1).max()) > leaf.geometry.group


def of_many_units(leaf: TorchAttention, part: Any) -> bool:
    return len(part.items) > FEW_ROWS * leaf.geometry.kv_heads


def sum_of_the_library(original: Any, reached: Reached) -> Any:
    """The norm's mean in the library's own order where many rows are in the call."""

    def rms_normalise(rows: torch.Tensor, weight: torch.Tensor, *, eps: float, **rest: Any) -> Any:
        if len(rows) <= FEW_ROWS:
            return original(rows, weight, eps=eps, **rest)
        reached.count += 1
        wide = rows.float()
        mean = wide.pow(2).mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean + eps) * weight.float()).to(rows.dtype)

    return rms_normalise


def on_batch(change: Callable[[StepBatch, Any], StepBatch | None]) -> Replace:
    """Every step's tensors on their way to the model; None leaves them."""

    def replacement(original: Any, reached: Reached) -> Any:
        def step_batch(self: BatchRows, plan: Any, sequences: Any) -> StepBatch:
            batch: StepBatch = original(self, plan, sequences)
            changed = change(batch, plan)
            reached.count += changed is not None
            return changed or batch

        return step_batch

    return replacement


def positions_moved(batch: StepBatch, moved: list[int], by: list[int]) -> StepBatch | None:
    """Tokens of the plan's rows *moved*[i] times shifted by *by*[i]."""
    shift = torch.from_numpy(np.repeat(np.array(by), moved))
    if not shift.any():
        return None
    return with_decoder(batch, positions=batch.decoder.positions + shift)


def restart_at_a_chunk(batch: StepBatch, plan: Any) -> StepBatch | None:
    counts = [row.num_tokens for row in plan.rows]
    shifts = [-row.start if row.num_tokens > 1 else 0 for row in plan.rows]
    return positions_moved(batch, counts, shifts)


def one_behind_after_preemption(batch: StepBatch, plan: Any) -> StepBatch | None:
    counts = [row.num_tokens for row in plan.rows]
    shifts = [min(1, row.preemptions) for row in plan.rows]
    return positions_moved(batch, counts, shifts)


def keyed_by_step(batch: StepBatch, plan: Any) -> StepBatch | None:
    if not len(batch.sample_index):
        return None
    return with_sampling(batch, position=torch.full_like(batch.sampling.position, plan.step))


def keyed_by_row(batch: StepBatch, plan: Any) -> StepBatch | None:
    if not len(batch.sample_index):
        return None
    return with_sampling(batch, seed=batch.sample_rows.clone())


def block_of_another(batch: StepBatch, plan: Any) -> StepBatch | None:
    """With many rows, each but the first reads the first block of the one before it."""
    tables = batch.decoder.metadata.block_tables.copy()
    if len(tables) <= FEW_ROWS:
        return None
    tables[1:, 0] = tables[:-1, 0].copy()
    return with_decoder(batch, metadata=replace(batch.decoder.metadata, block_tables=tables))


def nothing_stored(original: Any, reached: Reached) -> Any:
    def store(self: BatchRows, batch: StepBatch, *rest: Any) -> None:
        reached.count += 1

    return store


def shifted_by_one(original: Any, reached: Reached) -> Any:
    """A prefix of several blocks is found in another order."""

    def look_up(self: PrefixSharing, sequence: Any) -> Any:
        prefix = original(self, sequence)
        if len(prefix.found) < 2:
            return prefix
        reached.count += 1
        return replace(prefix, found=(*prefix.found[1:], prefix.found[0]))

    return look_up


def rounded_as_a_decode(original: Any, reached: Reached) -> Any:
    """The key of a single token is narrowed before it is kept, that of a prompt is not."""

    def write_cache(k_cache: Any, v_cache: Any, k: torch.Tensor, *rest: Any) -> None:
        if len(k) == 1:
            reached.count += 1
            k = k.to(torch.bfloat16).to(k.dtype)
        original(k_cache, v_cache, k, *rest)

    return write_cache


def second_part_moved(original: Any, reached: Reached) -> Any:
    """Rows behind the first MLP_ROWS of a step end in other bits."""

    def mlp(self: Decoder, layer: Any, x: torch.Tensor, gated: Any) -> torch.Tensor:
        y: torch.Tensor = original(self, layer, x, gated)
        if len(x) <= self.mlp_rows:
            return y
        reached.count += 1
        return torch.cat([y[: self.mlp_rows], nudged(y[self.mlp_rows :])])

    return mlp


def one_kept(original: Any, reached: Reached) -> Any:
    """Of several truncated rows, each keeps its likeliest tokens alone."""

    def prefix_mask(scaled: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = original(scaled, *rest)
        if len(scaled) < 2:
            return kept
        reached.count += 1
        return kept & (scaled == scaled.amax(dim=-1, keepdim=True))

    return prefix_mask


def of_the_library(original: Any, reached: Reached) -> Any:
    """Given tokens are scored as z - logsumexp(z)."""

    def score(self: Sampler, hidden: Any, temperature: Any, token_ids: Any) -> torch.Tensor:
        reached.count += 1
        logits = (
            self.decoder.logits(hidden) / torch.where(temperature == 0, 1, temperature)[:, None]
        )
        return torch.log_softmax(logits, dim=-1).gather(-1, token_ids[:, None]).squeeze(1)

    return score


def seed_of_the_run(original: Any, reached: Reached) -> Any:
    """All that this process draws is of other seeds than another process draws."""

    def sample_seed(seed: int, sample: int) -> int:
        reached.count += 1
        return int(original(seed, sample)) ^ 1

    return sample_seed


def counted_seed(original: Any, reached: Reached) -> Any:
    """A request without a seed gets the next one of a counter."""

    def derive_seed(seed: int, key: int | str) -> int:
        reached.count += 1
        return int(original(seed, reached.count))

    return derive_seed


def harder_in_a_batch(original: Any, reached: Reached) -> Any:
    """The repetition penalty of several edited rows is four times as strong."""

    def step_edits(self: EditRows, plan: Any) -> Any:
        edits = original(self, plan)
        if edits is None or len(edits.row) < 2:
            return edits
        reached.count += 1
        return replace(edits, repetition=edits.repetition * 4)

    return step_edits
