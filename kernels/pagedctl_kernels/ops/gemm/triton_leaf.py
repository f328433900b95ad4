"""The tensor-core leaf of gemm, and with it a layer whose gated activation is fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import PreparedLinear
from pagedctl_kernels.ops.silu_mul.triton_leaf import TritonSiluMul
from pagedctl_kernels.ops.triton_gated_kernel import launch_gated
from pagedctl_kernels.ops.triton_linear import TritonLinear, fitting


class TritonGemm(TritonLinear):
    def fused_with(self, activation: object) -> GatedLinear | None:
        """This layer and *activation*, its gated activation, as one; None for another leaf's."""
        if type(self) is not TritonGemm or type(activation) is not TritonSiluMul:
            return None  # a subclass may compute something else
        if (2 * activation.width, activation.dtype) != (self.n, self.dtype):
            return None
        return GatedLinear(linear=self, activation=activation)


@dataclass(frozen=True, kw_only=True)
class GatedLinear:
    """A layer of the gate's rows, then up's, and its activation, with the bits of the two.

    One kernel where the tile table has one for the row count, two elsewhere.
    """

    linear: TritonGemm
    activation: TritonSiluMul

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """x D[T, K] -> silu(gate) * up, D[T, N / 2]; *prepared* is the layer's."""
        rows = x.shape[0]
        tile = self.linear.tiles.gated_at(rows)
        if tile is None or rows == 0:
            return self.activation(self.linear(x, prepared))
        self.linear.check_input(x, prepared)
        y = x.new_empty((rows, self.activation.width))
        rounds = self.activation.round_activation
        launch_gated(fitting(x), prepared.weight, prepared.bias, y, tile, round_activation=rounds)
        return y


def build(site: CallSite, machine: Machine) -> TritonGemm:
    """Raises TileTableError if this device class has no tile table."""
    return TritonGemm(site, machine)
