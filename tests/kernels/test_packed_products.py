"""Products with packed weights: right against float64, and a row's bits are its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pagedctl_kernels.house import CPU_ROW_BLOCK
from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import this_machine
from pagedctl_kernels.ops import linear as linear_leaves
from pagedctl_kernels.ops import packed_check, row_blocks
from pagedctl_kernels.ops.linear import NativePackedLinear, PackedLinear
from pagedctl_kernels.ops.packed_check import check_packed
from pagedctl_kernels.ops.row_blocks import (
    PACKED_HEIGHTS,
    has_packed_products,
    packed_product,
    packed_weight,
)
from pagedctl_kernels.ops.torch_checks import has_bfloat16_products
from pagedctl_kernels.plan import LeafUnfit
from pagedctl_kernels.registry import NoLeafError
from pagedctl_kernels.sites import gemm_site, head_site
from tests.kernels.harness import assert_same_bits, bound, numbers, threads
from tests.kernels.reference import assert_close, to_numpy

pytestmark = pytest.mark.skipif(
    not has_packed_products(torch.float32), reason="this build of torch has no packed products"
)

LEAVES = {"float32": "packed", "float16": "packed", "bfloat16": "packed_bfloat16"}
DTYPES = ("float32", "bfloat16")
ROWS = (1, 2, 3, 8, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 200)


def skip_without_instructions(dtype: str) -> None:
    if dtype == "bfloat16" and not has_bfloat16_products():
        pytest.skip("this CPU has no bfloat16 product instructions")


def leaf_of(site: CallSite, leaf: str) -> Any:
    try:
        return bound(site, leaf).run
    except NoLeafError as refused:
        if "change a row's bits" in str(refused):
            pytest.skip(f"this library does not keep the bits of rows of this shape: {refused}")
        raise


def gemm(k: int, n: int, dtype: str, *, bias: bool = False) -> Any:
    skip_without_instructions(dtype)
    site = gemm_site("proj", k=k, n=n, dtype=dtype, bias=bias)
    return leaf_of(site, f"torch.gemm_{'packed' if bias else LEAVES[dtype]}")


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    n, k = weight.shape
    run = gemm(k, n, str(x.dtype).removeprefix("torch."))
    out: torch.Tensor = run(x, run.prepare(weight, None))
    return out


Block = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
honest_block: Block = row_blocks._packed_block


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Block], None]]:
    """Puts another library in oneDNN's place; verdicts on the honest one are forgotten."""

    def plant(block: Block) -> None:
        monkeypatch.setattr(row_blocks, "_packed_block", block)
        check_packed.cache_clear()

    check_packed.cache_clear()
    yield plant
    check_packed.cache_clear()


@pytest.mark.parametrize("dtype", LEAVES)
@pytest.mark.parametrize(("k", "n"), [(128, 736), (96, 48), (33, 70), (4, 5), (1536, 96)])
def test_packed_products_are_right_and_keep_a_rows_bits(k: int, n: int, dtype: str) -> None:
    """Alone, in any company and at any batch size, whole and in shards of columns."""
    x, weight = numbers(1, 261, k, dtype=dtype), numbers(2, n, k, dtype=dtype)
    whole = product(x, weight)
    assert whole.is_contiguous()
    assert_close("linear", dtype, whole, to_numpy(x) @ to_numpy(weight).T)
    for rows in ROWS:
        assert_same_bits(product(x[:rows], weight), whole[:rows], f"{rows} rows")
        assert_same_bits(product(x[-rows:], weight), whole[-rows:], f"the last {rows} rows")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    assert_same_bits(product(x[order], weight), whole[order])
    for start, end in ((0, 16), (16, n - n % 16)):
        if start < end <= n:
            shard = product(x, weight[start:end])
            assert_same_bits(shard, whole[:, start:end].contiguous())
    with threads(2):
        assert_same_bits(product(x, weight), whole)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_bias_is_added_to_the_unrounded_sum(dtype: str) -> None:
    x, weight = numbers(1, 21, 96, dtype=dtype), numbers(2, 48, 96, dtype=dtype)
    bias = numbers(3, 48, dtype=dtype)
    run = gemm(96, 48, dtype, bias=True)
    sums = packed_product(x.float(), packed_weight(weight.float()))
    want = (sums + bias.float()).to(x.dtype)
    assert_same_bits(run(x, run.prepare(weight, bias)), want)


@pytest.mark.parametrize("dtype", LEAVES)
def test_the_packed_head_keeps_its_sums_in_float32(dtype: str) -> None:
    x, weight = numbers(4, 5, 64, dtype=dtype), numbers(5, 100, 64, dtype=dtype)
    run = leaf_of(head_site("head", k=64, n=100, dtype=dtype), "torch.head_packed")
    logits = run(x, run.prepare(weight, None))
    assert logits.dtype == torch.float32
    assert_close("linear", "float32", logits, to_numpy(x) @ to_numpy(weight).T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [4, 64, 1536])
