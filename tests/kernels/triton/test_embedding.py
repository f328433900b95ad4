"""The embedding kernel copies rows, and reads nothing outside the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl_kernels.ops.embedding import triton_leaf
from pagedctl_kernels.sites import embedding_site
from tests.kernels.triton.harness import DEVICE, DTYPES, assert_same_bits, bind_leaf, numbers
from tests.kernels.triton.mutants import Workshop


def kernel_leaf(vocab_size: int, width: int, dtype: str) -> Any:
    site = embedding_site("embed", vocab_size=vocab_size, width=width, dtype=dtype)
    return bind_leaf(site, "triton.embedding")


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("width", [1, 24, 1100])
@pytest.mark.parametrize("dtype", [*DTYPES, *({"bfloat16"} - set(DTYPES))])
def test_rows_are_copied(dtype: str, width: int) -> None:
    weight = numbers(1, 9, width, dtype=dtype)
    token_ids = ids(3, 8, 0, 3)
    assert_same_bits(kernel_leaf(9, width, dtype)(token_ids, weight), weight[token_ids])


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    vocab_size, width = 2**31 // 4096 + 9, 4096
    weight = torch.zeros(vocab_size, width, dtype=torch.bfloat16, device=DEVICE)
    weight[-2:] = numbers(2, 2, width, dtype="bfloat16")
    rows = torch.full((2**31 // 4096 + 5,), vocab_size - 1, device=DEVICE)
    rows[0] = vocab_size - 2
    y = kernel_leaf(vocab_size, width, "bfloat16")(rows, weight)
    assert_same_bits(y[0], weight[-2])
    assert torch.equal(y[1:], weight[-1].expand(len(rows) - 1, -1))


def unknown_ids_are_faults() -> bool:
    """Whether rows of ids outside the table are NaN and read no neighbour of the table."""
    around = torch.zeros(11, 24, device=DEVICE)
    weight = around[1:10]
    weight.copy_(numbers(3, 9, 24))
    y = kernel_leaf(9, 24, "float32")(ids(-1, 9, 2, 2**40, -(2**40)), weight)
    assert_same_bits(y[2], weight[2])
    return bool(y[ids(0, 1, 3, 4)].isnan().all())


def test_an_id_outside_the_table_is_a_fault() -> None:
    assert unknown_ids_are_faults()


def test_no_rows_is_no_launch() -> None:
    assert kernel_leaf(9, 24, "float32")(ids(), numbers(1, 9, 24)).shape == (0, 24)


def test_operands_are_checked() -> None:
    leaf = kernel_leaf(9, 24, "float32")
    with pytest.raises(ValueError, match="token_ids must be int64"):
        leaf(ids(1).int(), numbers(1, 9, 24))
    with pytest.raises(ValueError, match=r"weight must be float32 \[9, 24\]"):
        leaf(ids(1), numbers(1, 8, 24))
    with pytest.raises(ValueError, match="weight must be contiguous"):
        leaf(ids(1), numbers(1, 24, 9).t())


def test_a_mutant_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(triton_leaf, "embedding_stretch", tmp_path, monkeypatch)
    assert unknown_ids_are_faults()
    launches = workshop.change('other=float("nan")', "other=0.0")
    assert not unknown_ids_are_faults()
    assert launches.count == 1
