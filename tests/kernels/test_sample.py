"""Sampling: exact kept sets, ties by id, and draws that follow seed and position alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedctl_kernels.ops.gumbel_noise import gumbel_noise, uniform_variates
from pagedctl_kernels.ops.philox import token_words
from pagedctl_kernels.ops.sample import draw, truncation
from pagedctl_kernels.ops.sample.truncation import kept_mask
from pagedctl_kernels.sites import sample_site
from tests.kernels import reference
from tests.kernels.harness import (
    assert_same_bits,
    bound,
    numbers,
    sampler,
    sampling_rows,
    threads,
)


def logits_of(*probabilities: float) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.asarray(probabilities))).float().unsqueeze(0)


def kept(
    logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """Ids that one row keeps; also checks that it keeps the same in a batch of nine."""
    batch = torch.cat([numbers(i, *logits.shape) * 3 for i in range(4)])
    packed = torch.cat([batch, logits, batch])
    for rows, place in ((logits, 0), (packed, 4)):
        mask = kept_mask(
            rows,
            torch.full((len(rows),), top_k),
            torch.full((len(rows),), top_p, dtype=torch.float64),
            torch.full((len(rows),), min_p),
        )
        ids: list[int] = mask[place].nonzero().squeeze(-1).tolist()
        if place == 0:
            alone = ids
    assert alone == ids
    return ids


def test_ties_at_the_top_k_boundary_go_to_the_lowest_id() -> None:
    """vllm-project/vllm#50979: exactly k tokens, the same alone and in a batch of 9."""
    assert kept(logits_of(0.4, 0.3, 0.3, 0.0), top_k=2) == [0, 1]
    assert kept(logits_of(0.3, 0.4, 0.3, 0.0), top_k=2) == [0, 1]
    assert kept(torch.zeros(1, 50), top_k=7) == list(range(7))


@pytest.mark.parametrize("top_k", [0, -1, 4, 100])
def test_top_k_off_keeps_every_finite_token(top_k: int) -> None:
    assert kept(logits_of(0.4, 0.3, 0.3, 0.0), top_k=top_k) == [0, 1, 2]


def test_the_nucleus_includes_the_token_that_crosses() -> None:
    """flashinfer-ai/flashinfer#2202: a kept mass of 0.89999 at p = 0.9 is one token short."""
    probabilities = [0.89999 / 400] * 400 + [0.00131] + [(1 - 0.89999 - 0.00131) / 99] * 99
    assert probabilities == sorted(probabilities, reverse=True)
    logits = logits_of(*probabilities)
    assert logits.shape == (1, 500)
    assert kept(logits, top_p=0.9) == list(range(401))


def test_a_partial_sum_equal_to_p_ends_the_nucleus() -> None:
    assert kept(logits_of(0.5, 0.25, 0.125, 0.125), top_p=0.75) == [0, 1]
    assert kept(logits_of(0.5, 0.25, 0.125, 0.125), top_p=0.5) == [0]
    assert kept(logits_of(0.5, 0.25, 0.125, 0.125), top_p=0.7500001) == [0, 1, 2]


def test_the_nucleus_is_never_empty() -> None:
    for p in (1e-9, 1e-300, 5e-324):
        assert kept(logits_of(0.2, 0.5, 0.3), top_p=p) == [1]
    assert kept(torch.zeros(1, 10), top_p=1e-9) == [0]


def test_filters_apply_in_the_order_top_k_top_p_min_p() -> None:
    """sgl-project/sglang#33539: other orders give other sets on tied rows."""
    logits = logits_of(0.25, 0.25, 0.25, 0.25)
    assert kept(logits, top_k=3, top_p=0.5, min_p=0.1) == [0, 1]
    assert kept(logits, top_k=3, top_p=0.7) == [0, 1, 2]
    assert kept(logits, top_k=2, top_p=0.7) == [0, 1]
    assert kept(logits_of(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.57) == [0]
    assert kept(logits_of(0.6, 0.3, 0.06, 0.04), top_k=3, top_p=0.99, min_p=0.2) == [0, 1]


def test_min_p_of_one_keeps_every_maximum() -> None:
    """NVIDIA/TensorRT-LLM#16590: never an empty row."""
    assert kept(logits_of(0.4, 0.2, 0.4), min_p=1.0) == [0, 2]
    assert kept(logits_of(0.4, 0.2, 0.4), min_p=0.5) == [0, 1, 2]
    assert kept(logits_of(0.4, 0.2, 0.4), min_p=0.0) == [0, 1, 2]


def test_removed_tokens_are_never_kept() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 0.5, -torch.inf]])
    assert kept(logits) == [0, 2]
    assert kept(logits, top_k=3) == [0, 2]
    assert kept(logits, top_p=0.99999) == [0, 2]


