"""The CPU leaf of the gated activation."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect, int_fact, operand_dtype


class TorchSiluMul:
    def __init__(self, site: CallSite) -> None:
        self.width = int_fact(site, "width")
        self.dtype = operand_dtype(site, "x")
        self.internal = dtype_fact(site, "internal")
        self.rounding = dtype_fact(site, "activation_rounding")

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up D[T, 2 I], gate first -> D[T, I].

        Order, in A: exp(-g), one sum with 1, one division; the activation is rounded to
        ``activation_rounding``, then one product with up and one rounding to D.
        """
        expect("silu_mul: gate_up", gate_up, self.dtype, ("T", 2 * self.width))
        gate, up = gate_up.to(self.internal).chunk(2, dim=-1)
        activated = gate / (1 + torch.exp(-gate))
        return (activated.to(self.rounding).to(self.internal) * up).to(self.dtype)


def build(site: CallSite, machine: Machine) -> TorchSiluMul:
    return TorchSiluMul(site)
