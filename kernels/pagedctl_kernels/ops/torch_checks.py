"""Dtype names to torch dtypes, and the check that every op makes of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pagedctl_kernels.leaf import CallSite

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }
)


def operand_dtype(site: CallSite, operand: str) -> torch.dtype:
    """The torch dtype of *operand* at *site*."""
    return TORCH_DTYPES[site.dtypes[operand]]


def dtype_fact(site: CallSite, fact: str) -> torch.dtype:
    """The torch dtype that a fact of *site* names (``internal``, ``softmax_p_dtype``, ...)."""
    return TORCH_DTYPES[str(site.facts[fact])]


def int_fact(site: CallSite, fact: str) -> int:
    value = site.facts[fact]
    if not isinstance(value, int):
        raise ValueError(f"{site.op} at {site.name}: fact {fact} is {value!r}, not an integer")
    return value


def float_fact(site: CallSite, fact: str) -> float:
    value = site.facts[fact]
    if not isinstance(value, int | float):
        raise ValueError(f"{site.op} at {site.name}: fact {fact} is {value!r}, not a number")
    return float(value)


def expect(
    what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | str, ...]
) -> None:
    """Raise ValueError unless *tensor* has *dtype* and *shape*; a name is a free dimension."""
    if tensor.dtype == dtype and tensor.dim() == len(shape) and _fits(tensor, shape):
        return
    wanted = ", ".join(map(str, shape))
    have = ", ".join(map(str, tensor.shape))
    raise ValueError(
        f"{what} must be {_short(dtype)} [{wanted}], got {_short(tensor.dtype)} [{have}]"
    )


def _fits(tensor: torch.Tensor, shape: tuple[int | str, ...]) -> bool:
    """A loop, not all(): this runs at every call of every op."""
    for want, have in zip(shape, tensor.shape, strict=True):
        if want != have and isinstance(want, int):
            return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
