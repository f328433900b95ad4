"""Sampling on the GPU: the definition's tokens and faults, whatever shares the batch."""

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
from pagedctl_kernels.sites import sample_site
from tests.kernels import reference
from tests.kernels.harness import bound, sampling_rows
from tests.kernels.triton.harness import DEVICE, bind_leaf, numbers
from tests.kernels.triton.mutants import mutated
from tests.kernels.triton.sampling import assert_as_defined, chosen, leaf, rows_of

COLUMNS = 203
FEW_ROWS = 400 if DEVICE == "cuda" else 80
SITE = sample_site("sample", dtype="float32")
MODULES = [
    triton_keys,
    triton_draw,
    triton_scan,
    triton_select,
    triton_search,
    triton_finish,
]


def sampler() -> Any:
    return bind_leaf(SITE, "triton.sample")


def test_greedy_takes_the_first_maximum() -> None:
    logits = numbers(1, 4, COLUMNS).round()
    logits[:2, 70:90] = 9.0
    logits[2] = torch.where(numbers(2, COLUMNS) > 0, 0.0, -0.0)
    logits[3, 202] = 9.0
    assert_as_defined(leaf(), logits, rows_of(4, temperature=0.0))
    assert leaf()(logits, rows_of(4, temperature=0.0)).token_ids.tolist() == [70, 70, 0, 202]


def faulty_logits() -> torch.Tensor:
    logits = numbers(3, 8, COLUMNS)
    logits[0, 5] = torch.nan
    logits[1, COLUMNS - 1] = -torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    logits[5, ::2] = -torch.inf
    logits[6, 100] = 3e38
    return logits


@pytest.mark.parametrize(
    "case", [{"temperature": 0.0}, {}, {"top_p": 0.9, "min_p": 0.01}, {"top_k": 5}], ids=str
)
def test_faulty_rows_are_flagged_and_leave_the_others_alone(case: dict[str, Any]) -> None:
    columns = {"temperature": [1.0] * 6 + [0.5, 1.0], **case}
    assert_as_defined(leaf(), faulty_logits(), rows_of(8, **columns), str(case))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e9])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e6, 3e8])
def test_draws_are_the_definition_s_at_any_size_of_logits(scale: float, shift: float) -> None:
    logits = numbers(4, 6, COLUMNS) * scale + shift
    assert_as_defined(leaf(), logits, rows_of(6, seed=[0, 1, 2**53 - 1, 2**32, 7, 8]))


@pytest.mark.parametrize("form", ["divide", "multiply"])
def test_draws_are_the_definition_s_at_any_temperature(form: str) -> None:
    temperature = [0.7, 1.3, 1e-3, 1e3, 1e-37, 1e-40, 3e38, 1e-12]
    logits = numbers(5, 8, COLUMNS)
    logits[4:6] *= 1e-39
    rows = rows_of(8, temperature=temperature, position=[2**31 + i for i in range(8)])
    assert_as_defined(leaf(form), logits, rows, form)


MIXED: dict[str, list[Any]] = {
    "temperature": [0.0, 1.0, 0.6, 1.5, 1.0],
    "top_k": [0, 5, 50, -1, 0],
    "top_p": [1.0, 0.9, 1.0, 0.3, 1.0],
    "min_p": [0.0, 0.0, 0.05, 0.0, 0.0],
    "seed": [1, 2, 3, 4, 5],
}


def test_a_row_s_token_is_its_own() -> None:
    logits = (numbers(6, 5, COLUMNS) * 2).round(decimals=1)
    rows = rows_of(5, **MIXED)
    packed = sampler()(logits, rows).token_ids
    order = torch.tensor([3, 0, 4, 2, 1], device=DEVICE)
    assert torch.equal(sampler()(logits[order], chosen(rows, order)).token_ids, packed[order])
    for row in range(5):
        alone = sampler()(logits[row : row + 1], chosen(rows, slice(row, row + 1)))
        assert alone.token_ids[0] == packed[row]


def test_shards_of_the_vocabulary_agree_with_the_whole() -> None:
    """The largest of the shards' winners is the winner, wherever the vocabulary is cut."""
    logits, rows = numbers(7, 3, COLUMNS) * 2, rows_of(3, temperature=[0.0, 1.0, 0.7])
    run = leaf()
    want = run(logits, rows).token_ids
    for cut in (4, 100, 200):
        best = []
        for first, shard in ((0, logits[:, :cut]), (cut, logits[:, cut:])):
            scratch = run.scratch(shard)
            run.scan(shard, rows, scratch, token_offset=first)
            best.append(scratch.winners.amax(dim=-1))
        winner = torch.maximum(*best)
        assert torch.equal((winner & 0x7FFFFFFF) ^ 0x7FFFFFFF, want)


def test_rows_of_a_wider_buffer_are_read_without_a_copy() -> None:
    buffer = torch.full((3, COLUMNS + 5), torch.nan, device=DEVICE)
    buffer[:, :COLUMNS] = numbers(8, 3, COLUMNS)
    rows = rows_of(3, top_k=[0, 7, 0], temperature=[1.0, 1.0, 0.0])
    got = sampler()(buffer[:, :COLUMNS], rows)
    assert torch.equal(got.token_ids, sampler()(buffer[:, :COLUMNS].contiguous(), rows).token_ids)
    assert not got.faulty.any()


