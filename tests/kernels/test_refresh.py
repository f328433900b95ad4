"""A weight update in place: the bits of a fresh preparation, in the tensors that were there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import CallSite, Requirement
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import PreparedLinear
from pagedctl_kernels.ops.row_blocks import has_packed_products, packed_weight, repack
from pagedctl_kernels.registry import NoLeafError
from pagedctl_kernels.sites import gemm_site, head_site
from tests.kernels.harness import DTYPES, assert_same_bits, bits, bound, numbers


def site_of(op: str, k: int, n: int, dtype: str, bias: bool) -> CallSite:
    if op == "head":
        return head_site("head", k=k, n=n, dtype=dtype)
    return gemm_site("proj", k=k, n=n, dtype=dtype, bias=bias)


def takes(leaf: str, op: str, dtype: str, bias: bool) -> bool:
    """Whether the leaf declares these; what it is fit for, it says when it is built."""
    if bias and op == "head":
        return False
    machine = Machine(kind="cpu", isa="AVX512", library="any", threads=1)
    site = site_of(op, 96, 48, dtype, bias)
    ranked = house_registry().explain(site, machine, Requirement(names=(leaf,)))
    return not ranked[0].refusals


CASES = [
    pytest.param(op, leaf.removeprefix(f"torch.{op}_"), dtype, bias, id=f"{leaf}-{dtype}-{bias}")
    for op in ("gemm", "head")
    for leaf in [one.name for one in house_registry().leaves(op)]
    for dtype in DTYPES
    for bias in (False, True)
    if takes(leaf, op, dtype, bias)
]
"""Every leaf of gemm and head, in every dtype and with every bias that it takes."""

SHAPES = [(96, 48), (33, 70), (128, 736)]
ROWS = (1, 2, 7, 16, 33, 130)


def leaf_of(op: str, leaf: str, k: int, n: int, dtype: str, bias: bool) -> Any:
    try:
        return bound(site_of(op, k, n, dtype, bias), f"torch.{op}_{leaf}").run
    except NoLeafError as refused:
        pytest.skip(str(refused).splitlines()[-1])


def weight_of(seed: int, n: int, k: int, dtype: str) -> torch.Tensor:
    """Gaussian, with rows of subnormals, of negative zeros and of large numbers."""
    weight = numbers(seed, n, k, dtype=dtype)
    tiny = torch.finfo(weight.dtype).tiny
    weight[seed % 3 :: 5] *= tiny
    weight[(seed + 1) % 3 :: 7] = -0.0
    weight[(seed + 2) % 3 :: 11] *= 2**6
    return weight


def dense(prepared: PreparedLinear) -> torch.Tensor:
    weight = prepared.weight
    return weight.to_dense() if weight.is_mkldnn else weight


def addresses(prepared: PreparedLinear) -> list[int]:
    """Identity of every tensor, and the memory of those that show it."""
    tensors = [one for one in (prepared.weight, prepared.bias) if one is not None]
    shown = [one.data_ptr() for one in tensors if not one.is_mkldnn]
    return [*map(id, tensors), *shown]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize(("op", "leaf", "dtype", "bias"), CASES)
def test_a_refreshed_weight_has_the_bits_of_a_fresh_one_in_the_same_tensors(
    op: str, leaf: str, dtype: str, bias: bool, k: int, n: int
) -> None:
    run = leaf_of(op, leaf, k, n, dtype, bias)
    old, new = weight_of(1, n, k, dtype), weight_of(2, n, k, dtype)
    biases = [numbers(seed, n, dtype=dtype) if bias else None for seed in (3, 4)]
    prepared, fresh = run.prepare(old, biases[0]), run.prepare(new.clone(), biases[1])
    before, old_bits = addresses(prepared), bits(dense(prepared)).clone()
    kept = new.clone()
    run.refresh(prepared, new, biases[1])
    assert addresses(prepared) == before
    assert_same_bits(dense(prepared), dense(fresh))
    assert not torch.equal(bits(dense(prepared)), old_bits)
    for rows in ROWS:
        x = numbers(rows, rows, k, dtype=dtype)
        assert_same_bits(run(x, prepared), run(x, fresh), f"{rows} rows")
    assert_same_bits(new, kept, "the given weight")


@pytest.mark.parametrize(("op", "leaf", "dtype", "bias"), CASES)
def test_a_refreshed_weight_does_not_follow_the_tensor_it_came_from(
    op: str, leaf: str, dtype: str, bias: bool
) -> None:
    """A trainer goes on writing into its own tensors."""
    run = leaf_of(op, leaf, 96, 48, dtype, bias)
    first = numbers(3, 48, dtype=dtype) if bias else None
    prepared = run.prepare(numbers(1, 48, 96, dtype=dtype), first)
    given, given_bias = numbers(2, 48, 96, dtype=dtype), None if first is None else first.clone()
    run.refresh(prepared, given, given_bias)
    x = numbers(5, 9, 96, dtype=dtype)
    want = run(x, prepared)
    given.fill_(torch.nan)
    if given_bias is not None:
        given_bias.fill_(torch.nan)
    assert_same_bits(run(x, prepared), want)


def test_a_weight_that_is_the_checkpoints_own_memory_stays_so() -> None:
    run = leaf_of("head", "row_blocks", 32, 64, "float32", False)
    embedding = numbers(1, 70, 32)
    prepared = run.prepare(embedding[:64], None)
    assert prepared.weight.data_ptr() == embedding.data_ptr()
    embedding.copy_(numbers(2, 70, 32))
    run.refresh(prepared, embedding[:64], None)
    assert prepared.weight.data_ptr() == embedding.data_ptr()
    x = numbers(3, 5, 32)
    assert_same_bits(run(x, prepared), run(x, run.prepare(embedding[:64].clone(), None)))


@pytest.mark.parametrize("leaf", ["row_blocks", "packed"])
def test_a_weight_of_another_form_is_refused_before_anything_is_written(leaf: str) -> None:
    run = leaf_of("gemm", leaf, 32, 48, "float32", True)
    weight, bias, x = numbers(1, 48, 32), numbers(2, 48), numbers(3, 5, 32)
    prepared = run.prepare(weight.clone(), bias.clone())
    want = run(x, prepared)
    for wrong, match in [
        ((numbers(4, 32, 48), bias), r"weight must be float32 \[48, 32\]"),
        ((weight.double(), bias), "weight must be float32"),
        ((numbers(4, 48, 32), None), "declares a bias"),
        ((numbers(4, 48, 32), numbers(5, 47)), r"bias must be float32 \[48\]"),
    ]:
        with pytest.raises(ValueError, match=match):
            run.refresh(prepared, *wrong)
    assert_same_bits(run(x, prepared), want)
    other = leaf_of("gemm", leaf, 32, 64, "float32", True)
    with pytest.raises(ValueError, match=r"prepared for \[48, 32\], this call site is \[64, 32\]"):
        other.refresh(prepared, numbers(4, 64, 32), numbers(5, 64))


@pytest.mark.skipif(
    not has_packed_products(torch.float32), reason="this build of torch has no packed products"
)
def test_a_packed_weight_is_given_memory_and_not_copied_into() -> None:
    """A copy between packed tensors may flush bfloat16 subnormals; new memory cannot."""
    for dtype in ("float32", "bfloat16"):
        weight = weight_of(1, 48, 32, dtype)
        assert ((weight != 0) & (weight.abs() < torch.finfo(weight.dtype).tiny)).any()
        packed = packed_weight(numbers(2, 48, 32, dtype=dtype))
        repack(packed, weight)
        assert_same_bits(packed.to_dense(), weight)


def test_a_leaf_that_repacks_without_its_padding_is_seen() -> None:
    run = leaf_of("gemm", "packed", 33, 70, "float16", False)
    prepared = run.prepare(numbers(1, 70, 33, dtype="float16"), None)
    reached: list[torch.Tensor] = []

    def forgets_the_padding(held: torch.Tensor, weight: torch.Tensor) -> None:
        reached.append(weight)
        repack(held, weight.float())

    run.store = forgets_the_padding
    run.refresh(prepared, numbers(2, 70, 33, dtype="float16"), None)
    assert len(reached) == 1
    with pytest.raises(ValueError, match=r"must be float32 \[80, 33\], got float32 \[70, 33\]"):
        run(numbers(3, 2, 33, dtype="float16"), prepared)