def test_batches_are_issued_at_the_selected_heights_and_at_no_other(
    monkeypatch: pytest.MonkeyPatch, k: int, dtype: str
) -> None:
    leaf, issued = gemm(k, 48, dtype), []

    def watched(x: torch.Tensor, packed: torch.Tensor, height: int) -> torch.Tensor:
        issued.append(height)
        return honest_block(x, packed, height)

    monkeypatch.setattr(row_blocks, "_packed_block", watched)
    prepared = leaf.prepare(numbers(2, 48, k, dtype=dtype), None)
    for rows in range(1, 300):
        leaf(numbers(1, rows, k, dtype=dtype), prepared)
    selected = check_packed(k, 48, dtype, torch.get_num_threads()).short_blocks
    assert set(issued) == set(selected)
    assert CPU_ROW_BLOCK in selected
    assert set(selected) <= {1, *PACKED_HEIGHTS}


def keeps_rows(leaf: Any, dtype: str) -> bool:
    """Whether rows alone, in few and in many have the bits that 16 give them."""
    x, weight = numbers(1, 140, 131, dtype=dtype), numbers(2, 48, 131, dtype=dtype)
    prepared = leaf.prepare(weight, None)
    want = torch.cat([leaf(part, prepared) for part in torch.split(x, CPU_ROW_BLOCK)])
    counts = (1, *PACKED_HEIGHTS, 140)
    return all(torch.equal(leaf(x[:rows], prepared), want[:rows]) for rows in counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [1, *PACKED_HEIGHTS])
def test_a_height_that_the_library_rounds_otherwise_is_not_issued(
    library: Callable[[Block], None], height: int, dtype: str
) -> None:
    """A planted library, on which a row keeps its bits; at the control's heights it would not."""
    control = gemm(131, 48, dtype)
    if height not in control.heights:
        pytest.skip("this library adds K in another order at this height")
    assert keeps_rows(control, dtype)
    met: list[int] = []

    def other(x: torch.Tensor, packed: torch.Tensor, issued: int) -> torch.Tensor:
        met.append(issued)
        factor = 1 + 4 * torch.finfo(x.dtype).eps * (issued == height)
        return honest_block(x, packed, issued) * factor

    library(other)
    leaf = gemm(131, 48, dtype)
    assert height in met
    met.clear()
    assert keeps_rows(leaf, dtype)
    if height == CPU_ROW_BLOCK:
        assert set(met) == set(leaf.heights) == {CPU_ROW_BLOCK}
    else:
        assert leaf.heights == tuple(one for one in control.heights if one != height)
        assert height not in met
    leaf.heights = control.heights
    assert not keeps_rows(leaf, dtype)
    assert height in met


def of_its_mates(x: torch.Tensor, packed: torch.Tensor, height: int) -> torch.Tensor:
    return honest_block(x + x.roll(1, 0) * 2**-6, packed, height)


