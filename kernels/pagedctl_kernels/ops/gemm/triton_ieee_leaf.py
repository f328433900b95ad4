"""The Triton leaf of gemm on float32 operands."""

from __future__ import annotations

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.triton_linear_ieee import IeeeLinear


def build(site: CallSite, machine: Machine) -> IeeeLinear:
    return IeeeLinear(site)
