"""Edits of logits on the GPU: the CPU leaf's bits, in place, row by row."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from pagedctl_kernels.ops.interfaces import EditedRows
from pagedctl_kernels.ops.logit_edits import triton_kernel, triton_leaf
from pagedctl_kernels.sites import logit_edits_site
from tests.kernels.harness import bound
from tests.kernels.test_logit_edits import VOCAB, Edit, edited_rows, random_edit
from tests.kernels.triton.harness import DEVICE, assert_same_bits, bind_leaf, bits, numbers
from tests.kernels.triton.mutants import mutated

SITE = logit_edits_site("edits", dtype="float32")
NARROW = 2 * VOCAB


def on_device(edits: EditedRows) -> EditedRows:
    return EditedRows(**{one.name: getattr(edits, one.name).to(DEVICE) for one in fields(edits)})


def edited(logits: torch.Tensor, edits: dict[int, Edit]) -> torch.Tensor:
    """A copy of *logits* with the rows of *edits* edited on the device."""
    out = logits.clone()
    bind_leaf(SITE, "triton.logit_edits")(
        out, on_device(edited_rows(edits, logits.shape[1], logits.dtype))
    )
    return out


def by_the_cpu_leaf(logits: torch.Tensor, edits: dict[int, Edit]) -> torch.Tensor:
    out = logits.cpu().clone()
    bound(SITE, "torch.logit_edits").run(out, edited_rows(edits, out.shape[1], out.dtype))
    return out


def assert_edits_have_the_cpu_leaf_s_bits() -> None:
    logits = numbers(1, 16, NARROW) * 4
    logits[:, ::5] = -0.0
    logits[:, 1::31] = 1e-41
    edits = {row: random_edit(row, NARROW) for row in range(1, 15)}
    edits[2] = replace(edits[2], repetition=1.0)
    edits[3] = replace(edits[3], presence=0.0, frequency=0.0)
    edits[4] = Edit(allowed=(1, 3), bias=((3, -1.5), (0, 100.0)))
    edits[5] = Edit(output=(1, 1, 7), presence=0.5)
    edits[6] = Edit(output=(1, 1, 7), frequency=0.1)
    assert_same_bits(edited(logits, edits).cpu(), by_the_cpu_leaf(logits, edits))


def test_edits_have_the_cpu_leaf_s_bits() -> None:
    assert_edits_have_the_cpu_leaf_s_bits()


def test_a_row_s_edits_are_its_own() -> None:
    logits = numbers(3, 9, VOCAB) * 4
    edits = {row: random_edit(row) for row in range(1, 9, 2)}
    packed = edited(logits, edits)
    for row, edit in edits.items():
        assert_same_bits(edited(logits[row : row + 1], {0: edit}), packed[row : row + 1])
    for row in range(0, 9, 2):
        assert_same_bits(packed[row], logits[row])


def test_rows_of_a_wider_buffer_are_edited_and_nothing_beside_them() -> None:
    buffer = torch.full((5, NARROW + 7), torch.nan, device=DEVICE)
    logits = numbers(4, 5, NARROW) * 4
    buffer[:, :NARROW] = logits
    edits = {0: random_edit(1, NARROW), 4: random_edit(2, NARROW)}
    bind_leaf(SITE, "triton.logit_edits")(
        buffer[:, :NARROW], on_device(edited_rows(edits, NARROW, torch.float32))
    )
    assert_same_bits(buffer[:, :NARROW].contiguous().cpu(), by_the_cpu_leaf(logits, edits))
    assert buffer[:, NARROW:].isnan().all()


def test_barred_tokens_are_removed_in_rows_without_other_edits_too() -> None:
    logits = numbers(5, 3, VOCAB)
    none = on_device(edited_rows({}, VOCAB, torch.float32))
    pairs = {
        "barred_row": torch.tensor([1, 1, 2], device=DEVICE),
        "barred_token": torch.tensor([0, VOCAB - 1, 8], device=DEVICE),
    }
    got, want = logits.clone(), logits.clone()
    bind_leaf(SITE, "triton.logit_edits")(got, replace(none, **pairs))
    want[1, [0, VOCAB - 1]] = -torch.inf
    want[2, 8] = -torch.inf
    assert_same_bits(got, want)


def test_a_barred_pair_outside_the_logits_touches_nothing() -> None:
    buffer = numbers(7, 3, NARROW)
    before = buffer.clone()
    none = on_device(edited_rows({}, VOCAB, torch.float32))
    pairs = {
        "barred_row": torch.tensor([0, 1, -1, 2], device=DEVICE),
        "barred_token": torch.tensor([VOCAB, -1, 3, 3], device=DEVICE),
    }
    bind_leaf(SITE, "triton.logit_edits")(buffer[:2, :VOCAB], replace(none, **pairs))
    assert_same_bits(buffer, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_removed_token_that_is_not_finite_stays_a_fault(value: float) -> None:
    logits = torch.tensor([[value, 1.0, 2.0]] * 2, device=DEVICE)
    got = edited(logits, {0: Edit(allowed=(1, 2)), 1: Edit(barred=(0,))})
    assert not torch.isfinite(got.amax(dim=-1)).any()


def test_operands_of_another_shape_or_layout_are_refused_by_name() -> None:
    run = bind_leaf(SITE, "triton.logit_edits")
    edits = on_device(edited_rows({0: random_edit(1)}, VOCAB, torch.float32))
    with pytest.raises(ValueError, match="logits must be float32"):
        run(torch.zeros(1, VOCAB, dtype=torch.float64, device=DEVICE), edits)
    with pytest.raises(ValueError, match="logits must have rows without gaps"):
        run(torch.zeros(1, VOCAB, 2, device=DEVICE)[..., 0], edits)
    with pytest.raises(ValueError, match="counts must be contiguous"):
        run(
            torch.zeros(1, VOCAB, device=DEVICE),
            replace(edits, counts=edits.counts.repeat_interleave(2, dim=1)[:, ::2]),
        )


MUTANTS = {
    "product with the reciprocal": ("tl.div_rn(z, penalty)", "z * tl.div_rn(1.0, penalty)"),
    "prompt tokens are not repeated": ("prompted | (count > 0)", "count > 0"),
    "one rounding less": (
        "(z - count.to(tl.float32) * each) - once",
        "z - (count.to(tl.float32) * each + once)",
    ),
    "each token counts once": ("count.to(tl.float32) * each", "each"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_edit_is_reached_and_caught(tmp_path: Path, name: str) -> None:
    with (
        mutated(tmp_path, triton_leaf, [triton_kernel], *MUTANTS[name]) as kernels,
        pytest.raises(AssertionError, match="differs first"),
    ):
        assert_edits_have_the_cpu_leaf_s_bits()
    assert any(kernel.launches for kernel in kernels)


@pytest.mark.gpu
def test_a_vocabulary_s_worth_of_rows_has_the_cpu_leaf_s_bits() -> None:
    vocab = 151_936
    logits = numbers(6, 24, vocab) * 4
    edits = {row: random_edit(row, vocab) for row in range(0, 24, 2)}
    got = edited(logits, edits)
    assert_same_bits(got.cpu(), by_the_cpu_leaf(logits, edits))
    assert (bits(got[1::2]) == bits(logits[1::2])).all()
