"""The Triton leaves of a linear layer on tensor cores; gemm and head differ in the output dtype."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import PreparedLinear
from pagedctl_kernels.ops.linear_site import LinearSite
from pagedctl_kernels.ops.tile_table import MANY_ROWS_KIND, SiteTiles, Tile, tile_table
from pagedctl_kernels.ops.triton_linear_kernel import launch_small
from pagedctl_kernels.ops.triton_linear_large import launch_large

DESCRIPTOR_ALIGNMENT = 16
"""Bytes that tensor descriptors ask of an operand's address and row length."""


class TritonLinearSite(LinearSite):
    """What the Triton leaves share: the weight stays as the checkpoint has it, [n, k] in D."""

    def __init__(self, site: CallSite) -> None:
        super().__init__(site)
        self.compute = self.dtype

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """weight D[N, K], bias D[N] or None; copied only where the memory does not fit."""
        self.check_weight(weight, bias)
        return PreparedLinear(
            weight=fitting(weight),
            bias=None if bias is None else bias.contiguous(),
            k=self.k,
            n=self.n,
        )

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """x D[T, K] -> [T, N]: one chain over K, then the bias, then one rounding."""
        self.check_input(x, prepared)
        y = x.new_empty((x.shape[0], self.n), dtype=self.output)
        if x.shape[0]:
            self.product(fitting(x), prepared.weight, prepared.bias, y)
        return y

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
    ) -> None:
        """Fill y [T, N]; T is at least one and all operands are contiguous."""
        raise NotImplementedError


class TritonLinear(TritonLinearSite):
    """bfloat16 or float16 products on tensor cores; the tile follows the row count's bucket.

    ``tiles`` is looked up when the leaf is built. Every tile gives a row the same bits.
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        super().__init__(site)
        self.tiles: SiteTiles = tile_table(machine.device_class).site(
            k=self.k,
            n=self.n,
            descriptors=self.k * self.dtype.itemsize % DESCRIPTOR_ALIGNMENT == 0,
            stores=self.n * self.output.itemsize % DESCRIPTOR_ALIGNMENT == 0,
        )

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
    ) -> None:
        launch(x, weight, bias, y, self.tiles.at(x.shape[0]))


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """y [M, N] = x [M, K] times weight [N, K] transposed (+ bias [N]), by the kernel of *tile*."""
    if tile.kind == MANY_ROWS_KIND:
        launch_large(x, weight, bias, y, tile)
    else:
        launch_small(x, weight, bias, y, tile)


def fitting(operand: torch.Tensor) -> torch.Tensor:
    """The operand itself where it is contiguous on a fitting address, else a copy."""
    held = operand.contiguous()
    return held.clone() if held.data_ptr() % DESCRIPTOR_ALIGNMENT else held