def of_its_place(x: torch.Tensor, packed: torch.Tensor, height: int) -> torch.Tensor:
    out = honest_block(x, packed, height)
    out[: len(x) // 2] *= 1 + 4 * torch.finfo(x.dtype).eps
    return out


def moved_when(condition: Callable[[torch.Tensor, torch.Tensor, int], bool]) -> Block:
    """The honest block, its bits moved where *condition* says so."""

    def block(x: torch.Tensor, packed: torch.Tensor, height: int) -> torch.Tensor:
        moved = 4 * torch.finfo(x.dtype).eps * condition(x, packed, height)
        return honest_block(x, packed, height) * (1 + moved) + moved  # a zero moves too

    return block


BROKEN: dict[str, tuple[Block, str]] = {
    "its mates": (of_its_mates, "place"),
    "its place": (of_its_place, "place"),
    "a NaN in the block": (moved_when(lambda x, *_: bool(x.isnan().any())), "other rows' contents"),
    "rows that are missing": (moved_when(lambda x, _, height: 3 < len(x) < height), "batching"),
    "the thread count": (moved_when(lambda *_: torch.get_num_threads() == 1), "thread count"),
    "a shard of 16": (
        moved_when(lambda _, w, __: len(w) == 16),
        r"0\.\.16 taken apart",
    ),
    "half a cache line": (moved_when(lambda x, *_: x.data_ptr() % 64 == 32), "alignment"),
}
"""Libraries on which a row's bits follow something at every height."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_library_on_which_a_rows_bits_follow_its_surroundings_is_refused(
    library: Callable[[Block], None], name: str, dtype: str
) -> None:
    skip_without_instructions(dtype)
    broken, condition = BROKEN[name]
    met: list[int] = []

    def reached(x: torch.Tensor, packed: torch.Tensor, height: int) -> torch.Tensor:
        met.append(height)
        return broken(x, packed, height)

    with threads(2):
        control = check_packed(131, 96, dtype, 2)
        if control.reason is not None:
            pytest.skip(control.reason)
        library(reached)
        reason = check_packed(131, 96, dtype, 2).reason
    assert met
    assert reason is not None
    assert re.search(f"change a row's bits with .*({condition}|of sums that cancel)", reason), (
        reason
    )


def test_a_row_whose_bits_follow_its_address_is_not_taken_alone(
    library: Callable[[Block], None],
) -> None:
    control = check_packed(64, 96, "float32", 1)
    if 1 not in control.short_blocks:
        pytest.skip("this library adds K in another order for one row")
    library(moved_when(lambda x, _, height: height == 1 and x.data_ptr() % 64 == 32))
    assert check_packed(64, 96, "float32", 1).short_blocks == control.short_blocks[1:]


def test_bfloat16_sums_that_cancel_are_taken_at_the_width_of_the_call_site(
    library: Callable[[Block], None],
) -> None:
    """An order may follow the columns; no other number of the check shows it in bfloat16."""
    skip_without_instructions("bfloat16")
    control = check_packed(64, 736, "bfloat16", 1)
    if 64 not in control.short_blocks:
        pytest.skip("this library adds K in another order at 64 rows")

    def cancels(x: torch.Tensor) -> bool:
        return torch.equal(x[:, :32], x[:, 32:])

    library(moved_when(lambda x, packed, h: h == 64 and len(packed) == 736 and cancels(x)))
    assert 64 not in check_packed(64, 736, "bfloat16", 1).short_blocks


def test_sums_that_cancel_show_an_order_that_rounding_to_bfloat16_hides() -> None:
    """The same values, added in another order of K: few sums tell, all that cancel do."""
    skip_without_instructions("bfloat16")
    k = 1536
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    x, weight = numbers(1, 16, k, dtype="bfloat16"), numbers(2, 64, k, dtype="bfloat16")

    def differing(x: torch.Tensor, weight: torch.Tensor) -> float:
        one = packed_product(x, packed_weight(weight))
        other = packed_product(x[:, order].contiguous(), packed_weight(weight[:, order]))
        return float((one != other).float().mean())

    left = torch.cat([x[:, : k // 2]] * 2, dim=1)
    right = torch.cat([weight[:, : k // 2], -weight[:, : k // 2]], dim=1)
    assert differing(x, weight) < 0.05
    assert differing(left, right) > 0.8


def test_products_of_narrowed_operands_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded inputs change every product alike: only the float64 one tells."""

    def narrowed(x: torch.Tensor, packed: torch.Tensor, *heights: Any, **named: Any) -> Any:
        return packed_product(x.bfloat16().to(x.dtype), packed, *heights, **named)

    control = check_packed.__wrapped__(64, 96, "float32", 1).reason
    if control is not None:
        pytest.skip(control)
    monkeypatch.setattr(packed_check, "packed_product", narrowed)
    reason = check_packed.__wrapped__(64, 96, "float32", 1).reason
    assert reason is not None
    assert "float64 ones" in reason


@pytest.mark.parametrize(
    ("missing", "builder", "reason"),
    [
        ("has_packed_products", PackedLinear, "no packed products"),
        ("has_bfloat16_products", NativePackedLinear, "no bfloat16 product instructions"),
    ],
)
def test_packed_products_need_what_they_are_made_of(
    monkeypatch: pytest.MonkeyPatch, missing: str, builder: Any, reason: str
) -> None:
    monkeypatch.setattr(linear_leaves, missing, lambda *dtype: False)
    site = gemm_site("proj", k=128, n=48, dtype="bfloat16", bias=False)
    with pytest.raises(LeafUnfit, match=reason):
        builder(site, this_machine("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "n"), [(576, 3072), (1536, 576), (576, 960), (576, 49152)])
def test_small_model_shapes_keep_every_row_at_every_batch(
    k: int, n: int, dtype: str, count: int
) -> None:
    x, weight = numbers(21, 130, k, dtype=dtype), numbers(22, n, k, dtype=dtype)
    with threads(count):
        packed = product(x, weight)
        for rows in range(1, 130):
            assert_same_bits(product(x[:rows], weight), packed[:rows], f"{rows} rows")


@pytest.mark.parametrize("isa", ["AVX2", "SSE41"])
def test_a_cpu_without_wide_instructions_is_served(isa: str) -> None:
    """oneDNN packs bfloat16 only where they are, and raises elsewhere: the next leaf serves."""
    code = (
        "import torch\n"
        "from pagedctl_kernels.machine import this_machine\n"
        "from pagedctl_kernels.ops.linear import NativePackedLinear\n"
        "from pagedctl_kernels.ops.row_blocks import has_packed_products\n"
        "from pagedctl_kernels.plan import LeafUnfit\n"
        "from pagedctl_kernels.sites import gemm_site\n"
        "machine = this_machine('cpu')\n"
        "site = gemm_site('proj', k=128, n=48, dtype='bfloat16', bias=False)\n"
        "try: NativePackedLinear(site, machine)\n"
        "except LeafUnfit: print('unfit', has_packed_products(torch.bfloat16))\n"
        "else: print('serves')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "unfit False\n")