def test_zeros_of_either_sign_tie() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -5.0]])
    assert kept(logits, top_k=2) == [0, 1]
    assert kept(logits, top_p=0.3) == [0, 1]


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    st.integers(-1, 45),
    st.sampled_from([1.0, 0.999, 0.9, 0.75, 0.5, 0.31, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([1.0, 0.5, 2.0]),
)
@settings(max_examples=300, deadline=None)
def test_the_kept_set_equals_the_float64_reference(
    halves: list[int], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    values = [half / 2 for half in halves]
    if top_p < 1 and reference.crossing_margin(values, temperature, top_k, top_p) < 1e-6:
        return
    scaled = torch.tensor([values]) / temperature
    want = reference.kept_tokens(values, temperature, top_k, top_p, min_p)
    weights = np.exp((np.array(values) - max(values)) / temperature)
    if np.abs(weights - min_p).min() < 1e-6 and 0 < min_p < 1:
        return
    assert kept(scaled, top_k=top_k, top_p=top_p, min_p=min_p) == want


@pytest.mark.parametrize("top_k", [0, 40, 1500, 2999])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.8, 0.05])
@pytest.mark.parametrize("spread", [0.1, 6.0])
def test_wide_rows_keep_the_reference_set_beyond_the_probed_prefix(
    top_k: int, top_p: float, spread: float
) -> None:
    logits = numbers(3, 1, 3000) * spread
    want = reference.kept_tokens(logits[0].tolist(), 1.0, top_k, top_p, 0.0)
    assert kept(logits, top_k=top_k, top_p=top_p) == want


def test_every_way_to_find_the_prefix_gives_the_same_set(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (numbers(4, 6, 400) * 3).round()
    columns = (
        torch.tensor([0, 5, 399, 50, 200, 1]),
        torch.tensor([0.9, 0.5, 0.99, 1.0, 0.7, 0.4], dtype=torch.float64),
        torch.zeros(6),
    )
    want = kept_mask(logits, *columns)
    for width in (1, 7, 64, 399, 400):
        monkeypatch.setattr(truncation, "PROBED_TOKENS", width)
        assert_same_bits(kept_mask(logits, *columns), want, f"width {width}")


def test_the_integer_mass_differs_from_exact_arithmetic_by_little() -> None:
    logits = numbers(5, 1, 2**18)[0] * 4
    weights = torch.exp(logits - logits.max())
    mass = truncation.integer_mass(weights).sum().item() / truncation.MASS_SCALE
    exact = math.fsum(np.exp((logits - logits.max()).double().numpy()))
    assert abs(mass / exact - 1) < 2.0**-22


def test_probabilities_after_truncation_equal_the_reference() -> None:
    logits = numbers(6, 1, 300) * 3
    rows = sampling_rows(1, temperature=0.7, top_k=50, top_p=0.9)
    z = sampler().truncated(logits, rows)[0].double() / float(np.float32(0.7))
    keep = reference.kept_tokens(logits[0].tolist(), float(np.float32(0.7)), 50, 0.9, 0.0)
    assert (z > -torch.inf).nonzero().squeeze(-1).tolist() == keep
    want = np.exp(logits[0].double().numpy()[keep] / float(np.float32(0.7)))
    assert np.abs(torch.softmax(z, 0).numpy()[keep] - want / want.sum()).max() < 1e-6


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -0.0, 0.0], [-0.0, 0.0, -1.0]])
    out = sampler()(logits, sampling_rows(3, temperature=0.0))
    assert out.token_ids.tolist() == [1, 0, 0]
    assert not out.faulty.any()
    wide = numbers(14, 40, 1003).round()
    wide[:, 500:503] = 9.0
    wide[20:, 1002] = 9.0
    got = sampler()(wide, sampling_rows(40, temperature=0.0)).token_ids
    assert got.tolist() == [500] * 40


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
def test_tiny_temperatures_give_the_argmax(temperature: float) -> None:
    """vllm-project/vllm#3063: 11.0625 / 1e-5 overflows float16, not one float32 division."""
    logits = torch.tensor([[1.5, 11.0625, -3.0, 11.0, 0.0, 7.25, 2.0]])
    for position in range(20):
        rows = sampling_rows(1, temperature=temperature, position=position)
        out = sampler()(logits, rows)
        assert out.token_ids.tolist() == [1]
        assert not out.faulty.any()


