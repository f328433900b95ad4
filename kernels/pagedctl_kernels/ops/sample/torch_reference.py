"""The CPU leaf of sampling: temperature, truncation, and a draw by position-keyed noise."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import SampledRows, SamplingRows
from pagedctl_kernels.ops.sample.draw import draw
from pagedctl_kernels.ops.sample.truncation import kept_mask
from pagedctl_kernels.ops.temperature import scale_logits
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect


class TorchSample:
    def __init__(self, site: CallSite) -> None:
        self.temperature_form = str(site.facts["temperature_form"])
        self.internal = dtype_fact(site, "internal")

    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> SampledRows:
        """logits A[R, V] -> token_ids int64[R] and faulty bool[R].

        A row whose scaled logits hold a NaN or +infinity, or nothing finite, is faulty and
        gets token 0. Ties go to the lowest id everywhere; a row's result is its own.
        """
        expect("sample: logits", logits, self.internal, ("R", "V"))
        check_rows(rows, logits.shape[0], self.internal)
        scaled = scale_logits(logits, rows.temperature, self.temperature_form)
        faulty = ~torch.isfinite(scaled.amax(dim=-1))
        token_ids = torch.zeros(logits.shape[0], dtype=torch.int64)
        greedy = (~faulty & (rows.temperature == 0)).nonzero().squeeze(-1)
        drawn = (~faulty & (rows.temperature > 0)).nonzero().squeeze(-1)
        if greedy.numel():
            token_ids[greedy] = scaled[greedy].argmax(dim=-1)  # the first of equals
        if drawn.numel():
            z = scaled[drawn]
            kept = kept_mask(z, rows.top_k[drawn], rows.top_p[drawn], rows.min_p[drawn])
            token_ids[drawn] = draw(z, kept, rows.seed[drawn], rows.position[drawn])
        return SampledRows(token_ids=token_ids, faulty=faulty)

    def truncated(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """logits A[R, V] with every token that truncation removes at -infinity.

        The kept set is that of ``__call__``; a row at T = 0 is truncated as it would be at
        T = 1. Faulty rows come back unchanged.
        """
        expect("sample: logits", logits, self.internal, ("R", "V"))
        check_rows(rows, logits.shape[0], self.internal)
        scaled = scale_logits(logits, rows.temperature, self.temperature_form)
        sound = torch.isfinite(scaled.amax(dim=-1)).nonzero().squeeze(-1)
        kept = torch.ones_like(logits, dtype=torch.bool)
        kept[sound] = kept_mask(
            scaled[sound], rows.top_k[sound], rows.top_p[sound], rows.min_p[sound]
        )
        return logits.masked_fill(~kept, -torch.inf)


def check_rows(rows: SamplingRows, count: int, internal: torch.dtype) -> None:
    """Raise ValueError for a wrong dtype or shape, or a value outside its range."""
    for name, dtype in (
        ("temperature", internal),
        ("top_k", torch.int64),
        ("top_p", torch.float64),
        ("min_p", internal),
        ("seed", torch.int64),
        ("position", torch.int64),
    ):
        expect(f"sample: {name}", getattr(rows, name), dtype, (count,))
    t, p, m = rows.temperature, rows.top_p, rows.min_p
    _in_range("temperature", t, (t >= 0) & (t < torch.inf), "finite and at least 0")
    _in_range("top_k", rows.top_k, rows.top_k >= -1, "at least -1")
    _in_range("top_p", p, (p > 0) & (p <= 1), "in (0, 1]")
    _in_range("min_p", m, (m >= 0) & (m <= 1), "in [0, 1]")
    _in_range("seed", rows.seed, (rows.seed >= 0) & (rows.seed < 2**53), "in [0, 2^53)")
    _in_range("position", rows.position, rows.position >= 0, "at least 0")


def _in_range(name: str, values: torch.Tensor, inside: torch.Tensor, rule: str) -> None:
    if not bool(inside.all()):
        row = int((~inside).nonzero()[0, 0])
        raise ValueError(f"sample: {name} {values[row].item()} of row {row} must be {rule}")


def build(site: CallSite, machine: Machine) -> TorchSample:
    return TorchSample(site)
