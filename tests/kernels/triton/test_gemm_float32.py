"""Products of float32 operands: the written chain, bit for bit, and what cuBLAS may serve."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import BATCH_INVARIANT, CallSite, Requirement
from pagedctl_kernels.ops.triton_linear_ieee import (
    FEW_ROWS,
    MANY_ROWS,
    SOME_ROWS,
    FmaTile,
    fma_tile,
    launch_ieee,
)
from pagedctl_kernels.registry import NoLeafError
from pagedctl_kernels.sites import gemm_site, head_site
from tests.kernels.triton.fma_chain import fma_chain, rounded_products
from tests.kernels.triton.harness import (
    PAYLOADS,
    assert_same_bits,
    bind_leaf,
    bits,
    hopper,
    numbers,
    payload,
    poisoned,
    relative_error,
)

EVERY_TILE = (FEW_ROWS, SOME_ROWS, MANY_ROWS)
TILES = pytest.mark.parametrize("tile", EVERY_TILE, ids=["few", "some", "many"])


def sums(x: torch.Tensor, w: torch.Tensor, tile: FmaTile) -> torch.Tensor:
    y = poisoned(x.shape[0], w.shape[0])
    launch_ieee(x, w, None, y, tile)
    return y


def head32(dtype: str) -> CallSite:
    return head_site("head", k=40, n=24, dtype=dtype, head_dtype="float32")


def test_the_written_chain_rounds_each_step_once() -> None:
    x, w = payload("wide", 1, 3, 4, 20)
    got = fma_chain(x, w)
    for i, j in [(0, 0), (1, 3), (2, 2)]:
        total = torch.tensor(0.0)
        for k in range(20):
            exact = Fraction(x[i, k].item()) * Fraction(w[j, k].item()) + Fraction(total.item())
            total = _nearest(exact)
        assert_same_bits(got[i, j].cpu(), total)


def _nearest(exact: Fraction) -> torch.Tensor:
    """The float32 number nearest to *exact*, ties to even."""
    guess = torch.tensor(float(exact), dtype=torch.float32)
    around = [
        guess.nextafter(torch.tensor(-torch.inf)),
        guess,
        guess.nextafter(torch.tensor(torch.inf)),
    ]
    best = min(abs(Fraction(one.item()) - exact) for one in around)
    nearest = [one for one in around if abs(Fraction(one.item()) - exact) == best]
    return min(nearest, key=lambda one: int(one.view(torch.int32)) % 2)


@TILES
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_product_is_right_where_no_size_fits_the_tile(tile: FmaTile, dtype: str) -> None:
    x, w = numbers(2, 19, 40, dtype=dtype), numbers(3, 37, 40, dtype=dtype)
    assert relative_error(sums(x, w, tile), x.double() @ w.double().T) < 1e-6


def test_a_float32_layer_adds_its_bias_to_the_sum() -> None:
    site = gemm_site("proj", k=40, n=24, dtype="float32", bias=True)
    leaf = bind_leaf(site, "triton.gemm_ieee")
    x, w, bias = numbers(4, 5, 40), numbers(5, 24, 40), numbers(6, 24)
    got = leaf(x, leaf.prepare(w, bias))
    assert_same_bits(got, sums(x, w, FEW_ROWS) + bias)
    assert leaf(x[:0], leaf.prepare(w, bias)).shape == (0, 24)


def test_a_wider_head_reads_the_model_s_operands() -> None:
    leaf = bind_leaf(head32("float16"), "triton.head_ieee")
    x, w = numbers(7, 5, 40, dtype="float16"), numbers(8, 24, 40, dtype="float16")
    prepared = leaf.prepare(w, None)
    assert prepared.weight.data_ptr() == w.data_ptr()
    assert_same_bits(leaf(x, prepared), sums(x.float(), w.float(), FEW_ROWS))


def test_every_tile_serves_some_row_count() -> None:
    assert tuple(dict.fromkeys(fma_tile(rows) for rows in range(1, 300))) == EVERY_TILE


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("k", [64, 100])
def test_the_kernel_has_the_bits_of_the_written_chain(kind: str, dtype: str, k: int) -> None:
    x, w = payload(kind, 9, 130, 72, k, dtype)
    chain = fma_chain(x.float(), w.float())
    if dtype == "float32" and kind != "subnormal":
        for mutant in (rounded_products(x, w), fma_chain(x, w, descending=True)):
            assert (bits(mutant) != bits(chain)).any(), "another order must show in these numbers"
    for tile in EVERY_TILE:
        for rows in (1, 17, 130):
            assert_same_bits(sums(x[:rows].contiguous(), w, tile), chain[:rows])


@pytest.mark.parametrize(
    ("dtype", "contract", "leaf"),
    [
        ("float32", False, "cublas.gemm"),
        ("float32", True, "triton.gemm_ieee"),
        ("bfloat16", False, "triton.gemm"),
        ("bfloat16", True, "triton.gemm"),
    ],
)
def test_cublas_serves_float32_alone_and_no_contract(dtype: str, contract: bool, leaf: str) -> None:
    site = gemm_site("proj", k=64, n=64, dtype=dtype, bias=False)
    needed = frozenset({BATCH_INVARIANT} if contract else ())
    chosen = house_registry().select(site, hopper(), Requirement(features=needed))
    assert chosen.leaf.name == leaf


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("op", ["gemm", "head"])
def test_cublas_is_refused_for_float32_where_products_are_tf32(op: str) -> None:
    site = gemm_site("proj", k=40, n=24, dtype="float32", bias=False)
    if op == "head":
        site = head32("float32")
    with pytest.raises(NoLeafError, match="fp32_precision"):
        bind_leaf(site, f"cublas.{op}")
    assert bind_leaf(gemm_site("proj", k=40, n=24, dtype="bfloat16", bias=False), "cublas.gemm")


def test_cublas_widens_no_operands() -> None:
    with pytest.raises(NoLeafError, match="no widened copy"):
        bind_leaf(head32("bfloat16"), "cublas.head")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cublas_gives_the_product_and_unrounded_logits(dtype: str) -> None:
    x, w = numbers(10, 33, 512, dtype=dtype), numbers(11, 96, 512, dtype=dtype)
    bias = numbers(12, 96, dtype=dtype)
    exact = x.double() @ w.double().T
    layer = bind_leaf(gemm_site("proj", k=512, n=96, dtype=dtype, bias=True), "cublas.gemm")
    got = layer(x, layer.prepare(w, bias))
    assert got.dtype == x.dtype
    assert relative_error(got, exact + bias.double()) < (1e-6 if dtype == "float32" else 4e-3)
    head = bind_leaf(head_site("head", k=512, n=96, dtype=dtype), "cublas.head")
    logits = head(x, head.prepare(w, None))
    assert logits.dtype == torch.float32
    assert relative_error(logits, exact) < 1e-6
