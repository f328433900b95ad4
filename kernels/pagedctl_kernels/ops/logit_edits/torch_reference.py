"""The CPU leaf of the edits: whole rows of a few tables, one rounded operation at a time."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import EditedRows
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect


class TorchLogitEdits:
    def __init__(self, site: CallSite) -> None:
        self.internal = dtype_fact(site, "internal")

    def __call__(self, logits: torch.Tensor, edits: EditedRows) -> None:
        """Edit logits A[R, V] in place; rows that *edits* does not name keep their bits.

        Order: allowed ids and bias (one sum), repetition, frequency and presence, barred ids.
        A token is removed by adding -infinity, so a NaN or +infinity stays a fault of its row.
        """
        expect("logit_edits: logits", logits, self.internal, ("R", "V"))
        check_edits(edits, logits.shape[1], self.internal)
        if edits.row.numel():
            z = logits[edits.row] + edits.bias[edits.slot]
            counts = edits.counts[edits.slot]
            seen = edits.in_prompt[edits.slot] | (counts > 0)
            z = torch.where(seen, repeated(z, edits.repetition.unsqueeze(-1)), z)
            penalised = penalise(
                z, counts, edits.frequency.unsqueeze(-1), edits.presence.unsqueeze(-1)
            )
            logits[edits.row] = torch.where(counts > 0, penalised, z)
        if edits.barred_row.numel():
            logits[edits.barred_row, edits.barred_token] += -torch.inf


def repeated(z: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """z / penalty above zero, z * penalty elsewhere: A[E, V] and A[E, 1] -> A[E, V]."""
    return torch.where(z > 0, z / penalty, z * penalty)


def penalise(
    z: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """fl(fl(z - fl(count * frequency)) - presence): A[E, V], int32[E, V], A[E, 1] -> A[E, V]."""
    return z - counts.to(z.dtype) * frequency - presence


def check_edits(edits: EditedRows, vocab: int, internal: torch.dtype) -> None:
    """Raise ValueError for a wrong dtype or shape of any part of *edits*."""
    edited, barred, slots = len(edits.row), len(edits.barred_row), len(edits.bias)
    expect("logit_edits: row", edits.row, torch.int64, (edited,))
    expect("logit_edits: slot", edits.slot, torch.int64, (edited,))
    for name in ("repetition", "presence", "frequency"):
        expect(f"logit_edits: {name}", getattr(edits, name), internal, (edited,))
    expect("logit_edits: bias", edits.bias, internal, (slots, vocab))
    expect("logit_edits: in_prompt", edits.in_prompt, torch.bool, (slots, vocab))
    expect("logit_edits: counts", edits.counts, torch.int32, (slots, vocab))
    expect("logit_edits: barred_row", edits.barred_row, torch.int64, (barred,))
    expect("logit_edits: barred_token", edits.barred_token, torch.int64, (barred,))


def build(site: CallSite, machine: Machine) -> TorchLogitEdits:
    return TorchLogitEdits(site)
