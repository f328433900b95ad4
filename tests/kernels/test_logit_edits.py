"""Edits of logits: each by its definition, all of them in their order, a row by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.ops.interfaces import EditedRows
from pagedctl_kernels.ops.logit_edits import torch_reference
from pagedctl_kernels.sites import logit_edits_site
from tests.kernels.harness import assert_same_bits, bound, numbers

VOCAB = 203


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What one row asks for, as a request spells it, and the tokens it has."""

    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    barred: tuple[int, ...] = ()


STEPS = ("allowed", "bias", "repetition", "penalties", "barred")


def by_definition(
    row: Sequence[float], edit: Edit, number: Any = np.float64, steps: Sequence[str] = STEPS
) -> list[Any]:
    """The edited row, token by token in scalars of the type *number*, edits in the order given."""
    edited = []
    for token, logit in enumerate(row):
        value = number(logit)
        for step in steps:
            value = one_step(step, token, value, edit, number)
        edited.append(value)
    return edited


def one_step(step: str, token: int, value: Any, edit: Edit, number: Any) -> Any:
    count = edit.output.count(token)
    if step == "allowed" and edit.allowed and token not in edit.allowed:
        return value + number(-np.inf)
    if step == "bias" and token in dict(edit.bias):
        return value + number(dict(edit.bias)[token])
    if step == "repetition" and (token in edit.prompt or count):
        penalty = number(edit.repetition)
        return value / penalty if value > 0 else value * penalty
    if step == "penalties" and count:
        return value - number(count) * number(edit.frequency) - number(edit.presence)
    if step == "barred" and token in edit.barred:
        return value + number(-np.inf)
    return value


def edited_rows(edits: dict[int, Edit], vocab: int, dtype: torch.dtype) -> EditedRows:
    """Tables for the rows of *edits* (row of the logits -> edit), slots in another order.

    Slots that no row uses are poisoned.
    """
    slots = {row: 2 * (len(edits) - place) for place, row in enumerate(edits)}
    height = 2 * len(edits) + 1
    bias = torch.full((height, vocab), torch.nan, dtype=dtype)
    in_prompt = torch.ones(height, vocab, dtype=torch.bool)
    counts = torch.full((height, vocab), 10**6, dtype=torch.int32)
    for row, edit in edits.items():
        slot = slots[row]
        bias[slot] = -torch.inf if edit.allowed else -0.0
        bias[slot, list(edit.allowed)] = -0.0
        for token, value in edit.bias:
            bias[slot, token] += value
        in_prompt[slot] = False
        in_prompt[slot, list(edit.prompt)] = True
        counts[slot] = torch.from_numpy(np.bincount(edit.output, minlength=vocab))
    pairs = [(row, token) for row, edit in edits.items() for token in edit.barred]
    barred = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    chosen = list(edits.values())
    return EditedRows(
        row=torch.tensor(list(edits), dtype=torch.int64),
        slot=torch.tensor([slots[row] for row in edits], dtype=torch.int64),
        repetition=torch.tensor([one.repetition for one in chosen], dtype=dtype),
        presence=torch.tensor([one.presence for one in chosen], dtype=dtype),
        frequency=torch.tensor([one.frequency for one in chosen], dtype=dtype),
        bias=bias,
        in_prompt=in_prompt,
        counts=counts,
        barred_row=barred[:, 0].contiguous(),
        barred_token=barred[:, 1].contiguous(),
    )


def edited(logits: torch.Tensor, edits: dict[int, Edit]) -> torch.Tensor:
    """A copy of *logits* with the rows of *edits* edited by the bound leaf."""
    dtype = str(logits.dtype).removeprefix("torch.")
    out = logits.clone()
    bound(logit_edits_site("edits", dtype=dtype)).run(
        out, edited_rows(edits, logits.shape[1], logits.dtype)
    )
    return out


def one_row(logits: Sequence[float], edit: Edit) -> list[float]:
    row: list[float] = edited(torch.tensor([list(logits)]), {0: edit})[0].tolist()
    return row


