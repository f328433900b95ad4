"""The device functions that kernels share have the CPU leaves' bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pagedctl_kernels.ops import gumbel_noise, philox, triton_math
from pagedctl_kernels.ops.temperature import scale_logits
from tests.kernels import harness, reference
from tests.kernels.triton.harness import DEVICE, assert_same_bits, poisoned

COUNT = 4096
SEEDS = (0, 7, 2**32 - 1, 2**32, 2**53 - 1)
POSITIONS = (0, 1, 2**31 + 5)


@triton.jit
def log_kernel(x, out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, triton_math.natural_log(tl.load(x + place)))


@triton.jit
def noise_kernel(words, noise, variates, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    word = tl.load(words + place).to(tl.uint32)
    tl.store(noise + place, triton_math.gumbel_noise(word))
    tl.store(variates + place, triton_math.uniform(word))


@triton.jit
def words_kernel(seeds, positions, first_group, out, COUNT: tl.constexpr):
    row = tl.program_id(0)
    group = first_group + tl.arange(0, COUNT // 4)
    w0, w1, w2, w3 = triton_math.token_words(tl.load(seeds + row), tl.load(positions + row), group)
    place = out + row * COUNT + 4 * tl.arange(0, COUNT // 4)
    tl.store(place, w0.to(tl.int64))
    tl.store(place + 1, w1.to(tl.int64))
    tl.store(place + 2, w2.to(tl.int64))
    tl.store(place + 3, w3.to(tl.int64))


@triton.jit
def scale_kernel(logits, temperature, out, COUNT: tl.constexpr, MULTIPLY: tl.constexpr):
    row = tl.program_id(0)
    place = row * COUNT + tl.arange(0, COUNT)
    operand = triton_math.temperature_operand(tl.load(temperature + row), MULTIPLY)
    tl.store(out + place, triton_math.scaled(tl.load(logits + place), operand, MULTIPLY))


def launched(kernel: Any, *operands: Any, programs: int = 1, **constants: Any) -> None:
    kernel[(programs,)](*operands, **constants, enable_fp_fusion=False)


def random_words(seed: int) -> torch.Tensor:
    """COUNT words: random ones, all small ones, the largest, and those about the form's edge."""
    words = torch.randint(0, 2**32, (COUNT,), generator=torch.Generator().manual_seed(seed))
    edges = [*range(512), *range(2**32 - 256, 2**32), *range(2**30 - 256, 2**30 + 256)]
    words[: len(edges)] = torch.tensor(edges)
    return words


def test_ln_has_the_written_bits() -> None:
    x = torch.cat(
        [
            torch.exp(harness.numbers(1, COUNT // 2) * 20),
            1 + harness.numbers(2, COUNT // 4) * 1e-3,
            torch.arange(1.0, COUNT // 4 + 1),
        ]
    ).clamp_(min=torch.finfo(torch.float32).tiny)
    out = poisoned(COUNT)
    launched(log_kernel, x.to(DEVICE), out, COUNT=COUNT)
    assert_same_bits(out.cpu(), gumbel_noise.natural_log(x), "LN")
    error = (out.cpu().double() - x.double().log()).abs() / x.double().log().abs().clamp(min=1)
    assert float(error.max()) < 1e-6


def test_noise_and_variates_have_the_cpu_s_bits() -> None:
    words = random_words(3)
    noise, variates = poisoned(COUNT), poisoned(COUNT)
    launched(noise_kernel, words.to(DEVICE), noise, variates, COUNT=COUNT)
    assert_same_bits(variates.cpu(), gumbel_noise.uniform_variates(words), "v")
    assert_same_bits(noise.cpu(), gumbel_noise.gumbel_noise(words), "noise")
    for place in range(0, COUNT, 173):
        assert noise[place].item() == pytest.approx(reference.gumbel(int(words[place])), abs=2e-6)


def test_a_token_s_words_are_the_published_generator_s() -> None:
    keys = [(seed, position) for seed in SEEDS for position in POSITIONS]
    seeds, positions = (torch.tensor(column) for column in zip(*keys, strict=True))
    count, first_group = 64, 37_000
    out = poisoned(len(keys), count, dtype=torch.int64)
    operands = (seeds.to(DEVICE), positions.to(DEVICE), first_group, out)
    launched(words_kernel, *operands, programs=len(keys), COUNT=count)
    groups = torch.arange(first_group, first_group + count // 4)
    for row, (seed, position) in enumerate(keys):
        want = philox.token_words(
            torch.full_like(groups, seed), torch.full_like(groups, position), groups
        )
        assert_same_bits(out[row].cpu(), want.flatten(), f"seed {seed}, position {position}")
        first = reference.philox4x32_10(
            [first_group, position % 2**32, philox.SAMPLING, 0], [seed % 2**32, seed >> 32]
        )
        assert out[row, :4].tolist() == first


@pytest.mark.parametrize("form", ["divide", "multiply"])
def test_a_row_is_scaled_as_on_the_cpu(form: str) -> None:
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 1e-3, 1e-40, 3e38])
    logits = harness.numbers(5, len(temperature), COUNT) * 9
    logits[:, :4] = torch.tensor([-torch.inf, 0.0, -0.0, 1e-41])
    out = poisoned(*logits.shape)
    launched(
        scale_kernel,
        logits.to(DEVICE),
        temperature.to(DEVICE),
        out,
        programs=len(temperature),
        COUNT=COUNT,
        MULTIPLY=form == "multiply",
    )
    got, want = out.cpu(), scale_logits(logits, temperature, form)
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0), form)


@triton.jit
def plain_noise_kernel(words, noise, COUNT: tl.constexpr):
    """The noise without the series for small v: right to rounding, of other bits."""
    place = tl.arange(0, COUNT)
    v = triton_math.uniform(tl.load(words + place).to(tl.uint32))
    exponential = triton_math.natural_log(1.0 - v) * -1.0
    tl.store(noise + place, triton_math.natural_log(exponential) * -1.0)


def test_noise_by_another_formula_is_told_apart() -> None:
    words = 2**29 + torch.arange(COUNT) * 1001  # v about 1/8
    out = poisoned(COUNT)
    launched(plain_noise_kernel, words.to(DEVICE), out, COUNT=COUNT)
    want = gumbel_noise.gumbel_noise(words)
    assert torch.allclose(out.cpu(), want, atol=1e-5)
    with pytest.raises(AssertionError, match="differs first"):
        assert_same_bits(out.cpu(), want)


@pytest.mark.gpu
def test_contraction_would_change_the_logarithm() -> None:
    x = torch.exp(harness.numbers(6, COUNT)).to(DEVICE)
    apart, fused = poisoned(COUNT), poisoned(COUNT)
    log_kernel[(1,)](x, apart, COUNT=COUNT, enable_fp_fusion=False)
    log_kernel[(1,)](x, fused, COUNT=COUNT, enable_fp_fusion=True)
    want = gumbel_noise.natural_log(x.cpu())
    assert_same_bits(apart.cpu(), want)
    with pytest.raises(AssertionError, match="differs first"):
        assert_same_bits(fused.cpu(), want)
