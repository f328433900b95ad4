"""The CPU leaf of RMSNorm."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.root_mean_square import rms_normalise
from pagedctl_kernels.ops.torch_checks import (
    dtype_fact,
    expect,
    float_fact,
    int_fact,
    operand_dtype,
)


class TorchRmsNorm:
    def __init__(self, site: CallSite) -> None:
        self.width = int_fact(site, "width")
        self.eps = float_fact(site, "eps")
        self.norm_cast = str(site.facts["norm_cast"])
        self.dtype = operand_dtype(site, "x")
        self.internal = dtype_fact(site, "internal")

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x D[T, H], weight D[H], residual D[T, H] or None -> (y D[T, H], h D[T, H]).

        h = D(fl(x + residual)), or x itself; the norm reads h as it was rounded. The order of
        the norm is ``rms_normalise``'s.
        """
        expect("rms_norm: x", x, self.dtype, ("T", self.width))
        expect("rms_norm: weight", weight, self.dtype, (self.width,))
        stream = x
        if residual is not None:
            expect("rms_norm: residual", residual, self.dtype, tuple(x.shape))
            stream = (x.to(self.internal) + residual.to(self.internal)).to(self.dtype)
        return rms_normalise(stream, weight, eps=self.eps, norm_cast=self.norm_cast), stream


def build(site: CallSite, machine: Machine) -> TorchRmsNorm:
    return TorchRmsNorm(site)
