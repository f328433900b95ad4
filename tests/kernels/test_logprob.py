"""Block sums of exp and the one function that makes a logprob."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.sites import block_sumexp_site, logprob_site
from tests.kernels import reference
from tests.kernels.harness import assert_same_bits, bound, numbers, threads
from tests.kernels.reference import assert_close, to_numpy

FORMS = ("torch", "blockwise", "blockwise-direct")


def logprobs(
    logits: torch.Tensor,
    token_ids: list[int] | list[list[int]],
    temperature: Any = 1.0,
    *,
    form: str = "torch",
    block_size: int = 32768,
    temperature_form: str = "divide",
) -> torch.Tensor:
    """Logprobs A[R] of one token a row, or A[R, K] of a list a row."""
    dtype = str(logits.dtype).removeprefix("torch.")
    run = bound(
        logprob_site(
            "logprob",
            dtype=dtype,
            form=form,
            block_size=block_size,
            temperature_form=temperature_form,
        )
    ).run
    sums = bound(block_sumexp_site("sumexp", dtype=dtype, block_size=block_size)).run
    t = torch.as_tensor(temperature, dtype=logits.dtype).expand(len(logits)).contiguous()
    ids = torch.tensor(token_ids)
    out: torch.Tensor = run(logits, t, ids.view(len(logits), -1), block_sumexp=sums)
    return out.view(ids.shape)


def likeliest(
    logits: torch.Tensor, count: int, temperature: Any = 1.0, temperature_form: str = "divide"
) -> list[list[int]]:
    dtype = str(logits.dtype).removeprefix("torch.")
    run = bound(logprob_site("logprob", dtype=dtype, temperature_form=temperature_form)).run
    t = torch.as_tensor(temperature, dtype=logits.dtype).expand(len(logits)).contiguous()
    ids: list[list[int]] = run.likeliest(logits, t, count).tolist()
    return ids


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [7, 64, 100, 32768])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_form_and_width_equals_the_float64_log_softmax(
    dtype: str, block_size: int, form: str
) -> None:
    logits = numbers(1, 6, 333, dtype=dtype) * 8
    ids = [0, 332, 5, 5, 100, 17]
    temperature = [1.0, 0.5, 0.0, 1.7, 0.01, 1.0]
    got = logprobs(logits, ids, temperature, form=form, block_size=block_size)
    divisor = [t or 1.0 for t in temperature]
    rows = zip(to_numpy(logits), divisor, ids, strict=True)
    want = np.array([reference.log_softmax(row / t)[i] for row, t, i in rows])
    assert_close("logprob", dtype, got, want)


def test_wide_vocabularies_fold_two_blocks() -> None:
    logits = numbers(2, 2, 50_000) * 4
    want = [reference.log_softmax(row)[3] for row in to_numpy(logits)]
    assert_close("logprob", "float32", logprobs(logits, [3, 3]), np.array(want))


def test_the_temperature_is_applied_to_logits_and_not_to_logprobs() -> None:
    """thinking-machines-lab/tinker-feedback#148: dividing a logprob by T is another number."""
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    raw = logprobs(logits, [0, 1, 2], 1.0)
    scaled = logprobs(logits, [0, 1, 2], 0.5)
    assert raw.tolist() == pytest.approx([-0.40761, -1.40761, -2.40761], abs=1e-5)
    assert scaled.tolist() == pytest.approx([-0.14293, -2.14293, -4.14293], abs=1e-5)


def test_temperatures_zero_and_one_leave_the_logits_alone() -> None:
    logits = numbers(3, 4, 100)
    assert_same_bits(logprobs(logits, [1, 2, 3, 4], 0.0), logprobs(logits, [1, 2, 3, 4], 1.0))


def test_a_certain_token_s_sign_of_zero_follows_the_form() -> None:
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 4] = 3.0
    signs = {f: math.copysign(1, logprobs(logits, [4], form=f).item()) for f in FORMS}
    assert signs == {"torch": 1.0, "blockwise": -1.0, "blockwise-direct": 1.0}


def test_blockwise_direct_at_the_default_width_is_torch_s_form() -> None:
    logits = numbers(4, 5, 40_000) * 6
    ids = [7, 8, 9, 10, 11]
    assert_same_bits(logprobs(logits, ids, form="blockwise-direct"), logprobs(logits, ids))


def test_a_removed_token_has_minus_infinity_and_the_others_renormalise() -> None:
    logits = torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf]] * 2)
    got = logprobs(logits, [1, 2])
    assert got[0].item() == pytest.approx(-1.31326, abs=1e-5)
    assert got[1].item() == -torch.inf


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("block_size", [100, 32768])
def test_a_row_s_logprob_is_its_own(block_size: int, count: int) -> None:
    logits, ids = numbers(5, 9, 1001) * 5, list(range(9))
    temperature = torch.linspace(0, 2, 9)
    with threads(count):
        packed = logprobs(logits, ids, temperature, block_size=block_size)
        for row in range(9):
            alone = logprobs(logits[row : row + 1], [row], temperature[row], block_size=block_size)
            assert_same_bits(alone, packed[row : row + 1])


