"""The Triton leaf of RMSNorm."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.rms_norm import programs
from pagedctl_kernels.ops.rms_norm.triton_kernel import rms_norm_row
from pagedctl_kernels.ops.torch_checks import expect, float_fact, int_fact, operand_dtype
from pagedctl_kernels.ops.triton_rows import expect_contiguous, expect_device, row_stride


class TritonRmsNorm:
    def __init__(self, site: CallSite) -> None:
        self.width = int_fact(site, "width")
        self.eps = float_fact(site, "eps")
        self.dtype = operand_dtype(site, "x")
        self.cast_before = site.facts["norm_cast"] == "before"
        self.block = programs.block(self.width)
        self.warps = programs.warps(self.width)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x D[T, H], weight D[H], residual D[T, H] or None -> (y D[T, H], h D[T, H]).

        h = D(fl(x + residual)), or x itself. Rows of x and residual may lie at any distance.
        """
        self._check(x, weight, residual)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        stream = x if residual is None else torch.empty_like(y)
        if len(x):
            rms_norm_row[(len(x),)](
                x,
                x if residual is None else residual,
                weight,
                y,
                stream,
                self.eps,
                row_stride("rms_norm: x", x),
                0 if residual is None else row_stride("rms_norm: residual", residual),
                WIDTH=self.width,
                BLOCK=self.block,
                HAS_RESIDUAL=residual is not None,
                CAST_BEFORE=self.cast_before,
                num_warps=self.warps,
                enable_fp_fusion=False,
            )
        return y, stream

    def _check(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
        expect("rms_norm: x", x, self.dtype, ("T", self.width))
        expect("rms_norm: weight", weight, self.dtype, (self.width,))
        expect_contiguous("rms_norm: weight", weight)
        expect_device("rms_norm: weight", weight, x.device)
        if residual is not None:
            expect("rms_norm: residual", residual, self.dtype, tuple(x.shape))
            expect_device("rms_norm: residual", residual, x.device)


def build(site: CallSite, machine: Machine) -> TritonRmsNorm:
    return TritonRmsNorm(site)