def test_operands_of_another_shape_or_dtype_are_refused_by_name() -> None:
    logits = numbers(9, 2, COLUMNS)
    with pytest.raises(ValueError, match="sample: logits must be float32"):
        sampler()(logits.double(), rows_of(2))
    with pytest.raises(ValueError, match=r"sample: temperature must be float32 \[2\]"):
        sampler()(logits, rows_of(3))
    with pytest.raises(ValueError, match="sample: logits must have rows without gaps"):
        sampler()(logits[:, ::2], rows_of(2))
    empty = sampler()(logits[:0], rows_of(0))
    assert empty.token_ids.shape == empty.faulty.shape == (0,)


def assert_draws_are_as_defined() -> None:
    logits = numbers(10, 12, COLUMNS).round()
    logits[:2] = 1e9
    logits[2, 33] = torch.nan
    rows = rows_of(12, temperature=[1.0] * 8 + [0.7] * 3 + [0.0])
    assert_as_defined(leaf(), logits, rows)
    # Among few tokens the largest noise is small, where its bound is loose.
    few = numbers(11, FEW_ROWS, 12)
    rows = rows_of(FEW_ROWS, temperature=[0.4, 1.0, 2.0, 5.0] * (FEW_ROWS // 4))
    assert_as_defined(leaf(), few, rows)


def test_draws_are_as_defined() -> None:
    assert_draws_are_as_defined()


MUTANTS = {
    "ties go to the highest id": (
        "_LOWER_IDS_FIRST = tl.constexpr(0x7FFFFFFF)",
        "_LOWER_IDS_FIRST = tl.constexpr(0)",
    ),
    "the bound is too high": ("return (score - slack) * LOG2_E - 32.0", "return score + 9.0"),
    "noise of the next group": (
        "w0, w1, w2, w3 = token_words(seed, position, (token_offset >> 2) + group)\n    word =",
        "w0, w1, w2, w3 = token_words(seed, position, (token_offset >> 2) + group + 1)\n    word =",
    ),
    "a NaN is overlooked": (
        "propagate_nan=tl.PropagateNan.ALL",
        "propagate_nan=tl.PropagateNan.NONE",
    ),
    "logits are not divided": (
        "z = scaled_row(z, operand, MULTIPLY)\n    w0",
        "z = scaled_row(z, 1.0, MULTIPLY)\n    w0",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_draw_is_reached_and_caught(tmp_path: Path, name: str) -> None:
    with (
        mutated(tmp_path, triton_leaf, MODULES, *MUTANTS[name]) as kernels,
        pytest.raises(AssertionError),
    ):
        assert_draws_are_as_defined()
    assert any(kernel.launches for kernel in kernels)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_a_hundred_thousand_draws_follow_the_distribution(case: dict[str, Any]) -> None:
    draws, vocab = 100_000, 12
    logits = numbers(12, 1, vocab)
    ids = leaf()(logits.expand(draws, -1), rows_of(draws, **case)).token_ids
    temperature = float(np.float32(case.get("temperature", 1.0)))
    row = logits[0].tolist()
    shares = (case.get("top_k", 0), case.get("top_p", 1.0), case.get("min_p", 0.0))
    keep = reference.kept_tokens(row, temperature, *shares)
    counts = np.bincount(ids.cpu().numpy(), minlength=vocab)
    assert set(np.flatnonzero(counts)) <= set(keep)
    weights = np.exp(np.array(row)[keep] / temperature)
    expected = weights / weights.sum() * draws
    statistic = ((counts[keep] - expected) ** 2 / expected).sum()
    freedom = len(keep) - 1
    # Wilson-Hilferty: the cube root of chi-square / freedom is nearly normal; 4.5 sigma.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


VOCAB = 151_936


def wide_batch(rows: int) -> tuple[torch.Tensor, Any]:
    """Gaussian logits of a model's vocabulary, every kind of row in turn."""
    logits = numbers(13, rows, VOCAB) * 4.5
    count = -(-rows // 5)
    columns = {name: (values * count)[:rows] for name, values in MIXED.items()}
    return logits, rows_of(rows, **columns)


@pytest.mark.gpu
def test_rows_of_a_model_s_vocabulary_are_as_defined() -> None:
    logits, rows = wide_batch(25)
    assert_as_defined(sampler(), logits, rows)
    flat = rows_of(25, top_p=[0.95, 0.5, 0.999, 1 - 2.0**-53, 1e-3] * 5)
    assert_as_defined(sampler(), logits * 0.01, flat)


@pytest.mark.gpu
def test_untruncated_tokens_are_the_cpu_leaf_s() -> None:
    logits, _ = wide_batch(8)
    columns = {"temperature": [0.0, 1.0, 0.6, 1.5] * 2, "position": list(range(8))}
    want = bound(SITE, "torch.sample").run(logits.cpu(), sampling_rows(8, **columns))
    got = sampler()(logits, rows_of(8, **columns))
    assert got.token_ids.tolist() == want.token_ids.tolist()


@pytest.mark.gpu
def test_a_captured_call_follows_its_operands_and_nothing_waits_for_the_device() -> None:
    logits, rows = wide_batch(10)
    run = sampler()
    want = [run(logits, rows).token_ids, run(-logits, rows).token_ids]
    side = torch.cuda.Stream()
    buffer, graph = logits.clone(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph, stream=side):
            out = run(buffer, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for sign, tokens in zip((1, -1), want, strict=True):
        buffer.copy_(logits * sign)
        graph.replay()
        assert torch.equal(out.token_ids, tokens)
