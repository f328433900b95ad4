"""Logprobs on the GPU: right, each row's own, and the same bits fused or by separate block sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.ops.gumbel_noise import natural_log
from pagedctl_kernels.ops.temperature import scale_logits
from pagedctl_kernels.sites import block_sumexp_site, logprob_site
from tests.kernels import reference
from tests.kernels.reference import assert_close, to_numpy
from tests.kernels.triton.harness import (
    DEVICE,
    assert_same_bits,
    bind_leaf,
    numbers,
    poisoned,
)

FORMS = ("torch", "blockwise", "blockwise-direct")


def logprob_leaf(**site: Any) -> Any:
    return bind_leaf(logprob_site("logprob", dtype="float32", **site), "triton.logprob")


def sums_leaf(block_size: int) -> Any:
    site = block_sumexp_site("sumexp", dtype="float32", block_size=block_size)
    return bind_leaf(site, "triton.block_sumexp")


class SeparateSums:
    """The house's block sums behind another object, which the logprob has to call."""

    def __init__(self, block_size: int) -> None:
        self.leaf = sums_leaf(block_size)
        self.seen: list[torch.Tensor] = []

    def __call__(self, shifted: torch.Tensor, *, block_size: int) -> torch.Tensor:
        self.seen.append(shifted)
        sums: torch.Tensor = self.leaf(shifted, block_size=block_size)
        return sums


def per_row(values: Any, rows: int) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32).expand(rows).contiguous().to(DEVICE)


def logprobs(
    logits: torch.Tensor,
    token_ids: Any,
    temperature: Any = 1.0,
    *,
    block_size: int = 32768,
    block_sumexp: Any = None,
    **site: Any,
) -> torch.Tensor:
    """Logprobs float32[R] of one token a row, or [R, K] of a list a row, on the CPU."""
    ids = torch.as_tensor(token_ids)
    out: torch.Tensor = logprob_leaf(block_size=block_size, **site)(
        logits,
        per_row(temperature, len(logits)),
        ids.view(len(logits), -1).to(DEVICE),
        block_sumexp=block_sumexp or sums_leaf(block_size),
    )
    return out.view(ids.shape).cpu()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [100, 32768])
def test_every_form_and_width_equals_the_float64_log_softmax(block_size: int, form: str) -> None:
    logits = numbers(1, 6, 333) * 8
    ids = [0, 332, 5, 5, 100, 17]
    temperature = [1.0, 0.5, 0.0, 1.7, 0.01, 1.0]
    got = logprobs(logits, ids, temperature, form=form, block_size=block_size)
    rows = zip(to_numpy(logits.cpu()), [t or 1.0 for t in temperature], ids, strict=True)
    want = np.array([reference.log_softmax(row / t)[i] for row, t, i in rows])
    assert_close("logprob", "float32", got, want)


@pytest.mark.parametrize("temperature_form", ["divide", "multiply"])
@pytest.mark.parametrize("form", FORMS)
def test_every_operation_after_the_block_sums_has_the_written_bits(
    form: str, temperature_form: str
) -> None:
    """z, max, differences, fold and LN are correctly rounded: the CPU's own give the same."""
    logits, temperature = numbers(2, 5, 700) * 4, torch.tensor([0.0, 1.0, 0.7, 1.3, 0.1])
    ids = [[3, 3, *range(98)], [*range(100)], [7] * 100, [*range(600, 700)], [*range(9, 109)]]
    sums = SeparateSums(64)
    got = logprobs(
        logits,
        ids,
        temperature,
        form=form,
        block_size=64,
        block_sumexp=sums,
        temperature_form=temperature_form,
    )
    z = scale_logits(logits.cpu(), temperature, temperature_form)
    shifted = z - z.amax(dim=1, keepdim=True)
    (seen,) = sums.seen
    assert_same_bits(seen.cpu(), shifted, "shifted")
    total, *rest = sums(seen, block_size=64).cpu().unbind(dim=1)
    for block in rest:
        total = total + block
    log_total = natural_log(total).unsqueeze(1)
    token = shifted.gather(1, torch.tensor(ids))
    want = -(log_total - token) if form == "blockwise" else token - log_total
    assert_same_bits(got, want, form)


@pytest.mark.parametrize(
    ("columns", "block_size"), [(300, 7), (9001, 300), (9001, 8192), (20_000, 32768)]
)
def test_sums_taken_in_passing_have_the_bits_of_separate_ones(
    columns: int, block_size: int
) -> None:
    logits, temperature = numbers(3, 3, columns) * 3, [1.0, 0.6, 1.4]
    ids = [[0, columns - 1, 5]] * 3
    separate = SeparateSums(block_size)
    passing = logprobs(logits, ids, temperature, block_size=block_size)
    apart = logprobs(logits, ids, temperature, block_size=block_size, block_sumexp=separate)
    assert_same_bits(passing, apart)
    assert len(separate.seen) == 1


def test_a_contracted_difference_would_be_told_apart() -> None:
    """fl(fl(z * (1 / T)) - max) is not what one rounding of the product and the sum gives."""
    logits = numbers(4, 4, 300) * 4
    sums = SeparateSums(64)
    logprobs(logits, [0] * 4, 0.7, block_size=64, block_sumexp=sums, temperature_form="multiply")
    (seen,) = sums.seen
    reciprocal = np.float32(1) / np.float32(0.7)
    z = logits.cpu() * float(reciprocal)
    highest = z.amax(dim=1, keepdim=True)
    assert_same_bits(seen.cpu(), z - highest)
    once = (logits.cpu().double() * float(reciprocal) - highest.double()).float()
    with pytest.raises(AssertionError, match="differs first"):
        assert_same_bits(seen.cpu(), once)


