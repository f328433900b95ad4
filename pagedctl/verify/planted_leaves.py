"""The faulty leaves that ``planted_faults`` plants. Each is wrong in exactly one way.

They are made to show on any model: whatever the sizes and the dtype, the fault moves the last
bits of most values it touches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional

from pagedctl.numerics.plugins import installed
from pagedctl_kernels.leaf import BATCH_INVARIANT, DETERMINISTIC, CallSite, Requirement
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import (
    BlockSumexp,
    Linear,
    Logprob,
    PreparedLinear,
    Sample,
    SampledRows,
    SamplingRows,
)
from pagedctl_kernels.ops.linear import LibraryLinear
from pagedctl_kernels.ops.temperature import scale_logits
from pagedctl_kernels.ops.torch_checks import dtype_fact
from pagedctl_kernels.plan import plan

MOST_SEGMENTS = 8
"""Segments of K for one row; a call of more rows than that has one."""


class GemmSplitByRows(LibraryLinear):
    """Fewer rows, more segments of K, as a kernel does that must fill a GPU.

    Segments are stored in the model's dtype, float64 ones in float32, and added in it: so even a
    model of a few columns rounds otherwise.
    """

    def __init__(self, site: CallSite) -> None:
        super().__init__(site)
        self.stored = torch.float32 if self.dtype == torch.float64 else self.dtype

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """x D[T, K] -> D[T, N]."""
        self.check_input(x, prepared)
        x = x.to(self.compute)
        segments = min(max(MOST_SEGMENTS // max(len(x), 1), 1), self.k)
        if segments == 1:
            return functional.linear(x, prepared.weight, prepared.bias).to(self.output)
        total: torch.Tensor | None = None
        edges = [self.k * place // segments for place in range(segments + 1)]
        for columns in map(slice, edges[:-1], edges[1:]):
            one = functional.linear(x[:, columns], prepared.weight[:, columns]).to(self.stored)
            total = one if total is None else total + one
        assert total is not None
        if prepared.bias is not None:
            total = total + prepared.bias
        return total.to(self.output)


class HeadMovedByRows:
    """The machine's own output head; in a call with several rows its logits move by one step of
    float32, up and down in turn.

    That is the least that a kernel does which adds in another order.
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        self.sound: Linear = _sound_leaf(site, machine)

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        return self.sound.prepare(weight, bias)

    def refresh(
        self, prepared: PreparedLinear, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.sound.refresh(prepared, weight, bias)

    def __call__(self, x: torch.Tensor, prepared: PreparedLinear) -> torch.Tensor:
        """x D[T, K] -> A[T, N]."""
        logits = self.sound(x, prepared)
        if len(x) < 2:
            return logits
        narrow = logits.to(torch.float32)
        towards = torch.full_like(narrow, torch.inf)
        towards[:, ::2] = -torch.inf
        return torch.nextafter(narrow, towards).to(logits.dtype)


class SampleKeyedByRow:
    """The machine's own sampling with every seed replaced by the row's place in the batch."""

    def __init__(self, site: CallSite, machine: Machine) -> None:
        self.sound: Sample = _sound_leaf(site, machine)

    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> SampledRows:
        """A[R, V] -> one token id a row."""
        places = torch.arange(len(rows.seed), device=rows.seed.device)
        return self.sound(logits, replace(rows, seed=places))

    def truncated(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return self.sound.truncated(logits, rows)


class LogprobOrderByRows:
    """Every logprob of a call with several rows as z - logsumexp(z); ids are left alone.

    The maximum is added back before the token's logit is met, so the rounding differs in any
    vocabulary, though the sum of two exponentials has one order only.
    """

    def __init__(self, site: CallSite, machine: Machine) -> None:
        self.sound: Logprob = _sound_leaf(site, machine)
        self.temperature_form = str(site.facts["temperature_form"])
        self.internal = dtype_fact(site, "internal")

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        block_sumexp: BlockSumexp,
    ) -> torch.Tensor:
        """A[R, V], A[R], int64[R, K] -> A[R, K]."""
        if len(logits) < 2:
            return self.sound(logits, temperature, token_ids, block_sumexp=block_sumexp)
        scaled = scale_logits(logits, temperature, self.temperature_form).to(torch.float32)
        total = torch.logsumexp(scaled, dim=-1, keepdim=True)
        return (scaled.gather(-1, token_ids) - total).to(self.internal)

    def likeliest(
        self, logits: torch.Tensor, temperature: torch.Tensor, count: int
    ) -> torch.Tensor:
        return self.sound.likeliest(logits, temperature, count)


def _sound_leaf(site: CallSite, machine: Machine) -> Any:
    """What this process would run at *site* if nothing were planted."""
    features = frozenset({BATCH_INVARIANT, DETERMINISTIC})
    return plan(installed().leaves, site, machine, Requirement(features=features)).run


def build_gemm(site: CallSite, machine: Machine) -> GemmSplitByRows:
    return GemmSplitByRows(site)


def build_head(site: CallSite, machine: Machine) -> HeadMovedByRows:
    return HeadMovedByRows(site, machine)


def build_sample(site: CallSite, machine: Machine) -> SampleKeyedByRow:
    return SampleKeyedByRow(site, machine)


def build_logprob(site: CallSite, machine: Machine) -> LogprobOrderByRows:
    return LogprobOrderByRows(site, machine)