def random_edit(seed: int, vocab: int = VOCAB) -> Edit:
    """Every edit at once, on tokens that several of them touch."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(vocab)[: vocab // 2].tolist()
    allowed = tuple(ids) if seed % 2 else ()
    return Edit(
        prompt=tuple(rng.choice(ids, 30).tolist()),
        output=tuple(rng.choice(ids[:25], 60).tolist()),
        allowed=allowed,
        bias=tuple((token, float(rng.normal(0, 3))) for token in ids[5:60]),
        repetition=float(rng.choice([0.7, 1.1, 1.3, 2.0])),
        presence=float(rng.uniform(-2, 2)),
        frequency=float(rng.uniform(-2, 2)),
        barred=tuple(ids[:3]),
    )


def test_a_repetition_penalty_multiplies_negative_logits_and_counts_the_prompt() -> None:
    """vllm-project/vllm#1577: 2.0 and -2.0 at 1.3 become 1.53846 and -2.6."""
    row = one_row([2.0, -2.0, 2.0, 0.0], Edit(prompt=(0, 1, 3), repetition=1.3))
    assert row == pytest.approx([1.53846, -2.6, 2.0, 0.0], abs=1e-5)
    row = one_row([2.0, -2.0, 2.0], Edit(output=(1, 1, 0), repetition=1.3))
    assert row == pytest.approx([1.53846, -2.6, 2.0], abs=1e-5)


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    edit = Edit(prompt=(0, 0), output=(1, 2, 2, 2), presence=0.5, frequency=0.25)
    assert one_row([1.0, 1.0, 1.0, 1.0], edit) == [1.0, 0.25, -0.25, 1.0]


def test_a_bias_is_added_and_other_tokens_are_removed_if_some_are_allowed() -> None:
    edit = Edit(allowed=(1, 3), bias=((3, -1.5), (0, 100.0)))
    assert one_row([4.0, 3.0, 2.0, 1.0], edit) == [-np.inf, 3.0, -np.inf, -0.5]


def test_barred_tokens_are_removed_in_rows_without_other_edits_too() -> None:
    logits = numbers(1, 3, 9)
    edits = edited_rows({1: Edit(barred=(0, 8))}, 9, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    alone = replace(
        edits,
        row=none,
        slot=none,
        repetition=torch.empty(0),
        presence=torch.empty(0),
        frequency=torch.empty(0),
        bias=torch.empty(0, 9),
        in_prompt=torch.empty(0, 9, dtype=torch.bool),
        counts=torch.empty(0, 9, dtype=torch.int32),
    )
    got, want = logits.clone(), logits.clone()
    bound(logit_edits_site("edits", dtype="float32")).run(got, alone)
    want[1, [0, 8]] = -torch.inf
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(12))
def test_all_edits_together_follow_the_definition_bit_for_bit(seed: int, dtype: str) -> None:
    edit, logits = random_edit(seed), numbers(seed, 1, VOCAB, dtype=dtype) * 4
    got = edited(logits, {0: edit})[0]
    narrow = by_definition(logits[0].tolist(), edit, getattr(np, dtype))
    assert_same_bits(got, torch.from_numpy(np.array(narrow)))
    exact = np.array(by_definition(logits[0].tolist(), edit))
    finite = np.isfinite(exact)
    assert (np.isfinite(got.numpy()) == finite).all()
    assert np.abs(got.double().numpy()[finite] - exact[finite]).max() < 1e-4


@pytest.mark.parametrize(
    "steps",
    [
        ("allowed", "repetition", "bias", "penalties", "barred"),
        ("allowed", "bias", "penalties", "repetition", "barred"),
        ("allowed", "penalties", "repetition", "bias", "barred"),
    ],
)
def test_the_random_edits_tell_every_other_order(steps: Sequence[str]) -> None:
    """The control of the test above: its inputs do not fit another order."""
    for seed in range(12):
        edit, logits = random_edit(seed), numbers(seed, 1, VOCAB) * 4
        got = edited(logits, {0: edit})[0].double().numpy()
        other = np.array(by_definition(logits[0].tolist(), edit, steps=steps))
        finite = np.isfinite(other)
        assert np.abs(got[finite] - other[finite]).max() > 1e-2


