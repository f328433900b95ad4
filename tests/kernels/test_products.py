"""Linear layers: right against float64, and a row's bits are its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import BATCH_INVARIANT, Requirement
from pagedctl_kernels.machine import Machine, this_machine
from pagedctl_kernels.ops import product_check, product_payloads, row_blocks
from pagedctl_kernels.ops.linear import RowBlocksLinear
from pagedctl_kernels.ops.product_check import check_linear, check_tile_products
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES
from pagedctl_kernels.plan import LeafUnfit
from pagedctl_kernels.plan import plan as plan_of
from pagedctl_kernels.registry import NoLeafError
from pagedctl_kernels.sites import attention_site, gemm_site, head_site
from tests.kernels.harness import DTYPES, assert_same_bits, bound, numbers, threads
from tests.kernels.reference import assert_close, to_numpy

SHAPES = [(128, 736), (96, 48), (33, 70), (4, 5)]
LEAVES = ["row_blocks", "per_row", "library"]
CONTRACT_LEAVES = ["row_blocks", "per_row"]


def linear(k: int, n: int, dtype: str, *, leaf: str = "row_blocks", bias: bool = False) -> Any:
    site = gemm_site("proj", k=k, n=n, dtype=dtype, bias=bias)
    try:
        return bound(site, f"torch.gemm_{leaf}").run
    except NoLeafError as refused:
        if leaf == "per_row" and "change a row's bits" in str(refused):
            pytest.skip("this library does not keep the bits of one-row products of this shape")
        raise


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


def test_per_row_aligns_a_weight_once_and_takes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = numbers(19, 48, 32)
    crooked = torch.cat([torch.zeros(1), weight.flatten()])[1:].view(48, 32)
    per_row, x = linear(32, 48, "float32", leaf="per_row"), numbers(18, 5, 32)
    prepared = per_row.prepare(crooked, None)
    assert prepared.weight.data_ptr() % row_blocks.CACHE_LINE_BYTES == 0
    seen: list[int] = []
    honest = torch.bmm

    def spy(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append(right.data_ptr())
        return honest(left, right)

    monkeypatch.setattr(torch, "bmm", spy)
    per_row(x, prepared)
    assert seen == [prepared.weight.data_ptr()] * 5
    with pytest.raises(ValueError, match="the weight is not on a cache line; prepare it here"):
        per_row(x, linear(32, 48, "float32").prepare(crooked, None))


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


def test_a_weight_that_another_leaf_prepared_is_refused() -> None:
    weight, x = numbers(1, 70, 32), numbers(2, 3, 32)
    blocks, library = linear(32, 70, "float32"), linear(32, 70, "float32", leaf="library")
    padded, plain = blocks.prepare(weight, None), library.prepare(weight, None)
    wanted = r"the prepared weight of this leaf must be float32 \[{}, 32\], got float32 \[{}, 32\]"
    with pytest.raises(ValueError, match=wanted.format(70, 80)):
        library(x, padded)
    with pytest.raises(ValueError, match=wanted.format(80, 70)):
        blocks(x, plain)
    narrow = linear(32, 48, "bfloat16", leaf="library").prepare(
        numbers(1, 48, 32, dtype="bfloat16"), None
    )
    with pytest.raises(ValueError, match=r"must be float32 \[48, 32\], got bfloat16 \[48, 32\]"):
        linear(32, 48, "bfloat16")(numbers(2, 3, 32, dtype="bfloat16"), narrow)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["gemm", "head"])
def test_rows_of_one_element_are_taken_one_by_one(op: str, dtype: str) -> None:
    """Row blocks of K = 1 do not keep the sign of a zero product."""
    site = (
        gemm_site("proj", k=1, n=48, dtype=dtype, bias=False)
        if op == "gemm"
        else head_site("head", k=1, n=48, dtype=dtype)
    )
    invariant = Requirement(features=frozenset({BATCH_INVARIANT}))
    plan = plan_of(house_registry(), site, this_machine("cpu"), invariant)
    assert plan.leaf.name == f"torch.{op}_per_row"
    x, weight = numbers(1, 37, 1, dtype=dtype), numbers(2, 48, 1, dtype=dtype)
    x[::3], x[1::3] = 0.0, -0.0
    packed = plan.run(x, plan.run.prepare(weight, None))
    for row in range(37):
        alone = plan.run(x[row : row + 1], plan.run.prepare(weight, None))
        assert_same_bits(alone, packed[row : row + 1])
    with pytest.raises(NoLeafError, match="k 1 is below 2"):
        bound(site, f"torch.{op}_row_blocks")


def test_a_leaf_refuses_to_serve_at_another_thread_count() -> None:
    machine = this_machine("cpu")
    other = Machine(
        kind="cpu", isa=machine.isa, library=machine.library, threads=machine.threads + 1
    )
    site = gemm_site("proj", k=32, n=48, dtype="float32", bias=False)
    with pytest.raises(LeafUnfit, match="set the thread count before the machine is read"):
        RowBlocksLinear(site, other)


@contextmanager
def lowered_precision() -> Iterator[None]:
    backend = torch.backends.mkldnn.matmul.fp32_precision
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = backend


@contextmanager
def lowered_backend_precision() -> Iterator[None]:
    backend = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = backend


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


VOIDED = [
    (
        lowered_precision,
        r'get_float32_matmul_precision\(\) is "high".*set_float32_matmul_precision\("highest"\)',
    ),
    (lowered_backend_precision, r'mkldnn.matmul.fp32_precision is "bf16".*fp32_precision = "ieee"'),
    (flushed_subnormals, r"float32 subnormals are flushed.*torch.set_flush_denormal\(False\)"),
]


@pytest.mark.parametrize(
    ("voided", "message"), VOIDED, ids=lambda one: getattr(one, "__name__", "")
)
@pytest.mark.parametrize("op", ["row_blocks", "per_row", "attention"])
def test_a_setting_that_voids_ieee_products_is_refused_by_name(
    op: str, voided: Any, message: str
) -> None:
    """The check's verdict is remembered, so the setting is read at every construction."""

    def build() -> Any:
        return attention() if op == "attention" else linear(32, 48, "float32", leaf=op)

    build()
    with voided(), pytest.raises(NoLeafError, match=message):
        build()
    build()


