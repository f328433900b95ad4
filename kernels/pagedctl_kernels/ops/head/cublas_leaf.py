"""The cuBLAS leaf of the head."""

from __future__ import annotations

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.cublas_linear import CublasLinear


def build(site: CallSite, machine: Machine) -> CublasLinear:
    """Raises LeafUnfit also where ``head_dtype`` asks for wider products than D."""
    return CublasLinear(site)
