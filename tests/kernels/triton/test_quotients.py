"""The quotients of the logprob's block sums: multiply-adds that give the bits of a division."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pagedctl_kernels.ops.logprob.triton_kernel import quotients
from tests.kernels.triton.harness import DEVICE, numbers, poisoned


@triton.jit
def quotients_kernel(values, divisors, out, differs, COUNT: tl.constexpr):
    """How often a row's quotients differ from divisions; rows [COUNT] under one divisor each."""
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(values + row * COUNT + tl.arange(0, COUNT))
    divisor = tl.load(divisors + row)
    got, want = quotients(value, divisor, 1.0), tl.div_rn(value, divisor)
    tl.store(out + row * COUNT + tl.arange(0, COUNT), got)
    unequal = got.to(tl.int32, bitcast=True) != want.to(tl.int32, bitcast=True)
    tl.store(differs + row, tl.sum(unequal.to(tl.int32), axis=0))


@pytest.mark.gpu
def test_quotients_by_multiply_adds_are_divisions() -> None:
    """Down to 2^-78, for divisors from 2^-20 to 2^20 and near powers of two."""
    rows, count = 50_000, 4096
    generator = torch.Generator(DEVICE).manual_seed(17)

    def random(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        spread = torch.rand(shape, generator=generator, device=DEVICE, dtype=torch.float64)
        return torch.exp2(low + (high - low) * spread)

    divisors = random((rows,), -20, 20)
    divisors[: rows // 2] = random((rows // 2,), -3, 3)
    near = torch.randint(-99, 99, (1000,), generator=generator, device=DEVICE)
    divisors[:1000] = 1 + near * 2.0**-23
    for low, high in ((-78, 60), (-4, 6)):
        values = random((rows, count), low, high).float()
        values[:, ::2] *= -1
        out = poisoned(rows, count)
        differs = poisoned(rows, dtype=torch.int32)
        quotients_kernel[(rows,)](
            values, divisors.float(), out, differs, COUNT=count, enable_fp_fusion=False
        )
        assert not out.isnan().any()
        assert int(differs.sum()) == 0


@pytest.mark.gpu
def test_quotients_outside_their_range_are_divisions_too() -> None:
    values = numbers(18, 64, 4096)
    values[:, 0], values[:, 1] = -torch.inf, torch.inf
    divisors = torch.full((64,), 1e-30, device=DEVICE)
    divisors[32:], divisors[:8] = 1e30, 1.0
    out, differs = poisoned(64, 4096), poisoned(64, dtype=torch.int32)
    quotients_kernel[(64,)](values, divisors, out, differs, COUNT=4096, enable_fp_fusion=False)
    assert int(differs.sum()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("divisor", [0.7, 1.3, 0.5, 3.0])
def test_what_a_row_hides_from_the_sums_stays_hidden(divisor: float) -> None:
    values = numbers(19, 1, 4096)
    values[0, :4] = torch.tensor([-torch.inf, -3e38, -1e31, torch.nan])
    out, differs = poisoned(1, 4096), poisoned(1, dtype=torch.int32)
    divisors = torch.full((1,), divisor, device=DEVICE)
    quotients_kernel[(1,)](values, divisors, out, differs, COUNT=4096, enable_fp_fusion=False)
    assert out[0, :4].exp().tolist()[:3] == [0, 0, 0]
    assert out[0, 3].isnan()
    assert torch.equal(out[0, 4:], values[0, 4:] / divisors)


@triton.jit
def exp_is_one_kernel(first, differs, COUNT: tl.constexpr):
    """How many of COUNT bit patterns from *first* on, of either sign, have an exp other than 1."""
    pattern = first + tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    value = pattern.to(tl.float32, bitcast=True)
    unequal = (tl.exp(value) != 1.0) | (tl.exp(value * -1.0) != 1.0)
    tl.store(differs + tl.program_id(0), tl.sum(unequal.to(tl.int32), axis=0))


@pytest.mark.gpu
def test_exp_of_every_number_below_2_to_the_minus_32_is_one() -> None:
    """What the quotients of tiny logits rest on."""
    count = 8192
    last = int(torch.tensor(2.0**-32).view(torch.int32))
    programs = last // count
    differs = poisoned(programs, dtype=torch.int32)
    exp_is_one_kernel[(programs,)](0, differs, COUNT=count, enable_fp_fusion=False)
    assert int(differs.sum()) == 0
    control = int(torch.tensor(2.0**-20).view(torch.int32))
    exp_is_one_kernel[(1,)](control, differs, COUNT=count, enable_fp_fusion=False)
    assert int(differs[0]) > 0
