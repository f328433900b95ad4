"""Every linear layer of a model, one after the other: ours against cuBLAS on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pagedctl.bench.kernels.bench import Bench
from pagedctl.bench.kernels.ceilings import Ceilings
from pagedctl.bench.kernels.replay import Launch, Timing, launched, replayed
from pagedctl.bench.kernels.shapes import DECODE_ROWS, ModelShape, Projection
from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.ops.interfaces import Linear, PreparedLinear
from pagedctl_kernels.sites import gemm_site, head_site

VENDOR = "cuBLAS"
PRODUCT = "pagedctl"

_DEVIATION = 0.02
"""Of the random weights."""


@dataclass(frozen=True, kw_only=True)
class StackTiming:
    """The stack at one row count: each candidate's time, and the floor."""

    model: str
    rows: int
    with_head: bool
    graph: bool
    floor_us: float
    timings: dict[str, Timing]


class LinearStack:
    """The weights of a model's linear layers on the GPU, prepared for our leaf and for cuBLAS.

    cuBLAS gives the head's logits in bfloat16, as engines on it do; ours are float32.
    """

    def __init__(self, bench: Bench, model: ModelShape) -> None:
        self.bench = bench
        self.model = model
        kinds = (*model.projections(), model.head())
        leaves = {one: bench.leaf(projection_site(one)) for one in kinds}
        self.projections = [*model.projections() * model.layers, model.head()]
        self.weights = [bench.gaussian(one.n, one.k).mul_(_DEVIATION) for one in self.projections]
        self.products = [
            partial(_apply, leaf, leaf.prepare(weight, None))
            for one, weight in zip(self.projections, self.weights, strict=True)
            if (leaf := leaves[one]) is not None
        ]

    def time(self, rows: int, ceilings: Ceilings) -> StackTiming:
        """At few rows with the head and in one graph; at many without, launched one by one."""
        graph = rows in DECODE_ROWS
        used = self.projections if graph else self.projections[:-1]
        inputs = {k: self.bench.gaussian(rows, k) for k in {one.k for one in used}}
        x = [inputs[one.k] for one in used]
        candidates: dict[str, list[Launch]] = {}
        if len(self.products) == len(self.projections):
            candidates[PRODUCT] = [partial(_run, self.products[: len(used)], x)]
        vendor = [partial(torch.mm, mat2=weight.T) for weight in self.weights[: len(used)]]
        candidates[VENDOR] = [partial(_run, vendor, x)]
        measure = replayed if graph else launched
        return StackTiming(
            model=self.model.name,
            rows=rows,
            with_head=graph,
            graph=graph,
            floor_us=sum(_floor_us(one, rows, ceilings) for one in used),
            timings=measure(candidates),
        )


def _floor_us(one: Projection, rows: int, ceilings: Ceilings) -> float:
    moved = 2 * one.k * one.n + 2 * rows * (one.k + one.n)
    return ceilings.floor_us(moved, 2 * rows * one.k * one.n)


def projection_site(one: Projection) -> CallSite:
    if one.name == "head":
        return head_site(one.name, k=one.k, n=one.n, dtype="bfloat16")
    return gemm_site(one.name, k=one.k, n=one.n, dtype="bfloat16", bias=False)


def _apply(leaf: Linear, prepared: PreparedLinear, x: torch.Tensor) -> torch.Tensor:
    return leaf(x, prepared)


def _run(layers: Sequence[Callable[[torch.Tensor], object]], inputs: list[torch.Tensor]) -> None:
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)
