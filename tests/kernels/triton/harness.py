"""What tests of the Triton leaves share: the device, leaves bound for Hopper, and operands.

The same tests run natively on a GPU and, without one, under Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import CallSite, Requirement
from pagedctl_kernels.machine import Machine, this_machine
from pagedctl_kernels.ops.torch_checks import TORCH_DTYPES
from pagedctl_kernels.plan import plan
from tests.kernels import harness
from tests.kernels.harness import assert_same_bits, bits

__all__ = [
    "DEVICE",
    "DTYPES",
    "PAYLOADS",
    "assert_same_bits",
    "bind_leaf",
    "bits",
    "hopper",
    "numbers",
    "payload",
    "poisoned",
    "relative_error",
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

DTYPES = ("float32", "float16", "bfloat16") if DEVICE == "cuda" else ("float32", "float16")
"""bfloat16 arithmetic is silently wrong under the interpreter."""

PAYLOADS = ("random", "cancelling", "wide", "subnormal")


def hopper() -> Machine:
    """This GPU; without one, a Hopper with the installed compiler."""
    if DEVICE == "cuda":
        return this_machine("cuda")
    library = f"triton {importlib.metadata.version('triton')}"
    return Machine(kind="cuda", capability=(9, 0), library=library)


def bind_leaf(site: CallSite, name: str) -> Any:
    """The implementation that the house's leaf *name* gives at *site* on Hopper."""
    return plan(house_registry(), site, hopper(), Requirement(names=(name,))).run


def numbers(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    """Gaussian numbers on the device, exact in *dtype*: the same on every device."""
    return harness.numbers(seed, *shape, dtype=dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory on the device that holds NaN, or an integer's largest value."""
    poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(shape, poison, dtype=dtype, device=DEVICE)


def payload(
    kind: str, seed: int, rows: int, columns: int, k: int, dtype: str = "float32"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands x [rows, k] and w [columns, k] of a product, one of PAYLOADS.

    ``cancelling``: neighbours along k almost annihilate. ``wide``: exponents of x from -30 to 30,
    from -7 to 7 in float16 (products stay finite). ``subnormal``: every x is one.
    """
    x = harness.numbers(seed, rows, k, dtype="float64")
    w = harness.numbers(seed + 1, columns, k, dtype="float64")
    limits = torch.finfo(TORCH_DTYPES[dtype])
    even = k - k % 2
    if kind == "cancelling":
        x[:, 1:even:2] = -x[:, 0:even:2] * (1 + limits.eps)
        w[:, 1:even:2] = w[:, 0:even:2]
    elif kind == "wide":
        reach = 7 if dtype == "float16" else 30
        generator = torch.Generator().manual_seed(seed)
        x *= torch.exp2(torch.randint(-reach, reach + 1, x.shape, generator=generator).double())
    elif kind == "subnormal":
        x *= limits.tiny / 16
    elif kind != "random":
        raise ValueError(f"payload {kind!r} is not one of {', '.join(PAYLOADS)}")
    return x.to(TORCH_DTYPES[dtype]).to(DEVICE), w.to(TORCH_DTYPES[dtype]).to(DEVICE)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64; NaN where either holds a NaN."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())