@pytest.mark.parametrize("form", FORMS)
def test_a_token_s_logprob_does_not_depend_on_the_others_that_are_asked_for(form: str) -> None:
    logits, temperature = numbers(8, 5, 1001) * 5, torch.linspace(0, 2, 5)
    many = [[3, 3, *range(700)], [*range(1, 703)], [7] * 702, [*range(299, 1001)], [*range(702)]]
    packed = logprobs(logits, many, temperature, form=form, block_size=100)
    for column in (0, 1, 2, 701):
        ids = [row[column] for row in many]
        alone = logprobs(logits, ids, temperature, form=form, block_size=100)
        assert_same_bits(packed[:, column], alone)


def ranked(row: torch.Tensor) -> list[int]:
    """All ids by (value descending, id ascending), by Python's own sort."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


@pytest.mark.parametrize("count", [1, 2, 7, 64, 299, 300])
@pytest.mark.parametrize("spread", [3.0, 0.3])
def test_the_likeliest_tokens_come_by_value_and_then_by_id(count: int, spread: float) -> None:
    logits = (numbers(9, 6, 300) * spread).round(decimals=1)  # many ties
    logits[2, ::2] = -torch.inf
    logits[3] = -0.0
    logits[3, 5:9] = 0.0
    got = likeliest(logits, count)
    assert got == [ranked(row)[:count] for row in logits]
    order = torch.tensor([4, 0, 5, 3, 1, 2])
    assert likeliest(logits[order], count) == [got[row] for row in order]
    for row in range(6):
        assert likeliest(logits[row : row + 1], count) == [got[row]]


def test_tokens_that_the_temperature_makes_equal_go_by_id() -> None:
    """The order is that of z: two logits may have one quotient."""
    below, above = np.float32(3.0), np.nextafter(np.float32(3.0), np.float32(4))
    t = next(
        t
        for t in np.linspace(1, 3, 1000, dtype=np.float32)
        if np.float32(below / t) == np.float32(above / t)
    )
    logits = torch.tensor([[0.0, below, above]])
    assert likeliest(logits, 3, 1.0) == [[2, 1, 0]]
    assert likeliest(logits, 3, float(t)) == [[1, 2, 0]]


def test_the_likeliest_of_a_row_that_is_not_finite_leave_the_others_alone() -> None:
    logits = numbers(10, 4, 50)
    want = likeliest(logits, 5)
    logits[1, 7], logits[2] = torch.nan, torch.nan
    got = likeliest(logits, 5)
    assert (got[0], got[3]) == (want[0], want[3])
    assert len(got[1]) == len(got[2]) == 5


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logprob_is_nan_exactly_where_its_row_is_not_finite(value: float) -> None:
    logits = torch.cat([numbers(11, 3, 40), torch.full((2, 40), -torch.inf)])
    logits[1, 3], logits[4, 9] = value, -1e38
    for form in FORMS:
        got = logprobs(logits, [0, 0, 3, 0, 0], form=form)
        assert got.isnan().tolist() == [False, True, False, True, False]
        assert got[4] == -torch.inf


def test_vocabulary_shards_on_block_boundaries_give_whole_blocks() -> None:
    shifted = -numbers(6, 3, 640).abs()
    sums = bound(block_sumexp_site("sumexp", dtype="float32", block_size=64)).run
    whole = sums(shifted, block_size=64)
    shards = [sums(part, block_size=64) for part in shifted.split([128, 320, 192], dim=1)]
    assert_same_bits(torch.cat(shards, dim=1), whole)
    ragged = sums(shifted[:, :600], block_size=64)
    assert ragged.shape == (3, 10)
    assert_same_bits(ragged[:, :9], whole[:, :9])


def test_temperature_multiply_is_a_product_with_the_rounded_reciprocal() -> None:
    logits = numbers(7, 1, 50) * 9
    t = np.float32(0.7)
    want = logprobs(logits * float(np.float32(1) / t), [3])
    assert_same_bits(logprobs(logits, [3], 0.7, temperature_form="multiply"), want)
    differs = [
        not torch.equal(
            logprobs(numbers(s, 1, 50) * 9, [3], 0.7, temperature_form="multiply"),
            logprobs(numbers(s, 1, 50) * 9, [3], 0.7),
        )
        for s in range(20)
    ]
    assert any(differs)


def test_a_block_size_other_than_the_order_s_is_refused() -> None:
    sums = bound(block_sumexp_site("sumexp", dtype="float32", block_size=64)).run
    with pytest.raises(ValueError, match="block_size 32, this call site's order has 64"):
        sums(torch.zeros(1, 64), block_size=32)
