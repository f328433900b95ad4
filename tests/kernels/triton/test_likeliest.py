"""The likeliest tokens on the GPU: exact, by (z descending, id ascending), without a wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.ops.temperature import scale_logits
from pagedctl_kernels.sites import logprob_site
from tests.kernels.test_logprob import ranked
from tests.kernels.triton.harness import DEVICE, bind_leaf, numbers


def ids_of(logits: torch.Tensor, count: int, temperature: Any = 1.0, **site: Any) -> torch.Tensor:
    leaf = bind_leaf(logprob_site("logprob", dtype="float32", **site), "triton.logprob")
    t = torch.as_tensor(temperature, dtype=torch.float32).expand(len(logits)).contiguous()
    ids: torch.Tensor = leaf.likeliest(logits, t.to(DEVICE), count)
    return ids


def likeliest(
    logits: torch.Tensor, count: int, temperature: Any = 1.0, **site: Any
) -> list[list[int]]:
    ids: list[list[int]] = ids_of(logits, count, temperature, **site).tolist()
    return ids


@pytest.mark.parametrize("count", [1, 7, 129, 300])
def test_the_likeliest_tokens_come_by_value_and_then_by_id(count: int) -> None:
    logits = (numbers(9, 6, 300) * 0.3).cpu().round(decimals=1).to(DEVICE)  # many ties
    logits[2, ::2] = -torch.inf
    logits[3] = -0.0
    logits[3, 5:9] = 0.0
    got = likeliest(logits, count)
    assert got == [ranked(row)[:count] for row in logits.cpu()]
    order = [4, 0, 5, 3, 1, 2]
    assert likeliest(logits[order], count) == [got[row] for row in order]
    assert likeliest(logits[1:2], count) == [got[1]]


def test_tokens_that_the_temperature_makes_equal_go_by_id() -> None:
    below, above = np.float32(3.0), np.nextafter(np.float32(3.0), np.float32(4))
    t = next(
        t
        for t in np.linspace(1, 3, 1000, dtype=np.float32)
        if np.float32(below / t) == np.float32(above / t)
    )
    logits = torch.tensor([[0.0, below, above]], device=DEVICE)
    assert likeliest(logits, 3, 1.0) == [[2, 1, 0]]
    assert likeliest(logits, 3, float(t)) == [[1, 2, 0]]


def test_the_likeliest_of_a_row_that_is_not_finite_leave_the_others_alone() -> None:
    logits = numbers(10, 4, 50)
    want = likeliest(logits, 5)
    logits[1, 7], logits[2] = torch.nan, torch.nan
    got = likeliest(logits, 5)
    assert (got[0], got[3]) == (want[0], want[3])
    assert got[2] == [0, 1, 2, 3, 4]
    assert 7 not in got[1]


@pytest.mark.parametrize("count", [0, 51])
def test_a_count_that_no_row_has_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count {count} is not in 1..50"):
        likeliest(numbers(11, 1, 50), count)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [151_936, 50_257, 262_144])
@pytest.mark.parametrize("count", [1, 20, 64, 1000])
def test_vocabularies_of_models(columns: int, count: int) -> None:
    logits = numbers(12, 9, columns) * 4.5
    logits[3] = logits[3].round()  # many ties
    temperature = torch.linspace(0, 1.5, 9)
    got = ids_of(logits, count, temperature)
    z = scale_logits(logits.cpu(), temperature, "divide")
    for row in (0, 3, 8):
        order = torch.sort(z[row], descending=True, stable=True).indices
        assert torch.equal(got[row].cpu(), order[:count])
    assert torch.equal(ids_of(logits[3:4], count, temperature[3:4]), got[3:4])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [5, 200])
def test_a_captured_graph_takes_new_logits(count: int) -> None:
    logits = numbers(13, 4, 151_936)
    eager = ids_of(logits, count)
    graph = torch.cuda.CUDAGraph()
    leaf = bind_leaf(logprob_site("logprob", dtype="float32"), "triton.logprob")
    t = torch.ones(4, device=DEVICE)
    with torch.cuda.graph(graph):
        captured = leaf.likeliest(logits, t, count)
    logits.copy_(logits.flip(0))
    graph.replay()
    assert torch.equal(captured, eager.flip(0))
