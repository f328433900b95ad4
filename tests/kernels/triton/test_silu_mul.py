"""The gated activation's kernel: near float64, its rounding points exact, rows independent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedctl_kernels.ops.silu_mul import triton_leaf
from pagedctl_kernels.sites import silu_mul_site
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

WIDTHS = (1, 40, 1100)


def kernel_leaf(width: int, dtype: str, rounding: str = "model") -> Any:
    site = silu_mul_site("act", width=width, dtype=dtype, activation_rounding=rounding)
    return bind_leaf(site, "triton.silu_mul")


@pytest.mark.parametrize("rounding", ["model", "float32"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_the_formula_in_float64(dtype: str, width: int, rounding: str) -> None:
    gate_up = numbers(1, 3, 2 * width, dtype=dtype) * 4
    got = kernel_leaf(width, dtype, rounding)(gate_up)
    gate, up = to_numpy(gate_up.cpu())[:, :width], to_numpy(gate_up.cpu())[:, width:]
    assert_close("silu_mul", dtype, got.cpu(), reference.silu_mul(gate, up))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_near_the_formula_at_model_widths(dtype: str) -> None:
    for width in (3072, 12288, 14336):
        test_near_the_formula_in_float64(dtype, width, "model")


def products_are_exact(dtype: str, rounding: str) -> bool:
    """Whether y is one product, rounded once, with the activation as the contract rounds it.

    The activation is what the leaf itself gives where up is 1: in float32 it is not rounded
    again, so a float32 leaf on the same (widened) gates shows the value before any rounding.
    """
    width = 1100
    gate_up = numbers(2, 2, 2 * width, dtype=dtype) * 3
    gate, up = gate_up[:, :width].float(), gate_up[:, width:].float()
    activated = kernel_leaf(width, "float32")(torch.cat([gate, torch.ones_like(up)], dim=1))
    if rounding == "model":
        activated = activated.to(gate_up.dtype).float()
    got = kernel_leaf(width, dtype, rounding)(gate_up)
    return bool(torch.equal(bits(got), bits((activated * up).to(gate_up.dtype))))


@pytest.mark.parametrize("rounding", ["model", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_points_are_those_of_the_contract(dtype: str, rounding: str) -> None:
    assert products_are_exact(dtype, rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_activation_at_its_ends(dtype: str) -> None:
    gates = torch.tensor([0.0, -0.0, 200.0, -200.0, torch.inf, -torch.inf, torch.nan])
    gate_up = torch.cat([gates, torch.ones(7)]).to(numbers(0, 1, dtype=dtype)).unsqueeze(0)
    y = kernel_leaf(7, dtype)(gate_up)[0].cpu().float()
    assert y[:5].tolist() == [0.0, 0.0, 200.0, 0.0, torch.inf]
    assert torch.signbit(y[:5]).tolist() == [False, True, False, True, False]
    assert y[5:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_place(dtype: str) -> None:
    width = 1100
    gate_up = numbers(4, 4, 2 * width, dtype=dtype)
    leaf = kernel_leaf(width, dtype)
    y = leaf(gate_up)
    order = torch.tensor([2, 0, 3, 1], device=DEVICE)
    assert_same_bits(leaf(gate_up[order]), y[order], "permuted")
    assert_same_bits(leaf(gate_up[1:2]), y[1:2], "alone")
    gapped = torch.empty(4, 2 * width + 5, dtype=gate_up.dtype, device=DEVICE)
    gapped[:, 3 : 2 * width + 3] = gate_up
    assert_same_bits(leaf(gapped[:, 3 : 2 * width + 3]), y, "rows at odd addresses")


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    width = 12288
    rows = 2**31 // (2 * width) + 3
    leaf = kernel_leaf(width, "bfloat16")
    gate_up = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-3:] = numbers(5, 3, 2 * width, dtype="bfloat16")
    y = leaf(gate_up)
    assert_same_bits(y[-3:], leaf(gate_up[-3:].clone()))
    assert not y[:-3].any()


def test_no_rows_is_no_launch() -> None:
    assert kernel_leaf(8, "float32")(numbers(1, 0, 16)).shape == (0, 8)


def test_operands_are_checked() -> None:
    leaf = kernel_leaf(8, "float32")
    with pytest.raises(ValueError, match=r"gate_up must be float32 \[T, 16\]"):
        leaf(numbers(1, 2, 8))
    with pytest.raises(ValueError, match="gate_up must have rows without gaps"):
        leaf(numbers(1, 16, 2).t())


MUTANTS = {
    "the activation is never rounded": ("if ROUND_ACTIVATION:", "if False:"),
    "up is read for gate": ("line + WIDTH + columns", "line + columns"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_is_caught(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop = Workshop(triton_leaf, "silu_mul_stretch", tmp_path, monkeypatch)
    assert products_are_exact("float16", "model")
    launches = workshop.change(*MUTANTS[what])
    assert not products_are_exact("float16", "model")
    assert launches.count == 2
