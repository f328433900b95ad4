"""The RMSNorm kernel: the bits of its stated order, wherever and beside whatever a row lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl_kernels.ops.rms_norm import triton_leaf
from pagedctl_kernels.sites import rms_norm_site
from tests.kernels import reference
from tests.kernels.reference import assert_close, to_numpy
from tests.kernels.triton.harness import (
    DEVICE,
    DTYPES,
    assert_same_bits,
    bind_leaf,
    bits,
    numbers,
)
from tests.kernels.triton.mutants import Workshop
from tests.kernels.triton.stated_norm import stated_norm

EPS = 1e-6
WIDTHS = (1, 7, 64, 96)
MODEL_WIDTHS = (576, 896, 1024, 2048, 2560, 4096, 5120, 8192, 12288, 32768)


def kernel_leaf(width: int, dtype: str, norm_cast: str = "before") -> Any:
    site = rms_norm_site("norm", width=width, eps=EPS, dtype=dtype, norm_cast=norm_cast)
    return bind_leaf(site, "triton.rms_norm")


def stated_result(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, norm_cast: str = "before"
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the residual stream as the order states them."""
    stream = x
    if residual is not None:
        stream = (x.cpu().float() + residual.cpu().float()).to(x.dtype).to(DEVICE)
    return stated_norm(stream, weight, EPS, norm_cast), stream


