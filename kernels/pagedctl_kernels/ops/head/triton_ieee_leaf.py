"""The Triton leaf of the head on float32 operands, or with ``head_dtype`` float32."""

from __future__ import annotations

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.triton_linear_ieee import IeeeLinear


def build(site: CallSite, machine: Machine) -> IeeeLinear:
    return IeeeLinear(site)
