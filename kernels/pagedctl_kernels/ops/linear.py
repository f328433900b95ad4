"""The CPU implementations of a linear layer; gemm and head differ in the output dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as functional

from pagedctl_kernels.house import CPU_ROW_BLOCK
from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import PreparedLinear
from pagedctl_kernels.ops.linear_site import LinearSite
from pagedctl_kernels.ops.packed_check import check_packed
from pagedctl_kernels.ops.product_check import Verdict, check_linear
from pagedctl_kernels.ops.row_blocks import (
    aligned,
    has_packed_products,
    on_cache_line,
    packed_product,
    packed_weight,
    padded_columns,
    repack,
    row_block_product,
    row_product,
)
from pagedctl_kernels.ops.torch_checks import has_bfloat16_products, require_ieee
from pagedctl_kernels.plan import LeafUnfit


class _WidenedLinear(LinearSite):
    """Weights widened to A, columns zero-padded to the library's inner width.

    ``narrow``: products are taken in D, which the library sums in A and rounds once.
    """

    narrow = False

    def __init__(self, site: CallSite) -> None:
        super().__init__(site)
        self.compute = self.dtype if self.narrow else self.internal
        self.columns = padded_columns(self.n, str(self.compute).removeprefix("torch."))

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """weight D[N, K], bias D[N] or None; a float32 weight of a fitting width is not copied."""
        self.check_weight(weight, bias)
        return PreparedLinear(
            weight=self.widened(weight),
            bias=None if bias is None else bias.to(self.compute),
            k=self.k,
            n=self.n,
        )

    def widened(self, weight: torch.Tensor) -> torch.Tensor:
        """weight D[N, K] in the dtype and at the height of the product."""
        wide = weight.to(self.compute)
        if self.columns > self.n:
            wide = functional.pad(wide, (0, 0, 0, self.columns - self.n))
        return wide.contiguous()

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """x D[T, K] -> [T, N]: product and bias, then one rounding to the output dtype."""
        self.check_input(x, prepared)
        sums = self.product(x.to(self.compute), prepared.weight)
        if self.columns > self.n:
            sums = sums[:, : self.n].contiguous()
        if prepared.bias is not None:
            sums = sums + prepared.bias
        return sums.to(self.output)


class RowBlocksLinear(_WidenedLinear):
    """Rows in zero-padded blocks of 16, one batched product; a row's bits are its own.

    Raises LeafUnfit if this machine's library does not keep them (``product_check``).
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        super().__init__(site)
        self.short_blocks = _checked(self, site, machine, CPU_ROW_BLOCK).short_blocks

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row_block_product(x, weight, self.short_blocks)


class PackedLinear(_WidenedLinear):
    """oneDNN's products with a weight packed once; a row's bits are its own.

    ``heights``: the blocks it issues, which the check saw to give one another's bits. Raises
    LeafUnfit where torch lacks these products or they do not keep a row's bits
    (``packed_check``).
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        super().__init__(site)
        self.require_products()
        require_threads(site, machine)
        require_ieee(site)
        compute = str(self.compute).removeprefix("torch.")
        verdict = check_packed(self.k, self.columns, compute, machine.threads)
        if verdict.reason is not None:
            raise LeafUnfit(verdict.reason)
        self.heights = verdict.short_blocks

    def require_products(self) -> None:
        if not has_packed_products(self.compute):
            raise LeafUnfit("this build of torch has no packed products for this CPU")

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        """weight D[N, K], bias D[N] or None; the result's weight is opaque."""
        prepared = super().prepare(weight, bias)
        return replace(prepared, weight=packed_weight(prepared.weight))

    def store(self, held: torch.Tensor, weight: torch.Tensor) -> None:
        """The opaque tensor stays and is given the memory of a newly packed weight."""
        repack(held, self.widened(weight))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return packed_product(x, weight, self.heights)


class NativePackedLinear(PackedLinear):
    """The same in bfloat16 itself, where the CPU has instructions for it.

    They round a product's sum once, as widened ones do, and flush subnormals: an order of its
    own. There is no bias, which would have to be added to the unrounded sum.
    """

    narrow = True

    def require_products(self) -> None:
        super().require_products()
        if not has_bfloat16_products():
            raise LeafUnfit("this CPU has no bfloat16 product instructions")


class PerRowLinear(_WidenedLinear):
    """One [1, K] product a row, for a library that does not keep the bits of row blocks.

    The weight is put on a cache line when it is prepared, not at every call.
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        super().__init__(site)
        _checked(self, site, machine, 1)

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        prepared = super().prepare(weight, bias)
        return replace(prepared, weight=aligned(prepared.weight))

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not on_cache_line(weight):
            raise ValueError(f"{self.op}: the weight is not on a cache line; prepare it here")
        return row_product(x, weight)


class LibraryLinear(LinearSite):
    """The whole batch in one library call: the quickest, and a row's bits follow the batch.

    A float16 product is taken in float32: torch's own float16 one is three times slower
    (measured: 1,100 against 335 us for 16 rows of 576 x 1536 on one thread).
    """

    def __init__(self, site: CallSite) -> None:
        super().__init__(site)
        native = self.output == self.dtype and self.dtype != torch.float16
        self.compute = self.dtype if native else self.internal

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        self.check_weight(weight, bias)
        return PreparedLinear(
            weight=weight.to(self.compute),
            bias=None if bias is None else bias.to(self.compute),
            k=self.k,
            n=self.n,
        )

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """x D[T, K] -> [T, N], in the library's own order."""
        self.check_input(x, prepared)
        y = functional.linear(x.to(self.compute), prepared.weight, prepared.bias)
        return y.to(self.output)


def _checked(linear: _WidenedLinear, site: CallSite, machine: Machine, height: int) -> Verdict:
    """The construction check's verdict on this site's products; raises LeafUnfit."""
    require_threads(site, machine)
    require_ieee(site)
    internal = str(site.facts["internal"])
    verdict = check_linear(linear.k, linear.columns, internal, machine.threads, height)
    if verdict.reason is not None:
        raise LeafUnfit(verdict.reason)
    return verdict


def require_threads(site: CallSite, machine: Machine) -> None:
    """The thread count is part of a CPU order: the process must run at the machine's."""
    running = torch.get_num_threads()
    if machine.threads != running:
        raise LeafUnfit(
            f"{site.name}: the order is for {machine.threads} threads, torch runs {running}; "
            "set the thread count before the machine is read"
        )