def operands(
    rows: int, width: int, dtype: str, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and residual; rows differ in scale by up to 2^10."""
    scale = torch.exp2(torch.arange(rows, device=DEVICE) % 11 - 8).unsqueeze(1)
    x = numbers(seed, rows, width, dtype=dtype)
    return (
        (x * scale).to(x.dtype),
        numbers(seed + 1, width, dtype=dtype),
        numbers(seed + 2, rows, width, dtype=dtype),
    )


def assert_stated_bits(rows: int, width: int, dtype: str, norm_cast: str = "before") -> None:
    x, weight, r = operands(rows, width, dtype)
    leaf = kernel_leaf(width, dtype, norm_cast)
    for residual in (None, r):
        y, h = leaf(x, weight, residual)
        want_y, want_h = stated_result(x, weight, residual, norm_cast)
        assert_same_bits(h, want_h, "stream")
        assert_same_bits(y, want_y, f"width {width}, residual {residual is not None}")


@pytest.mark.parametrize("norm_cast", ["before", "after"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_stated(dtype: str, width: int, norm_cast: str) -> None:
    assert_stated_bits(4, width, dtype, norm_cast)


@pytest.mark.gpu
@pytest.mark.parametrize("norm_cast", ["before", "after"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_are_those_stated_at_model_widths(dtype: str, norm_cast: str) -> None:
    for width in MODEL_WIDTHS:
        assert_stated_bits(67, width, dtype, norm_cast)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_near_the_formula_in_float64(dtype: str) -> None:
    x, weight, _ = operands(3, 80, dtype)
    y, h = kernel_leaf(80, dtype)(x, weight, None)
    want = reference.rms_norm(to_numpy(x.cpu()), to_numpy(weight.cpu()), EPS)
    assert_close("rms_norm", dtype, y.cpu(), want)
    assert h is x


def special_rows(width: int, dtype: str) -> torch.Tensor:
    """Rows of signed zeros, subnormals, the largest number and one infinity."""
    limits = torch.finfo(numbers(0, 1, dtype=dtype).dtype)
    rows = numbers(9, 4, width, dtype=dtype)
    rows[0] = torch.copysign(torch.zeros_like(rows[0]), rows[0])
    rows[1] *= limits.tiny / 8
    rows[2, 1] = limits.max
    rows[3, 1] = torch.inf
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_have_the_stated_bits(dtype: str) -> None:
    x, weight = special_rows(96, dtype), numbers(3, 96, dtype=dtype)
    y, _ = kernel_leaf(96, dtype)(x, weight, None)
    want, _ = stated_result(x, weight, None)
    assert torch.equal(y.isnan(), want.isnan())
    assert_same_bits(y.nan_to_num(nan=3.0), want.nan_to_num(nan=3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_place(dtype: str) -> None:
    width = 96 if DEVICE == "cpu" else 4096
    x, weight, residual = operands(5, width, dtype)
    leaf = kernel_leaf(width, dtype)
    y, h = leaf(x, weight, residual)
    order = torch.tensor([3, 0, 4, 1, 2], device=DEVICE)
    moved_y, moved_h = leaf(x[order], weight, residual[order])
    assert_same_bits(moved_y, y[order], "permuted")
    assert_same_bits(moved_h, h[order], "permuted")
    alone_y, _ = leaf(x[2:3], weight, residual[2:3])
    assert_same_bits(alone_y, y[2:3], "alone")
    normed_again, _ = leaf(h, weight, None)
    assert_same_bits(normed_again, y, "the sum, normed apart")
    gapped = [torch.empty(5, width + 3, dtype=x.dtype, device=DEVICE) for _ in range(2)]
    for wide, part in zip(gapped, (x, residual), strict=True):
        wide[:, 1 : width + 1] = part
    odd_y, odd_h = leaf(gapped[0][:, 1 : width + 1], weight, gapped[1][:, 1 : width + 1])
    assert_same_bits(odd_y, y, "rows at odd addresses")
    assert_same_bits(odd_h, h, "rows at odd addresses")


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    rows, width = 2**31 // 8192 + 3, 8192
    leaf = kernel_leaf(width, "bfloat16")
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
    residual = torch.zeros_like(x)
    tail, weight, tail_residual = operands(3, width, "bfloat16")
    x[-3:], residual[-3:] = tail, tail_residual
    y, h = leaf(x, weight, residual)
    want_y, want_h = leaf(tail, weight, tail_residual)
    assert_same_bits(y[-3:], want_y)
    assert_same_bits(h[-3:], want_h)
    assert not y[:-3].any()


@pytest.mark.gpu
def test_a_captured_graph_gives_the_same_bits() -> None:
    x, weight, residual = operands(17, 4096, "bfloat16")
    leaf = kernel_leaf(4096, "bfloat16")
    want, _ = leaf(x, weight, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = leaf(x, weight, residual)
    y.fill_(torch.nan)
    graph.replay()
    assert_same_bits(y, want)


def test_no_rows_is_no_launch() -> None:
    x, weight, residual = operands(0, 64, "float32")
    y, h = kernel_leaf(64, "float32")(x, weight, residual)
    assert y.shape == h.shape == (0, 64)


def test_operands_are_checked() -> None:
    x, weight, residual = operands(2, 64, "float32")
    leaf = kernel_leaf(64, "float32")
    with pytest.raises(ValueError, match=r"rms_norm: x must be float32 \[T, 64\]"):
        leaf(x[:, :32], weight, None)
    with pytest.raises(ValueError, match="rms_norm: weight must be"):
        leaf(x, weight[:3], None)
    with pytest.raises(ValueError, match="rms_norm: residual must be"):
        leaf(x, weight, residual[:1])
    with pytest.raises(ValueError, match="rms_norm: x must have rows without gaps"):
        leaf(numbers(1, 64, 64).t(), weight, None)


MUTANTS = {
    "a sum that the compiler lays out": (
        "float32",
        "grouped_tree_sum(tl.reshape(wide * wide, (1, BLOCK)), 1, BLOCK)",
        "tl.sum(tl.reshape(wide * wide, (1, BLOCK)), axis=1)",
    ),
    "the tree of the CPU": (
        "float32",
        "import grouped_tree_sum",
        "import halving_tree_sum as grouped_tree_sum",
    ),
    "the sum with the residual is not rounded": (
        "float16",
        "h = (h.to(tl.float32) + r.to(tl.float32)).to(h.dtype)",
        "h = h.to(tl.float32) + r.to(tl.float32)",
    ),
}


def has_stated_bits(dtype: str, rows: int = 24) -> bool:
    width = 96 if DEVICE == "cpu" else 4096
    x, weight, residual = operands(rows, width, dtype)
    y, _ = kernel_leaf(width, dtype, "after")(x, weight, residual)
    want, _ = stated_result(x, weight, residual, "after")
    return bool(torch.equal(bits(y), bits(want)))


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(triton_leaf, "rms_norm_row", tmp_path, monkeypatch)


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_is_caught(what: str, workshop: Workshop) -> None:
    dtype, old, new = MUTANTS[what]
    assert has_stated_bits(dtype)
    launches = workshop.change(old, new)
    assert not has_stated_bits(dtype)
    assert launches.count == 1


@pytest.mark.gpu
def test_contraction_is_caught(workshop: Workshop) -> None:
    """In a few rows only: a sum of thousands of squares hides most roundings of its parts."""
    control = workshop.launch_with(enable_fp_fusion=False)
    assert has_stated_bits("float32", rows=2000)
    contracted = workshop.launch_with(enable_fp_fusion=True)
    assert not has_stated_bits("float32", rows=2000)
    assert control.count == contracted.count == 1
