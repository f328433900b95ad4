"""The cuBLAS leaf of gemm."""

from __future__ import annotations

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.cublas_linear import CublasLinear


def build(site: CallSite, machine: Machine) -> CublasLinear:
    """Raises LeafUnfit if float32 products are TF32 ones in this process."""
    return CublasLinear(site)
