"""Top-k, top-p and min-p on the GPU: the sets of the definition, whatever the logits are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.ops.sample import (
    triton_draw,
    triton_finish,
    triton_keys,
    triton_leaf,
    triton_scan,
    triton_search,
    triton_select,
)
from tests.kernels.triton.harness import DEVICE, assert_same_bits, numbers
from tests.kernels.triton.mutants import mutated
from tests.kernels.triton.sampling import assert_as_defined, leaf, rows_of

COLUMNS = 1003 if DEVICE == "cuda" else 203
ROWS = 6 if DEVICE == "cuda" else 3
NEARLY_ONE = 1 - 2.0**-53

CASES: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": [0.95, 0.5, 0.1, 0.999, 1e-300, NEARLY_ONE]},
    "top_k": {"top_k": [1, 2, 50, COLUMNS // 2, COLUMNS - 1, COLUMNS]},
    "min_p": {"min_p": [0.5, 1.0, 0.05, 1e-3, 1e-30, 0.0]},
    "all": {
        "top_k": [5, 50, 0, COLUMNS - 9, -1, COLUMNS // 3],
        "top_p": [0.9, 1.0, 0.7, 0.99, 0.3, 0.05],
        "min_p": [0.0, 0.2, 0.1, 0.0, 1.0, 1e-4],
        "temperature": [0.7, 1.3, 1.0, 0.0, 2.0, 1.0],
    },
}


def ties(seed: int) -> torch.Tensor:
    """Every logit is one of a few values: the end of each prefix lies within a tie."""
    return (numbers(seed, ROWS, COLUMNS) * 2).round()


def zeros(seed: int) -> torch.Tensor:
    return torch.where(numbers(seed, ROWS, COLUMNS) > 0, 0.0, -0.0)


def across_zero(seed: int) -> torch.Tensor:
    """Both signs, down to subnormals: keys far apart whose masses are all but equal."""
    exponents = (numbers(seed, ROWS, COLUMNS) * 30).clamp(-130, 0)
    return torch.copysign(torch.exp2(exponents), numbers(seed + 1, ROWS, COLUMNS))


def mostly_removed(seed: int) -> torch.Tensor:
    logits = numbers(seed, ROWS, COLUMNS) * 3
    return torch.where(numbers(seed + 1, ROWS, COLUMNS) > 2, logits, -torch.inf).index_fill(
        1, torch.tensor([COLUMNS - 1], device=DEVICE), 0.5
    )


LOGITS = {
    "random": lambda: numbers(1, ROWS, COLUMNS) * 4.5,
    "flat": lambda: numbers(2, ROWS, COLUMNS) * 1e-3,
    "ties": lambda: ties(3),
    "equal": lambda: torch.full((ROWS, COLUMNS), 3.25, device=DEVICE),
    "zeros": lambda: zeros(4),
    "across zero": lambda: across_zero(5),
    "subnormal": lambda: numbers(6, ROWS, COLUMNS) * 1e-41,
    "huge": lambda: numbers(7, ROWS, COLUMNS) * 1e37,
    "one peak": lambda: numbers(8, ROWS, COLUMNS).index_fill(
        1, torch.tensor([COLUMNS // 2], device=DEVICE), 1000.0
    ),
    "mostly removed": lambda: mostly_removed(9),
}


def first_of(columns: dict[str, Any], count: int) -> dict[str, Any]:
    return {name: values[:count] for name, values in columns.items()}


PAIRS = [(kind, case) for kind in LOGITS for case in CASES]
FEW_PAIRS = [("ties", "all"), ("across zero", "top_p"), ("mostly removed", "top_k")]
"""Under the interpreter, where each operation takes a tenth of a millisecond."""


@pytest.mark.parametrize(("kind", "case"), PAIRS if DEVICE == "cuda" else FEW_PAIRS)
def test_the_kept_set_is_the_definition_s(kind: str, case: str) -> None:
    assert_as_defined(
        leaf(), LOGITS[kind](), rows_of(ROWS, **first_of(CASES[case], ROWS)), f"{kind}, {case}"
    )


def test_a_search_in_the_logits_and_one_among_candidates_end_alike() -> None:
    logits = ties(3)[:3]
    rows = rows_of(3, **first_of(CASES["all"], 3))
    want = leaf(capacity=4096).truncated(logits, rows)
    for chunk, capacity in ((512, 1), (64, 7), (256, 300)):
        got = leaf(chunk=chunk, capacity=capacity).truncated(logits, rows)
        assert_same_bits(got, want, f"chunks of {chunk}, {capacity} candidates")


def test_a_row_s_kept_set_is_its_own() -> None:
    logits = torch.cat([numbers(1, 2, COLUMNS) * 4.5, ties(3)[:2]])
    columns = first_of(CASES["all"], 4)
    packed = leaf().truncated(logits, rows_of(len(logits), **columns))
    for row in (0, 2):
        alone = {name: values[row] for name, values in columns.items()}
        got = leaf().truncated(logits[row : row + 1], rows_of(1, **alone))
        assert_same_bits(got[0], packed[row])


MODULES = [
    triton_keys,
    triton_draw,
    triton_scan,
    triton_select,
    triton_search,
    triton_finish,
]
MUTANTS = {
    "top-k ends one key too low": ("return key, k - from_high", "return key - 1, k - from_high"),
    "top-p ends one key too high": (
        "return key, (target - above",
        "return key + 1, (target - above",
    ),
    "the last tie is left out": ("enough = reached >= needed", "enough = reached >= needed - 1"),
    "the mass is cut off": (
        "whole = (mass + _INTEGERS_FROM) - _INTEGERS_FROM",
        "whole = tl.floor(mass)",
    ),
    "the mass has 24 bits": (
        "above = tl.where(enough, above, mass)",
        "above = tl.where(enough, above, mass >> 17 << 17)",
    ),
    "the target is rounded down": ("tl.ceil(p * total", "tl.floor(p * total"),
    "the last of the k weighs nothing": (
        "total += needed * integer_mass",
        "total += 0 * integer_mass",
    ),
    "zeros differ by sign": ("tl.where(z == 0.0, 0.0, z)", "z"),
}


def with_mass(units: int) -> float:
    """A z whose mass below 0 is nearly *units*, and rounds to it."""
    return next(z for z in np.arange(-26, -24, 2**-12) if -0.3 < math.exp(z) * 2**40 - units < -0.2)


def hair() -> tuple[torch.Tensor, list[float]]:
    """A row whose tail has a few units of mass a token, and p a hair below and above 119 tokens."""
    row = torch.full((1, COLUMNS), float(with_mass(7)), device=DEVICE)
    row[0, :99] = float(with_mass(11))
    row[0, 150] = 0.0
    whole = 2**40 + 99 * 11
    total = whole + (COLUMNS - 100) * 7
    return row, [(whole + 20 * 7 + part) / total for part in (-0.4, 0.4)]


def assert_ends_are_as_defined() -> None:
    row, shares = hair()
    logits = torch.cat([ties(3)[:1], row, row, zeros(4)[:1]])
    rows = rows_of(4, top_k=[5, 0, 0, 30], top_p=[0.9, *shares, 0.5])
    kept = assert_as_defined(leaf(), logits, rows)
    assert kept.sum(dim=-1).tolist()[1:] == [120, 121, 15]


def test_ends_are_as_defined() -> None:
    assert_ends_are_as_defined()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_truncation_is_reached_and_caught(tmp_path: Path, name: str) -> None:
    with (
        mutated(tmp_path, triton_leaf, MODULES, *MUTANTS[name]) as kernels,
        pytest.raises(AssertionError, match="kept set"),
    ):
        assert_ends_are_as_defined()
    assert any(kernel.launches for kernel in kernels)


def test_a_row_with_fewer_tokens_than_k_keeps_the_few_at_hand() -> None:
    """Its candidates are all of its tokens, so that nobody walks the row for them."""
    logits = torch.full((2, COLUMNS), -torch.inf, device=DEVICE)
    logits[:, 3:14] = numbers(31, 2, 11)
    for columns in ({"top_k": 50}, {"top_k": 50, "top_p": 0.9}):
        rows = rows_of(2, **columns)
        run = leaf(capacity=64)
        assert_as_defined(run, logits, rows)
        assert run._candidates(logits, rows, draw=True).taken.tolist() == [11, 11]