@pytest.mark.parametrize("block_size", [100, 32768])
def test_a_row_s_logprobs_are_its_own_wherever_it_lies(block_size: int) -> None:
    logits, temperature = numbers(5, 5, 9001) * 3, torch.linspace(0, 2, 5)
    ids = torch.randint(0, 9001, (5, 40), generator=torch.Generator().manual_seed(5))
    packed = logprobs(logits, ids, temperature, block_size=block_size)
    for row in range(5):
        one = slice(row, row + 1)
        alone = logprobs(logits[one], ids[one], temperature[one], block_size=block_size)
        assert_same_bits(alone, packed[one])
    for column in (0, 39):
        of_one = logprobs(logits, ids[:, column], temperature, block_size=block_size)
        assert_same_bits(of_one, packed[:, column])
    wide = poisoned(5, 9100)
    wide[:, 3:9004] = logits.flip(0)
    moved = logprobs(wide[:, 3:9004], ids.flip(0), temperature.flip(0), block_size=block_size)
    assert_same_bits(moved.flip(0), packed)


def test_a_certain_token_s_sign_of_zero_follows_the_form() -> None:
    logits = torch.full((1, 10), -torch.inf, device=DEVICE)
    logits[0, 4] = 3.0
    signs = {f: math.copysign(1, logprobs(logits, [4], form=f).item()) for f in FORMS}
    assert signs == {"torch": 1.0, "blockwise": -1.0, "blockwise-direct": 1.0}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("separate", [False, True])
def test_a_logprob_is_nan_exactly_where_its_row_is_not_finite(value: float, separate: bool) -> None:
    nothing = torch.full((2, 40), -torch.inf, device=DEVICE)
    logits = torch.cat([numbers(11, 3, 40), nothing])
    logits[1, 3], logits[4, 9] = value, -1e38
    sums = SeparateSums(16) if separate else None
    for form in FORMS:
        got = logprobs(logits, [0, 0, 3, 0, 0], form=form, block_size=16, block_sumexp=sums)
        assert got.isnan().tolist() == [False, True, False, True, False]
        assert got[4] == -torch.inf
    assert sums is None or len(sums.seen) == len(FORMS)


def test_a_temperature_that_makes_a_logit_overflow_gives_nan() -> None:
    logits = numbers(12, 3, 40) * 10
    for form in ("divide", "multiply"):
        got = logprobs(logits, [0, 0, 0], [1.0, 1e-38, 1e-40], temperature_form=form)
        assert got.isnan().tolist() == [False, True, True]


def test_an_id_without_a_column_gives_nan_and_reads_nothing() -> None:
    logits = numbers(13, 2, 50)
    got = logprobs(logits, [[3, 50, -1], [2**40, 3, 49]])
    assert got.isnan().tolist() == [[False, True, True], [True, False, False]]


def test_operands_of_another_form_are_refused() -> None:
    leaf, sums = logprob_leaf(), sums_leaf(32768)
    logits, t = numbers(14, 2, 50), per_row(1.0, 2)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="logits must be float32"):
        leaf(logits.double(), t, ids, block_sumexp=sums)
    with pytest.raises(ValueError, match=r"temperature must be float32 \[2\]"):
        leaf(logits, t[:1], ids, block_sumexp=sums)
    with pytest.raises(ValueError, match=r"token_ids must be int64 \[2, K\]"):
        leaf(logits, t, ids.int(), block_sumexp=sums)
    with pytest.raises(ValueError, match="without gaps"):
        leaf(logits.T.contiguous().T, t, ids, block_sumexp=sums)
    with pytest.raises(ValueError, match=r"block sums must be float32 \[2, 1\]"):
        leaf(logits, t, ids, block_sumexp=lambda shifted, block_size: shifted)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [151_936, 50_257])
@pytest.mark.parametrize("block_size", [32768, 4096])
def test_vocabularies_of_models(columns: int, block_size: int) -> None:
    rows = 70
    logits = numbers(15, rows, columns) * 4.5
    temperature = torch.linspace(0, 1.5, rows)
    ids = torch.randint(0, columns, (rows, 3), generator=torch.Generator().manual_seed(1))
    got = logprobs(logits, ids, temperature, block_size=block_size)
    apart = SeparateSums(block_size)
    assert_same_bits(
        logprobs(logits, ids, temperature, block_size=block_size, block_sumexp=apart), got
    )
    divisor = torch.where(temperature == 0, 1, temperature).to(DEVICE)
    want = torch.log_softmax(logits.double() / divisor.double()[:, None], dim=1)
    assert_close("logprob", "float32", got, to_numpy(want.cpu().gather(1, ids)))
    for row in (0, 31, 69):
        one = slice(row, row + 1)
        alone = logprobs(logits[one], ids[one], temperature[one], block_size=block_size)
        assert_same_bits(alone, got[one])


@pytest.mark.gpu
def test_a_captured_graph_gives_the_eager_bits() -> None:
    logits, ids = numbers(16, 4, 151_936), torch.arange(4, device=DEVICE)[:, None]
    t, leaf, sums = per_row(0.8, 4), logprob_leaf(), sums_leaf(32768)
    eager = leaf(logits, t, ids, block_sumexp=sums)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = leaf(logits, t, ids, block_sumexp=sums)
    logits.copy_(logits.flip(0))
    graph.replay()
    assert_same_bits(captured, leaf(logits, t, ids, block_sumexp=sums))
    assert not torch.equal(captured, eager)
