"""A linear layer by cuBLAS, in whatever order it takes: for ``fast`` only."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.ops.interfaces import PreparedLinear
from pagedctl_kernels.ops.linear_site import LinearSite
from pagedctl_kernels.ops.torch_checks import dtype_fact, require_ieee
from pagedctl_kernels.plan import LeafUnfit


class CublasLinear(LinearSite):
    """The whole batch in one library call; the weight stays as the checkpoint has it.

    A bias is added by cuBLAS's own epilogue. A head's logits are the float32 sums of bfloat16 or
    float16 products. Raises LeafUnfit where float32 products would be TF32 ones, or where the
    operands would have to be widened first (``head_dtype`` float32).
    """

    def __init__(self, site: CallSite) -> None:
        super().__init__(site)
        self.compute = self.dtype
        if self.dtype == torch.float32:
            require_ieee(site)
            _require_no_tf32(site)
        if self.op == "head" and dtype_fact(site, "head_dtype") != self.dtype:
            raise LeafUnfit(f"{site.name}: cuBLAS takes no widened copy of {self.dtype} operands")

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """weight D[N, K], bias D[N] or None; neither is copied unless it is strided."""
        self.check_weight(weight, bias)
        return PreparedLinear(weight=weight.contiguous(), bias=bias, k=self.k, n=self.n)

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """x D[T, K] -> [T, N] in the library's order."""
        self.check_input(x, prepared)
        transposed = prepared.weight.t()
        if self.output != self.dtype:
            return torch.mm(x, transposed, out_dtype=self.output)
        if prepared.bias is not None:
            return torch.addmm(prepared.bias, x, transposed)
        return torch.mm(x, transposed)


def _require_no_tf32(site: CallSite) -> None:
    """The setting of CUDA's own products, which the general one does not always show."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        raise LeafUnfit(
            f'{site.name}: torch.backends.cuda.matmul.fp32_precision is "tf32", so float32 '
            'products are not IEEE ones; set it to "ieee" before plans are made'
        )
