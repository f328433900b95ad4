"""Linear layers: right against float64, and a row's bits are its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.machine import Machine, this_machine
from pagedctl_kernels.ops import product_check, row_blocks
from pagedctl_kernels.ops.linear import RowBlocksLinear
from pagedctl_kernels.ops.product_check import check_linear, check_tile_products
from pagedctl_kernels.plan import LeafUnfit
from pagedctl_kernels.sites import gemm_site, head_site
from tests.kernels.harness import DTYPES, assert_same_bits, bound, numbers, threads
from tests.kernels.reference import assert_close, to_numpy

SHAPES = [(128, 736), (96, 48), (33, 70), (8, 5)]
LEAVES = ["row_blocks", "per_row", "library"]
CONTRACT_LEAVES = ["row_blocks", "per_row"]


def linear(k: int, n: int, dtype: str, *, leaf: str = "row_blocks", bias: bool = False) -> Any:
    return bound(gemm_site("proj", k=k, n=n, dtype=dtype, bias=bias), f"torch.gemm_{leaf}").run


def product(x: torch.Tensor, weight: torch.Tensor, leaf: str = "row_blocks") -> torch.Tensor:
    n, k = weight.shape
    run = linear(k, n, str(x.dtype).removeprefix("torch."), leaf=leaf)
    out: torch.Tensor = run(x, run.prepare(weight, None))
    return out


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_a_linear_layer_equals_the_float64_product(k: int, n: int, dtype: str, leaf: str) -> None:
    x, weight = numbers(1, 21, k, dtype=dtype), numbers(2, n, k, dtype=dtype)
    bias = numbers(3, n, dtype=dtype)
    run = linear(k, n, dtype, leaf=leaf, bias=True)
    want = to_numpy(x) @ to_numpy(weight).T + to_numpy(bias)
    y = run(x, run.prepare(weight, bias))
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert_close("linear", dtype, y, want)


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_keeps_its_sums_in_the_internal_dtype(dtype: str, leaf: str) -> None:
    x, weight = numbers(4, 5, 64, dtype=dtype), numbers(5, 100, 64, dtype=dtype)
    run = bound(head_site("head", k=64, n=100, dtype=dtype), f"torch.head_{leaf}").run
    logits = run(x, run.prepare(weight, None))
    internal = "float64" if dtype == "float64" else "float32"
    assert str(logits.dtype) == f"torch.{internal}"
    assert_close("linear", internal, logits, to_numpy(x) @ to_numpy(weight).T)


@pytest.mark.parametrize("leaf", CONTRACT_LEAVES)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("k", "n"), [(128, 736), (33, 70)])
def test_a_row_has_the_same_bits_alone_packed_and_permuted(
    k: int, n: int, dtype: str, count: int, leaf: str
) -> None:
    x, weight = numbers(6, 37, k, dtype=dtype), numbers(7, n, k, dtype=dtype)
    with threads(count):
        packed = product(x, weight, leaf)
        order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
        assert_same_bits(product(x[order], weight, leaf), packed[order], "permuted")
        for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17):
            assert_same_bits(product(x[:rows], weight, leaf), packed[:rows], f"{rows} rows")
        for row in (0, 1, 20, 36):
            assert_same_bits(
                product(x[row : row + 1], weight, leaf), packed[row : row + 1], "alone"
            )


def test_threads_one_and_two_give_the_same_bits() -> None:
    x, weight = numbers(8, 19, 576), numbers(9, 960, 576)
    with threads(1):
        one = product(x, weight)
    with threads(2):
        assert_same_bits(product(x, weight), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_projections_equal_separate_ones(dtype: str) -> None:
    x = numbers(10, 18, 96, dtype=dtype)
    parts = [numbers(seed, n, 96, dtype=dtype) for seed, n in ((11, 64), (12, 32), (13, 16))]
    fused = product(x, torch.cat(parts))
    separate = torch.cat([product(x, part) for part in parts], dim=1)
    assert_same_bits(fused, separate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_column_shards_in_multiples_of_16_equal_the_full_product(dtype: str, ranks: int) -> None:
    x, weight = numbers(14, 20, 128, dtype=dtype), numbers(15, 16 * 28, 128, dtype=dtype)
    full = product(x, weight)
    shards = [product(x, shard) for shard in weight.chunk(ranks)]
    assert_same_bits(torch.cat(shards, dim=1), full)


def test_other_rows_that_are_not_numbers_stay_in_their_rows() -> None:
    x, weight = numbers(16, 16, 64), numbers(17, 80, 64)
    clean = product(x, weight)
    x[3], x[9] = torch.nan, torch.inf
    dirty = product(x, weight)
    others = [row for row in range(16) if row not in (3, 9)]
    assert_same_bits(dirty[others], clean[others])
    assert dirty[3].isnan().all()


def test_inputs_at_odd_addresses_give_the_same_bits() -> None:
    x, weight = numbers(18, 16, 33), numbers(19, 48, 33)
    shifted = torch.cat([torch.zeros(1), x.flatten()])[1:].view(16, 33)
    crooked = torch.cat([torch.zeros(1), weight.flatten()])[1:].view(48, 33)
    for leaf in CONTRACT_LEAVES:
        assert_same_bits(product(shifted, crooked, leaf), product(x, weight, leaf), leaf)


def test_a_fitting_float32_weight_is_not_copied() -> None:
    weight = numbers(20, 64, 32)
    prepared = linear(32, 64, "float32").prepare(weight, None)
    assert prepared.weight.data_ptr() == weight.data_ptr()


def test_an_empty_batch_gives_no_rows() -> None:
    assert product(numbers(1, 0, 32), numbers(2, 48, 32)).shape == (0, 48)


def test_wrong_operands_are_refused_by_name() -> None:
    run = linear(32, 48, "float32")
    with pytest.raises(ValueError, match=r"gemm: weight must be float32 \[48, 32\], got float32"):
        run.prepare(numbers(1, 32, 48), None)
    with pytest.raises(ValueError, match="gemm: this call site declares no bias"):
        run.prepare(numbers(1, 48, 32), numbers(2, 48))
    prepared = run.prepare(numbers(1, 48, 32), None)
    with pytest.raises(ValueError, match=r"gemm: x must be float32 \[T, 32\], got bfloat16 \[2"):
        run(numbers(1, 2, 32, dtype="bfloat16"), prepared)
    with pytest.raises(ValueError, match=r"prepared for \[48, 32\], this call site is \[64, 32\]"):
        linear(32, 64, "float32")(numbers(1, 2, 32), prepared)


def test_a_leaf_refuses_to_serve_at_another_thread_count() -> None:
    machine = this_machine("cpu")
    other = Machine(
        kind="cpu", isa=machine.isa, library=machine.library, threads=machine.threads + 1
    )
    site = gemm_site("proj", k=32, n=48, dtype="float32", bias=False)
    with pytest.raises(LeafUnfit, match="set the thread count before the machine is read"):
        RowBlocksLinear(site, other)


def batch_dependent(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.mm(x, weight.t()) * (1 + 1e-6 * (x.shape[0] > 16))


def neighbour_dependent(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.mm(x + 1e-6 * x.roll(1, 0), weight.t())


def width_dependent(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    half = x.shape[1] // 2
    if weight.shape[0] > 64:
        return row_blocks.row_block_product(x, weight)
    left = row_blocks.row_block_product(x[:, :half], weight[:, :half])
    return left + row_blocks.row_block_product(x[:, half:], weight[:, half:])


def thread_dependent(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return row_blocks.row_block_product(x, weight) * (1 + 1e-6 * torch.get_num_threads())


@pytest.mark.parametrize(
    ("mutant", "condition"),
    [
        (batch_dependent, "batching"),
        (neighbour_dependent, "batching|permutation"),
        (width_dependent, "taken apart"),
        (thread_dependent, "thread count"),
    ],
)
def test_the_construction_check_refuses_a_product_that_moves_bits(
    monkeypatch: pytest.MonkeyPatch, mutant: Any, condition: str
) -> None:
    calls: list[int] = []

    def reached(*operands: Any) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = mutant(*operands)
        return out

    check = check_linear.__wrapped__
    with threads(2):
        assert check(64, 96, "float32", 2, 16).reason is None
        monkeypatch.setattr(product_check, "row_block_product", reached)
        reason = check(64, 96, "float32", 2, 16).reason
    assert calls
    assert reason is not None
    assert any(text in reason for text in condition.split("|")), reason


def test_an_unequal_short_block_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = row_blocks.row_block_product

    def mutant(x: torch.Tensor, weight: torch.Tensor, short: tuple[int, ...] = ()) -> torch.Tensor:
        return honest(x, weight, short) * (1 + 1e-6 * (short == (4,)))

    assert check_linear.__wrapped__(64, 96, "float32", 1, 16).short_blocks == (4, 8)
    monkeypatch.setattr(product_check, "row_block_product", mutant)
    assert check_linear.__wrapped__(64, 96, "float32", 1, 16).short_blocks == (8,)


def test_the_check_of_tile_products_passes_here_and_is_remembered() -> None:
    verdict = check_tile_products(32, "float32", 1)
    assert verdict.reason is None
    assert check_tile_products(32, "float32", 1) is verdict


def test_the_payloads_hold_every_kind_of_number() -> None:
    x, weight = product_check._payload(32, 64, 48, torch.float32)
    spread = np.log2(np.abs(to_numpy(x[2::4])))
    assert spread.max() - spread.min() > 40
    assert (x[3::4].abs() < torch.finfo(torch.float32).tiny).any()
    sums = x[1::4].double() @ weight[1::4].double().T
    sizes = x[1::4].double().abs() @ weight[1::4].double().abs().T
    assert (sums.abs() < 1e-5 * sizes).all()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("leaf", CONTRACT_LEAVES)
@pytest.mark.parametrize(("k", "n"), [(576, 1536), (1536, 576), (576, 960), (576, 49152)])
def test_small_model_shapes_keep_every_row_at_every_batch(
    k: int, n: int, leaf: str, count: int
) -> None:
    x, weight = numbers(21, 40, k), numbers(22, n, k)
    with threads(count):
        packed = product(x, weight, leaf)
        for rows in range(1, 41):
            assert_same_bits(product(x[:rows], weight, leaf), packed[:rows], f"{rows} rows")
