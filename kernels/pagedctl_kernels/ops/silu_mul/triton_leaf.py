"""The Triton leaf of the gated activation."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops import row_stretches
from pagedctl_kernels.ops.silu_mul.triton_kernel import silu_mul_stretch
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect, int_fact, operand_dtype
from pagedctl_kernels.ops.triton_rows import row_stride


class TritonSiluMul:
    def __init__(self, site: CallSite) -> None:
        self.width = int_fact(site, "width")
        self.dtype = operand_dtype(site, "x")
        self.round_activation = dtype_fact(site, "activation_rounding") != torch.float32
        self.constants = row_stretches.constants(self.width)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up D[T, 2 I], gate first -> D[T, I]. Rows of gate_up may lie at any distance."""
        expect("silu_mul: gate_up", gate_up, self.dtype, ("T", 2 * self.width))
        rows = len(gate_up)
        y = torch.empty((rows, self.width), dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            silu_mul_stretch[(rows * self.constants["STRETCHES"],)](
                gate_up,
                y,
                row_stride("silu_mul: gate_up", gate_up),
                **self.constants,
                ROUND_ACTIVATION=self.round_activation,
                num_warps=row_stretches.WARPS,
                enable_fp_fusion=False,
            )
        return y


def build(site: CallSite, machine: Machine) -> TritonSiluMul:
    return TritonSiluMul(site)