def attention() -> Any:
    return bound(
        attention_site(
            "attention", q_heads=2, kv_heads=1, head_dim=16, block_size=16, dtype="float32"
        )
    )


def test_flushed_float64_subnormals_are_refused_too() -> None:
    with flushed_subnormals(), pytest.raises(NoLeafError, match="float64 subnormals are flushed"):
        linear(32, 48, "float64")


def test_precision_of_another_device_is_not_the_cpu_s() -> None:
    """With TF32 on for CUDA alone torch refuses to name one precision for the process."""
    cuda = torch.backends.cuda.matmul
    before = cuda.fp32_precision
    cuda.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        linear(32, 48, "float32")
    finally:
        cuda.fp32_precision = before


Product = Callable[..., torch.Tensor]
honest_product: Product = row_blocks.row_block_product


def altered(when: Callable[[torch.Tensor, torch.Tensor], bool]) -> Product:
    """The honest product, its bits moved where *when* says so."""

    def mutant(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        return honest_product(x, weight) * (1 + 1e-6 * when(x, weight))

    return mutant


def neighbour_dependent(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.mm(x + 1e-6 * x.roll(1, 0), weight.t())


def width_dependent(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    cut = x.shape[1] // 3 + 1  # no library cuts K here, while some cut 576 in halves
    if weight.shape[0] > 64:
        return honest_product(x, weight)
    return honest_product(x[:, :cut], weight[:, :cut]) + honest_product(x[:, cut:], weight[:, cut:])


def wrong_past_row_32(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    out = honest_product(x, weight)
    out[32:] *= 1 + 1e-6
    return out


def wrong_in_the_padded_block(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    out = honest_product(x, weight)
    out[len(x) - len(x) % 16 :] *= 1 + 1e-6
    return out


def zero_s_sign_follows_the_batch(
    x: torch.Tensor, weight: torch.Tensor, *_: object
) -> torch.Tensor:
    out = honest_product(x, weight)
    return torch.where(out == 0, -0.0, out) if len(x) > 32 else out


def inputs_rounded_to(dtype: torch.dtype) -> Product:
    return lambda x, weight, *_: honest_product(
        x.to(dtype).to(x.dtype), weight.to(dtype).to(x.dtype)
    )


def tf32_inputs(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    """Thirteen mantissa bits dropped: what a TF32 product reads."""
    return honest_product(
        *((one.view(torch.int32) & -(2**13)).view(one.dtype) for one in (x, weight))
    )


BROKEN: dict[str, tuple[Product, str]] = {
    "batches of more than 16 rows": (altered(lambda x, _: len(x) > 16), "batching"),
    "batches of 48 rows and more": (altered(lambda x, _: len(x) >= 48), "batching"),
    "a batch of three whole blocks": (
        altered(lambda x, _: len(x) == 48),
        r"batching and permuting \(48 rows",
    ),
    "one row alone": (altered(lambda x, _: len(x) == 1), r"batching and permuting \(1 rows"),
    "padded batches": (altered(lambda x, _: len(x) % 16 != 0), "batching"),
    "padded block": (wrong_in_the_padded_block, "batching"),
    "rows past the 32nd": (wrong_past_row_32, "batching"),
    "a neighbour row": (neighbour_dependent, "batching and permuting"),
    "a NaN in the batch": (altered(lambda x, _: bool(x.isnan().any())), "other rows' contents"),
    "narrow weights": (width_dependent, "taken apart"),
    "shards of 16 columns": (altered(lambda _, w: len(w) == 16), r"columns 0\.\.16 taken apart"),
    "shards of 32 columns": (altered(lambda _, w: len(w) == 32), "taken apart"),
    "shards of 48 columns": (altered(lambda _, w: len(w) == 48), "taken apart"),
    "operands off by one element": (
        altered(lambda x, w: w.data_ptr() % 64 == 4 and x.data_ptr() % 64 == 4),
        "alignment",
    ),
    "a weight off by half a line": (altered(lambda _, w: w.data_ptr() % 64 == 32), "alignment"),
    "rows off by half a line": (altered(lambda x, _: x.data_ptr() % 64 == 32), "alignment"),
    "the thread count": (altered(lambda *_: torch.get_num_threads() == 1), "thread count"),
    "the sign of zero": (zero_s_sign_follows_the_batch, "batching"),
    "bfloat16 inputs": (inputs_rounded_to(torch.bfloat16), "float64 ones"),
    "TF32 inputs": (tf32_inputs, "float64 ones"),
}
"""Products that keep a row's bits, or IEEE rounding, everywhere but under one condition."""


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(("k", "n"), [(64, 96), (576, 1536)])
def test_the_construction_check_refuses_a_broken_product(
    monkeypatch: pytest.MonkeyPatch, name: str, k: int, n: int
) -> None:
    mutant, condition = BROKEN[name]
    calls: list[int] = []

    def reached(*operands: Any) -> torch.Tensor:
        calls.append(1)
        return mutant(*operands)

    check = check_linear.__wrapped__
    with threads(2):
        assert check(k, n, "float32", 2, 16).reason is None
        monkeypatch.setattr(product_check, "row_block_product", reached)
        reason = check(k, n, "float32", 2, 16).reason
    assert calls
    assert reason is not None
    assert re.search(condition, reason), reason


@pytest.mark.parametrize(("dtype", "narrow"), [("float32", "float16"), ("float64", "float32")])
@pytest.mark.parametrize("k", [2, 576, 20_000])
def test_inputs_rounded_alike_everywhere_are_refused_at_any_length(
    monkeypatch: pytest.MonkeyPatch, k: int, dtype: str, narrow: str
) -> None:
    check = check_linear.__wrapped__
    assert check(k, 96, dtype, 1, 16).reason is None
    broken = inputs_rounded_to(TORCH_DTYPES[narrow])
    monkeypatch.setattr(product_check, "row_block_product", broken)
    reason = check(k, 96, dtype, 1, 16).reason
    assert reason is not None
    assert "differ from float64 ones by more than IEEE rounding" in reason


def test_one_row_products_are_checked_like_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = row_blocks.row_product
    assert check_linear.__wrapped__(64, 96, "float32", 1, 1).reason is None
    for broken, condition in (
        (lambda x, w: honest(x, w) * (1 + 1e-6 * (len(x) > 32)), "batching"),
        (lambda x, w: honest(x, w) * (1 + 1e-6 * (len(w) == 32)), "taken apart"),
        (lambda x, w: honest(x.bfloat16().float(), w), "float64 ones"),
    ):
        monkeypatch.setattr(product_check, "row_product", broken)
        reason = check_linear.__wrapped__(64, 96, "float32", 1, 1).reason
        assert reason is not None
        assert condition in reason


def test_a_site_narrower_than_the_smallest_shard_keeps_a_wide_product_s_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused and separate projections share an order, so 16 columns are checked against more."""
    mutant = altered(lambda _, weight: len(weight) == 16)
    monkeypatch.setattr(product_check, "row_block_product", mutant)
    assert check_linear.__wrapped__(64, 16, "float32", 1, 16).reason is not None


def test_an_unequal_short_block_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = row_blocks.row_block_product

    def mutant(x: torch.Tensor, weight: torch.Tensor, short: tuple[int, ...] = ()) -> torch.Tensor:
        return honest(x, weight, short) * (1 + 1e-6 * (short == (4,)))

    assert check_linear.__wrapped__(64, 96, "float32", 1, 16).short_blocks == (4, 8)
    monkeypatch.setattr(product_check, "row_block_product", mutant)
    assert check_linear.__wrapped__(64, 96, "float32", 1, 16).short_blocks == (8,)


def test_a_short_block_is_not_used_if_its_bits_follow_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = row_blocks.row_block_product

    def mutant(x: torch.Tensor, weight: torch.Tensor, short: tuple[int, ...] = ()) -> torch.Tensor:
        moved = short == (8,) and weight.data_ptr() % 64 != 0
        return honest(x, weight, short) * (1 + 1e-6 * moved)

    monkeypatch.setattr(product_check, "row_block_product", mutant)
    assert check_linear.__wrapped__(64, 96, "float32", 1, 16).short_blocks == (4,)


@pytest.mark.parametrize(
    ("broken", "condition"),
    [
        (lambda left, right: torch.bmm(left, right) * (1 + 1e-6 * (len(left) > 16)), "batching"),
        (lambda left, right: torch.bmm(left.bfloat16().float(), right), "float64 ones"),
    ],
)
def test_the_check_of_tile_products_has_power(
    monkeypatch: pytest.MonkeyPatch, broken: Product, condition: str
) -> None:
    assert check_tile_products.__wrapped__(64, "float32", 1).reason is None
    stand_in = SimpleNamespace(**vars(torch))
    stand_in.bmm = broken
    monkeypatch.setattr(product_check, "torch", stand_in)
    reason = check_tile_products.__wrapped__(64, "float32", 1).reason
    assert reason is not None
    assert condition in reason


def test_the_check_of_tile_products_passes_here_and_is_remembered() -> None:
    verdict = check_tile_products(32, "float32", 1)
    assert verdict.reason is None
    assert check_tile_products(32, "float32", 1) is verdict


def test_the_comparison_of_bits_tells_zeros_apart_and_knows_a_nan() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        zero, nan = torch.zeros(3, dtype=dtype), torch.full((2, 2), torch.nan, dtype=dtype)
        assert_same_bits(nan, nan.clone())
        with pytest.raises(AssertionError, match=r"signs differs first at \(0,\)"):
            assert_same_bits(zero, -zero, "signs")
    assert_same_bits(torch.tensor([True, False]), torch.tensor([True, False]))
    with pytest.raises(AssertionError, match=r"differs first at \(1,\)"):
        assert_same_bits(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_the_payloads_hold_every_kind_of_number() -> None:
    x, weight = product_payloads.payload(32, 64, 48, torch.float32)
    spread = np.log2(np.abs(to_numpy(x[2::5])))
    assert spread.max() - spread.min() > 40
    assert (x[3::5].abs() < torch.finfo(torch.float32).tiny).any()
    sums = x[1::5].double() @ weight[1::5].double().T
    sizes = x[1::5].double().abs() @ weight[1::5].double().abs().T
    assert (sums.abs() < 1e-5 * sizes).all()
    for zeros in (x[4::5], weight[4::5]):
        assert (zeros == 0).all()
        assert not zeros[0].signbit().any()
        assert zeros[1].signbit().all()
        assert 0 < zeros[2].signbit().sum() < 48


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
