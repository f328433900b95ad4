"""The random stream: published words, and noise that is right and the same everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl_kernels.ops.gumbel_noise import gumbel_noise, natural_log
from pagedctl_kernels.ops.philox import philox4x32, token_words
from tests.kernels import reference
from tests.kernels.harness import assert_same_bits, threads

WORD = 0xFFFFFFFF
word = st.integers(0, WORD)

# Random123's published known answers for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def hexes(text: str) -> list[int]:
    return [int(part, 16) for part in text.split()]


def run_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([value]) for value in (*counter, *key))
    return [int(out) for out in philox4x32((c0, c1, c2, c3), (k0, k1))]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: str, key: str, words: str) -> None:
    assert run_philox(hexes(counter), hexes(key)) == hexes(words)
    assert reference.philox4x32_10(hexes(counter), hexes(key)) == hexes(words)


@given(st.lists(word, min_size=4, max_size=4), st.lists(word, min_size=2, max_size=2))
@settings(max_examples=100, deadline=None)
def test_philox_equals_the_generator_on_python_integers(counter: list[int], key: list[int]) -> None:
    assert run_philox(counter, key) == reference.philox4x32_10(counter, key)


@given(st.integers(0, 2**53 - 1), st.integers(0, WORD), st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_a_token_s_word_follows_seed_position_and_id_alone(
    seed: int, position: int, group: int
) -> None:
    words = token_words(torch.tensor([seed]), torch.tensor([position]), torch.tensor([group]))
    key = [seed % 2**32, seed // 2**32]
    assert words.tolist() == [reference.philox4x32_10([group, position, 0, 0], key)]


def edge_words() -> list[int]:
    """Words at every power of two, at the ends, and around the branch at v = 1/4."""
    powers = [2**e + d for e in range(32) for d in (-1, 0, 1)]
    quarter = [2**30 + d for d in (-200, -65, -64, -33, -32, -1, 0, 1, 32, 64, 200)]
    return sorted({value for value in (*powers, *quarter, WORD, WORD - 127) if 0 <= value <= WORD})


def test_noise_is_within_its_stated_error_of_60_digits() -> None:
    generator = np.random.default_rng(0)
    words = edge_words() + generator.integers(0, 2**32, size=3000).tolist()
    words += [int(2**x) for x in generator.uniform(0, 32, size=1000)]
    got = gumbel_noise(torch.tensor(words)).double().numpy()
    want = np.array([reference.gumbel(value) for value in words])
    assert np.abs(got - want).max() < 1.5e-6


def test_the_exponential_keeps_its_relative_precision_for_small_words() -> None:
    words = [int(2**x) for x in np.linspace(0, 30, 400)]
    got = np.exp(-gumbel_noise(torch.tensor(words)).double().numpy())
    want = np.array([math.exp(-reference.gumbel(value)) for value in words])
    assert np.abs(got / want - 1).max() < 2.5e-6


def test_natural_log_is_within_its_stated_error() -> None:
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(1)) + 1e-7
    x = torch.cat([x, torch.exp2(torch.linspace(-33, 4, 100_001))])
    want = np.log(x.double().numpy())
    error = np.abs(natural_log(x).double().numpy() - want)
    assert (error / np.maximum(1, np.abs(want)) < 2e-7).all()


def test_the_extremes_of_the_noise_are_those_of_the_page() -> None:
    largest, smallest = gumbel_noise(torch.tensor([0, WORD])).tolist()
    assert round(largest, 1) == 22.9
    assert -3 < smallest < -2.8
    assert gumbel_noise(torch.arange(0, 2**32, 99_991)).isfinite().all()


def test_noise_never_rises_with_the_word() -> None:
    words = torch.tensor([*edge_words(), *range(0, 2**32, 1_000_003)]).sort().values
    noise = gumbel_noise(words).double()
    assert (noise[1:] - noise[:-1]).max() < 1e-6


def test_noise_has_the_moments_of_a_gumbel_variable() -> None:
    count = 400_000
    seeds, positions = torch.full((count,), 11), torch.full((count,), 5)
    noise = gumbel_noise(token_words(seeds, positions, torch.arange(count))).double().flatten()
    sigma = math.pi / math.sqrt(6)
    assert abs(noise.mean().item() - 0.5772156649) < 5 * sigma / math.sqrt(noise.numel())
    assert abs(noise.var().item() / sigma**2 - 1) < 0.01
    skewness = ((noise - noise.mean()) / noise.std()).pow(3).mean().item()
    assert abs(skewness - 1.1395) < 0.03


@pytest.mark.parametrize("count", [1, 2])
def test_noise_has_the_same_bits_alone_and_packed(count: int) -> None:
    groups = torch.arange(9001)
    with threads(count):
        words = token_words(torch.full_like(groups, 3), torch.full_like(groups, 4), groups)
        packed = gumbel_noise(words)
        for start, size in ((0, 1), (5, 1), (17, 33), (8999, 2)):
            part = token_words(*(torch.full((size,), v) for v in (3, 4)), groups[start:][:size])
            assert_same_bits(gumbel_noise(part), packed[start : start + size])


def test_noise_is_made_of_single_rounded_operations() -> None:
    """The same formula in numpy scalars, one rounded float32 operation at a time."""
    f32 = np.float32
    p = [f32(c) for c in (
        0.33333316445350647, -0.25000810623168945, 0.2000228613615036, -0.16624553501605988,
        0.14181196689605713, -0.13128763437271118, 0.12881620228290558, -0.07859551906585693,
    )]  # fmt: skip
    q = [f32(c) for c in (
        0.5000000596046448, 0.3333280086517334, 0.25017765164375305, 0.1972181648015976,
        0.18958626687526703, 0.04254123196005821, 0.3332173526287079,
    )]  # fmt: skip

    def horner(coefficients: list[np.float32], x: np.float32) -> np.float32:
        value = coefficients[-1]
        for c in coefficients[-2::-1]:
            value = f32(f32(value * x) + c)
        return value

    def ln(x: np.float32) -> np.float32:
        bits = int(x.view(np.int32))
        e = (bits - 0x3F3504F3) >> 23
        f = f32(np.int32(bits - (e << 23)).view(np.float32) - f32(1))
        square = f32(f * f)
        y = f32(horner(p, f) * f32(square * f))
        y = f32(y + f32(f32(e) * f32(-2.12194440e-4)))
        y = f32(y - f32(square * f32(0.5)))
        return f32(f32(f + y) + f32(f32(e) * f32(0.693359375)))

    words = [*edge_words(), *np.random.default_rng(2).integers(0, 2**32, size=500).tolist()]
    for value, got in zip(words, gumbel_noise(torch.tensor(words)).numpy(), strict=True):
        v = min(f32(f32(f32(value) + f32(0.5)) * f32(2.0**-32)), f32(1 - 2.0**-24))
        e = f32(v + f32(f32(v * v) * horner(q, v))) if v < 0.25 else -ln(f32(f32(1) - v))
        assert got == -ln(e), hex(value)