def test_faulty_rows_are_flagged_and_leave_the_others_alone() -> None:
    logits = numbers(7, 8, 60)
    clean = sampler()(logits, sampling_rows(8, position=list(range(8)), top_p=0.9))
    assert not clean.faulty.any()
    logits[1, 5] = torch.nan
    logits[3, 0] = torch.inf
    logits[4] = -torch.inf
    logits[6, 9] = -torch.inf
    out = sampler()(
        logits,
        sampling_rows(
            8, position=list(range(8)), top_p=0.9, temperature=[1, 1, 1, 0, 1, 1, 1, 1.0]
        ),
    )
    assert out.faulty.tolist() == [False, True, False, True, True, False, False, False]
    assert out.token_ids[out.faulty].tolist() == [0, 0, 0]
    for row in (0, 2, 5, 7):
        assert out.token_ids[row] == clean.token_ids[row]


def columns_of_mixed_rows(count: int) -> dict[str, list[Any]]:
    generator = np.random.default_rng(1)
    return {
        "temperature": [[0.0, 1.0, 0.6, 1.5][i % 4] for i in range(count)],
        "top_k": [[0, 5, 50, -1, 1][i % 5] for i in range(count)],
        "top_p": [[1.0, 0.9, 0.3][i % 3] for i in range(count)],
        "min_p": [[0.0, 0.0, 0.05, 0.2][i % 4] for i in range(count)],
        "seed": generator.integers(0, 2**53, size=count).tolist(),
        "position": generator.integers(0, 10_000, size=count).tolist(),
    }


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_s_token_is_its_own(count: int) -> None:
    logits = (numbers(8, 24, 1003) * 2).round(decimals=1)
    columns = columns_of_mixed_rows(24)
    with threads(count):
        packed = sampler()(logits, sampling_rows(24, **columns))
        order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
        shuffled = {name: [values[i] for i in order] for name, values in columns.items()}
        permuted = sampler()(logits[order], sampling_rows(24, **shuffled))
        assert permuted.token_ids.tolist() == packed.token_ids[order].tolist()
        for row in range(24):
            alone = {name: values[row] for name, values in columns.items()}
            out = sampler()(logits[row : row + 1], sampling_rows(1, **alone))
            assert out.token_ids[0] == packed.token_ids[row]


def drawn_by_definition(
    scaled: torch.Tensor, keep: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """argmax over all kept tokens, every token's noise made: the page's words."""
    groups = torch.arange(-(-scaled.shape[1] // 4))
    winners = []
    for row in range(len(scaled)):
        key, at = seed[row].expand(groups.shape), position[row].expand(groups.shape)
        words = token_words(key, at, groups)
        score = scaled[row] + gumbel_noise(words).flatten()[: scaled.shape[1]]
        score[~keep[row]] = -torch.inf
        winners.append(int((score == score.max()).nonzero()[0]))
    return torch.tensor(winners)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 30.0, 1e6, 3e8])
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e9])
def test_the_draw_equals_the_argmax_over_all_noise(dtype: str, scale: float, shift: float) -> None:
    """Tokens left out because their word cannot win never could, at any size of logits."""
    scaled = numbers(9, 60, 1001, dtype=dtype) * scale + shift
    keep = numbers(10, 60, 1001) > torch.linspace(-5, 2, 60).unsqueeze(1)
    keep[:, 77] = True
    seed, position = torch.arange(60), torch.arange(60) * 3
    want = drawn_by_definition(scaled, keep, seed, position)
    assert torch.equal(draw.draw(scaled, keep, seed, position), want)


def test_tied_scores_go_to_the_lowest_id() -> None:
    """At 1e9 the noise is lost to rounding, so equal logits tie."""
    scaled = torch.full((50, 333), 1e9)
    scaled[:, :7] = 0.0
    rows = sampling_rows(50, position=list(range(50)))
    assert sampler()(scaled, rows).token_ids.tolist() == [7] * 50