def test_a_row_s_edits_are_its_own() -> None:
    """Alone, among other rows and in another order: the same bits, in any slots."""
    logits = numbers(3, 17, VOCAB) * 4
    edits = {row: random_edit(row) for row in range(1, 17, 2)}
    packed = edited(logits, edits)
    for row, edit in edits.items():
        assert_same_bits(edited(logits[row : row + 1], {0: edit}), packed[row : row + 1])
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    moved = {int((order == row).nonzero()): edit for row, edit in edits.items()}
    assert_same_bits(edited(logits[order], moved), packed[order])


def test_rows_without_edits_keep_their_bits() -> None:
    logits = numbers(4, 6, VOCAB)
    logits[0, 3], logits[2, 0], logits[4, :7] = torch.nan, torch.inf, -0.0
    got = edited(logits, {1: random_edit(1), 3: random_edit(2)})
    for row in (0, 2, 4, 5):
        assert_same_bits(got[row], logits[row])


def test_edits_that_are_off_change_no_bit() -> None:
    logits = numbers(5, 1, VOCAB)
    logits[0, ::7] = -0.0
    edit = Edit(prompt=tuple(range(50)), output=tuple(range(20, 90)))
    assert_same_bits(edited(logits, {0: edit}), logits)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("edit", [Edit(allowed=(1, 2)), Edit(barred=(0,))])
def test_a_removed_token_that_is_not_finite_stays_a_fault(value: float, edit: Edit) -> None:
    """huggingface/trl#6166: what the forward pass broke is not edited away."""
    row = torch.tensor(one_row([value, 1.0, 2.0], edit))
    assert not torch.isfinite(row.amax())


def test_operands_of_another_shape_or_dtype_are_refused_by_name() -> None:
    run = bound(logit_edits_site("edits", dtype="float32")).run
    edits = edited_rows({0: random_edit(1)}, VOCAB, torch.float32)
    with pytest.raises(
        ValueError, match=r"bias must be float32 \[3, 202\], got float32 \[3, 203\]"
    ):
        run(torch.zeros(1, VOCAB - 1), edits)
    with pytest.raises(ValueError, match="logits must be float32"):
        run(torch.zeros(1, VOCAB, dtype=torch.float64), edits)
    with pytest.raises(ValueError, match="counts must be int32"):
        run(torch.zeros(1, VOCAB), replace(edits, counts=edits.counts.long()))


# -- mutants ---------------------------------------------------------------------------------


def divide_negative_logits_too(original: Any) -> Any:
    return lambda z, penalty: z / penalty


def swap_the_penalties(original: Any) -> Any:
    return lambda z, counts, frequency, presence: original(z, counts, presence, frequency)


def penalise_by_presence_alone(original: Any) -> Any:
    return lambda z, counts, frequency, presence: original(
        z, (counts > 0).int(), frequency, presence
    )


def one_rounding_less(original: Any) -> Any:
    return lambda z, counts, frequency, presence: z - (counts.to(z.dtype) * frequency + presence)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("repeated", divide_negative_logits_too),
        ("penalise", swap_the_penalties),
        ("penalise", penalise_by_presence_alone),
        ("penalise", one_rounding_less),
    ],
)
def test_a_wrong_edit_is_reached_and_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[[Any], Any]
) -> None:
    def check() -> None:
        for seed in range(4):
            test_all_edits_together_follow_the_definition_bit_for_bit(seed, "float32")

    check()
    reached: list[bool] = []
    broken = mutant(getattr(torch_reference, name))

    def spy(*operands: Any) -> Any:
        reached.append(True)
        return broken(*operands)

    monkeypatch.setattr(torch_reference, name, spy)
    with pytest.raises(AssertionError):
        check()
    assert reached
