"""Block sums of exp on the GPU: right, of the stated tree, and each row's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedctl_kernels.house import SUMEXP_CHUNK
from pagedctl_kernels.ops.halving_tree import halving_tree_sum
from pagedctl_kernels.sites import block_sumexp_site
from tests.kernels.triton.harness import assert_same_bits, bind_leaf, numbers, poisoned


def leaf(block_size: int) -> Any:
    site = block_sumexp_site("sumexp", dtype="float32", block_size=block_size)
    return bind_leaf(site, "triton.block_sumexp")


def sums(shifted: torch.Tensor, block_size: int) -> torch.Tensor:
    out: torch.Tensor = leaf(block_size)(shifted, block_size=block_size)
    return out


def stated_sums(shifted: torch.Tensor, block_size: int, chunk: int = SUMEXP_CHUNK) -> torch.Tensor:
    """The order in torch, from the exponentials of the device (blocks of one column)."""
    exponentials = sums(shifted, 1).cpu()
    assert exponentials.shape == shifted.shape
    blocks = []
    for block in exponentials.split(block_size, dim=1):
        total, *rest = (halving_tree_sum(part.contiguous()) for part in block.split(chunk, dim=1))
        for part in rest:
            total = total + part
        blocks.append(total)
    return torch.stack(blocks, dim=1)


def shifted_rows(seed: int, rows: int, columns: int) -> torch.Tensor:
    values = numbers(seed, rows, columns) * 1.5
    return values - values.amax(dim=1, keepdim=True)


@pytest.mark.parametrize("block_size", [7, 64, 100, 32768])
def test_sums_are_those_of_float64(block_size: int) -> None:
    shifted = shifted_rows(1, 3, 333)
    got = sums(shifted, block_size).cpu()
    blocks = shifted.cpu().double().exp().split(block_size, dim=1)
    want = torch.stack([block.sum(dim=1) for block in blocks], dim=1)
    assert got.shape == want.shape
    assert torch.allclose(got.double(), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("columns", "block_size"), [(300, 7), (20_000, 32768), (20_000, 10_000), (9000, 300)]
)
def test_sums_have_the_stated_tree(columns: int, block_size: int) -> None:
    shifted = shifted_rows(2, 2, columns)
    assert_same_bits(sums(shifted, block_size).cpu(), stated_sums(shifted, block_size))


def test_another_chunk_would_be_told_apart() -> None:
    shifted = shifted_rows(3, 4, 5 * SUMEXP_CHUNK)
    got = sums(shifted, SUMEXP_CHUNK).cpu()
    assert_same_bits(got, stated_sums(shifted, SUMEXP_CHUNK))
    with pytest.raises(AssertionError, match="differs first"):
        assert_same_bits(got, stated_sums(shifted, SUMEXP_CHUNK, SUMEXP_CHUNK // 2))


def test_a_row_s_sums_are_its_own_wherever_it_lies() -> None:
    shifted = shifted_rows(4, 5, 9001)
    packed = sums(shifted, 32768)
    for row in range(5):
        assert_same_bits(sums(shifted[row : row + 1], 32768), packed[row : row + 1])
    wide = poisoned(5, 9100)
    wide[:, 3:9004] = shifted.flip(0)
    assert_same_bits(sums(wide[:, 3:9004], 32768).flip(0), packed)


def test_a_shard_on_a_block_boundary_gives_whole_blocks() -> None:
    shifted = shifted_rows(5, 3, 640)
    whole = sums(shifted, 64)
    shards = [sums(part, 64) for part in shifted.split([128, 320, 192], dim=1)]
    assert_same_bits(torch.cat(shards, dim=1), whole)
    assert_same_bits(sums(shifted[:, :600], 64)[:, :9], whole[:, :9])


def test_a_nan_stays_in_its_block() -> None:
    shifted = shifted_rows(6, 2, 300)
    shifted[0, 150] = torch.nan
    shifted[1, 64:128] = -torch.inf
    got = sums(shifted, 64)
    assert got.isnan().tolist() == [[False, False, True, False, False], [False] * 5]
    assert got[1, 1] == 0


def test_what_the_order_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size 32, this call site's order has 64"):
        leaf(64)(numbers(7, 1, 64), block_size=32)
    with pytest.raises(ValueError, match="shifted must be float32"):
        leaf(64)(numbers(7, 1, 64).double(), block_size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [151_936, 32_000, 50_257])
def test_vocabularies_of_models(columns: int) -> None:
    shifted = shifted_rows(8, 9, columns)
    got = sums(shifted, 32768)
    assert_same_bits(got.cpu(), stated_sums(shifted, 32768))
    assert_same_bits(sums(shifted[4:5], 32768), got[4:5])
    assert_same_bits(sums(shifted[:, : min(columns, 32768)], 32768), got[:, :1])