def test_contenders_are_few_and_the_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, keep = numbers(9, 8, 40_000) * 3, torch.ones(8, 40_000, dtype=torch.bool)
    seed, position = torch.arange(8), torch.arange(8)
    want = draw.draw(scaled, keep, seed, position)
    floor = draw.leading_score(scaled, seed, position)
    found = sum(len(row) for row, _, _ in draw.contenders(scaled, seed, position, floor))
    assert 8 <= found < 8 * 4000
    monkeypatch.setattr(draw, "GROUPS_AT_ONCE", 37)
    assert torch.equal(draw.draw(scaled, keep, seed, position), want)


def test_the_noise_bound_holds_for_every_kind_of_word() -> None:
    words = torch.cat([torch.arange(0, 2**32, 99_991), 2 ** torch.arange(32), torch.arange(999)])
    bound_of_noise = -torch.log(uniform_variates(words).double())
    assert (gumbel_noise(words).double() <= bound_of_noise + 2.0**-12).all()


def test_draws_differ_by_position_and_by_seed_and_repeat_exactly() -> None:
    logits = torch.zeros(200, 1000)
    by_position = sampler()(logits, sampling_rows(200, position=list(range(200)))).token_ids
    by_seed = sampler()(logits, sampling_rows(200, seed=list(range(200)))).token_ids
    again = sampler()(logits, sampling_rows(200, position=list(range(200)))).token_ids
    assert torch.equal(by_position, again)
    assert len(set(by_position.tolist())) > 150
    assert len(set(by_seed.tolist())) > 150


CHI_SQUARE_CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize(
    ("case", "keyed_by"),
    [({}, "seed"), *((case, "position") for case in CHI_SQUARE_CASES)],
    ids=str,
)
def test_a_hundred_thousand_draws_follow_the_distribution(
    case: dict[str, Any], keyed_by: str
) -> None:
    draws, vocab = 100_000, 12
    logits = numbers(12, 1, vocab)
    columns = {**case, keyed_by: list(range(draws))}
    ids = sampler()(logits.expand(draws, -1), sampling_rows(draws, **columns)).token_ids
    temperature = float(np.float32(case.get("temperature", 1.0)))
    keep = reference.kept_tokens(
        logits[0].tolist(),
        temperature,
        case.get("top_k", 0),
        case.get("top_p", 1.0),
        case.get("min_p", 0.0),
    )
    counts = np.bincount(ids.numpy(), minlength=vocab)
    assert set(np.flatnonzero(counts)) <= set(keep)
    weights = np.exp(logits[0].double().numpy()[keep] / temperature)
    expected = weights / weights.sum() * draws
    statistic = ((counts[keep] - expected) ** 2 / expected).sum()
    freedom = len(keep) - 1
    # Wilson-Hilferty: the cube root of chi-square / freedom is nearly normal; 4.5 sigma.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("top_p", 0.0, r"top_p 0.0 of row 1 must be in \(0, 1\]"),
        ("top_p", 1.5, "top_p 1.5"),
        ("top_p", math.nan, "top_p nan"),
        ("min_p", -0.1, r"min_p -0.1\d* of row 1 must be in \[0, 1\]"),
        ("min_p", 2.0, "min_p 2.0"),
        ("min_p", math.nan, "min_p nan"),
        ("temperature", -1.0, "temperature -1.0 of row 1 must be finite and at least 0"),
        ("temperature", math.inf, "temperature inf"),
        ("top_k", -2, "top_k -2 of row 1 must be at least -1"),
        ("seed", 2**53, r"seed 9007199254740992 of row 1 must be in \[0, 2\^53\)"),
        ("position", -1, "position -1"),
    ],
)
def test_values_outside_their_range_are_refused_by_name(
    column: str, value: float, message: str
) -> None:
    default = {"top_p": 1.0, "temperature": 1.0}.get(column, 0)
    rows = sampling_rows(2, **{column: [default, value]})
    with pytest.raises(ValueError, match=message):
        sampler()(torch.zeros(2, 5), rows)


def test_float64_models_sample_in_float64() -> None:
    run = bound(sample_site("sample", dtype="float64")).run
    logits = numbers(13, 5, 40, dtype="float64")
    rows = sampling_rows(5, internal=torch.float64, position=list(range(5)), top_p=0.9)
    wide = run(logits, rows).token_ids
    narrow = sampler()(logits.float(), sampling_rows(5, position=list(range(5)), top_p=0.9))
    assert torch.equal(wide, narrow.token_ids)
    with pytest.raises(ValueError, match=r"temperature must be float64 \[5\], got float32"):
        run(logits, sampling_rows(5))
