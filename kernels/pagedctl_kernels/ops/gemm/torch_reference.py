"""The CPU leaves of gemm, on the shared linear layers."""

from __future__ import annotations

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.linear import (
    LibraryLinear,
    NativePackedLinear,
    PackedLinear,
    PerRowLinear,
    RowBlocksLinear,
)


def build_row_blocks(site: CallSite, machine: Machine) -> RowBlocksLinear:
    """Raises LeafUnfit if this machine's library does not keep a row's bits."""
    return RowBlocksLinear(site, machine)


def build_packed(site: CallSite, machine: Machine) -> PackedLinear:
    """Raises LeafUnfit without oneDNN, or if it does not keep a row's bits."""
    return PackedLinear(site, machine)


def build_native_packed(site: CallSite, machine: Machine) -> NativePackedLinear:
    """Raises LeafUnfit without bfloat16 instructions, or if they do not keep a row's bits."""
    return NativePackedLinear(site, machine)


def build_per_row(site: CallSite, machine: Machine) -> PerRowLinear:
    return PerRowLinear(site, machine)


def build_library(site: CallSite, machine: Machine) -> LibraryLinear:
    return LibraryLinear(site)
