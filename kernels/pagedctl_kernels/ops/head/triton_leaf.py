"""The tensor-core leaf of head, on the shared Triton linear layer."""

from __future__ import annotations

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.triton_linear import TritonLinear


def build(site: CallSite, machine: Machine) -> TritonLinear:
    """Raises TileTableError if this device class has no tile table."""
    return TritonLinear(site, machine)
