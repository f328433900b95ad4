"""What every leaf of a linear layer shares: the call site's facts and the checks of operands."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.ops.interfaces import PreparedLinear
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect, int_fact, operand_dtype


class LinearSite:
    """What they share: operand checks and the facts of the call site.

    ``compute`` and ``columns`` are the dtype and the height of the weight that a leaf prepares.
    """

    def __init__(self, site: CallSite) -> None:
        self.op = site.op
        self.k = int_fact(site, "k")
        self.n = int_fact(site, "n")
        self.bias = bool(site.facts["bias"])
        self.dtype = operand_dtype(site, "x")
        self.output = operand_dtype(site, "y")
        self.internal = dtype_fact(site, "internal")
        self.compute = self.internal
        self.columns = self.n

    def check_weight(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        expect(f"{self.op}: weight", weight, self.dtype, (self.n, self.k))
        if (bias is not None) != self.bias:
            declared = "declares a bias" if self.bias else "declares no bias"
            raise ValueError(f"{self.op}: this call site {declared}")
        if bias is not None:
            expect(f"{self.op}: bias", bias, self.dtype, (self.n,))

    def check_input(self, x: torch.Tensor, prepared: PreparedLinear) -> None:
        expect(f"{self.op}: x", x, self.dtype, ("T", self.k))
        self.check_prepared(prepared)

    def check_prepared(self, prepared: PreparedLinear) -> None:
        if (prepared.n, prepared.k) != (self.n, self.k):
            raise ValueError(
                f"{self.op}: weight was prepared for [{prepared.n}, {prepared.k}], "
                f"this call site is [{self.n}, {self.k}]"
            )
        name = f"{self.op}: the prepared weight of this leaf"
        expect(name, prepared.weight, self.compute, self.stored_shape())

    def stored_shape(self) -> tuple[int, int]:
        """The shape of this leaf's prepared weight."""
        return self.columns, self.k

    def refresh(
        self, prepared: PreparedLinear, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """weight D[N, K], bias D[N] or None, into the tensors that *prepared* holds."""
        self.check_weight(weight, bias)
        self.check_prepared(prepared)
        self.store(prepared.weight, weight)
        if prepared.bias is not None and bias is not None:
            prepared.bias.copy_(bias)

    def store(self, held: torch.Tensor, weight: torch.Tensor) -> None:
        """Columns that pad *held* stay zero; a copy onto the same memory is none."""
        held[: self.n].copy_(weight)
