"""Edits of logits by device row: tables that exist once a request asks for them.

A row whose request edits logits holds a *slot* of the tables until the row is given to another
sequence. Output counts are kept on the device, since the token that was sampled last may not
be known on the host; they are rebuilt from the sequence's tokens whenever it is admitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedctl.engine.request import SamplingParams
from pagedctl.engine.scheduler import SequenceKey
from pagedctl.engine.sequence import IN_FLIGHT, Sequence
from pagedctl.engine.step_plan import StepPlan
from pagedctl_kernels.ops.interfaces import EditedRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST_SLOTS = 8
NO_BIAS = -0.0
"""No sum changes by it, not even that of -0.0."""

NO_PAIRS = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class RowEdits:
    """What the sequence of one row asks for.

    ``slot`` is its place in the tables, None if it needs none. ``barred_ids`` int64[B] may not
    be drawn at positions below ``barred_before``.
    """

    slot: int | None
    barred_ids: NDArray[np.int64]
    barred_before: int


class EditRows:
    """The edits of ``max_num_seqs`` rows of V = ``vocab_size`` logits; *dtype* is A.

    The tables take 9 V bytes a slot (13 V in float64) and double, from FIRST_SLOTS on, when
    they are full.
    """

    def __init__(
        self, *, max_num_seqs: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = device
        self.bias = torch.empty(0, vocab_size, dtype=dtype, device=device)
        self.in_prompt = torch.empty(0, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.empty(0, vocab_size, dtype=torch.int32, device=device)
        self.repetition = torch.empty(0, dtype=dtype, device=device)
        self.presence = torch.empty(0, dtype=dtype, device=device)
        self.frequency = torch.empty(0, dtype=dtype, device=device)
        self._rows: dict[int, RowEdits] = {}
        self._free_slots: list[int] = []

    @property
    def num_slots(self) -> int:
        return len(self.bias)

    def update(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> None:
        """Take back the slots of the rows that the plan admits to, then write the new edits."""
        admitted = [row for row in plan.rows if row.admitted]
        for row in admitted:
            left = self._rows.pop(row.row, None)
            if left is not None and left.slot is not None:
                self._free_slots.append(left.slot)
        for row in admitted:
            edits = self._admit(sequences[row.request_id, row.sample])
            if edits is not None:
                self._rows[row.row] = edits

    def step_edits(self, plan: StepPlan) -> EditedRows | None:
        """The edits of the logits that the plan samples from, None if there are none."""
        edited: list[tuple[int, int]] = []
        barred: list[NDArray[np.int64]] = []
        for place, position, row in self._sampled(plan):
            if row.slot is not None:
                edited.append((place, row.slot))
            if position < row.barred_before and len(row.barred_ids):
                places = np.full(len(row.barred_ids), place, dtype=np.int64)
                barred.append(np.stack([places, row.barred_ids], axis=1))
        if not edited and not barred:
            return None
        sampled, slot = self._columns([np.array(edited, dtype=np.int64)])
        barred_row, barred_token = self._columns(barred)
        return EditedRows(
            row=sampled,
            slot=slot,
            repetition=self.repetition[slot],
            presence=self.presence[slot],
            frequency=self.frequency[slot],
            bias=self.bias,
            in_prompt=self.in_prompt,
            counts=self.counts,
            barred_row=barred_row,
            barred_token=barred_token,
        )

    def count(self, edits: EditedRows, token_ids: torch.Tensor) -> None:
        """Count the step's sampled tokens, int64[R]: they are output of the next step."""
        sampled = token_ids[edits.row]
        one = torch.ones_like(sampled, dtype=torch.int32)
        self.counts.index_put_((edits.slot, sampled), one, accumulate=True)

    def _sampled(self, plan: StepPlan) -> Iterator[tuple[int, int, RowEdits]]:
        """(place among the step's samples, position drawn, edits) of each edited sample."""
        place = 0
        for row in plan.rows if self._rows else ():
            edits = self._rows.get(row.row)
            if edits is not None and row.sample_offsets:
                (offset,) = row.sample_offsets  # counts are those before the step
                yield place, row.start + offset + 1, edits
            place += len(row.sample_offsets)

    def _admit(self, sequence: Sequence) -> RowEdits | None:
        params = sequence.request.params
        slot = self._take_slot(sequence) if needs_tables(params) else None
        if slot is None and params.min_tokens == 0:
            return None
        return RowEdits(
            slot=slot,
            barred_ids=self._ids(sorted(sequence.stop_token_ids)),
            barred_before=sequence.num_prompt_tokens + params.min_tokens,
        )

    def _take_slot(self, sequence: Sequence) -> int:
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.pop(0)
        self._clear(slot)
        self._write(slot, sequence)
        return slot

    def _grow(self) -> None:
        """Add slots, with whatever their memory holds."""
        old = self.num_slots
        new = min(max(2 * old, FIRST_SLOTS), self.max_num_seqs)
        for name in ("bias", "in_prompt", "counts", "repetition", "presence", "frequency"):
            table: torch.Tensor = getattr(self, name)
            wider = torch.empty(new, *table.shape[1:], dtype=table.dtype, device=self.device)
            wider[:old] = table
            setattr(self, name, wider)
        self._free_slots.extend(range(old, new))

    def _clear(self, slot: int) -> None:
        self.bias[slot] = NO_BIAS
        self.in_prompt[slot] = False
        self.counts[slot] = 0

    def _write(self, slot: int, sequence: Sequence) -> None:
        """Fill a cleared slot from the sequence; what this step samples stands in flight there."""
        params, prompt = sequence.request.params, sequence.num_prompt_tokens
        if params.allowed_token_ids:
            self.bias[slot] = -torch.inf
            self.bias[slot, self._tokens(params.allowed_token_ids)] = NO_BIAS
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias = torch.tensor(values, dtype=self.bias.dtype, device=self.device)
            self.bias[slot, self._tokens(ids)] += bias
        self.in_prompt[slot, self._tokens(sequence.tokens[:prompt])] = True
        output = self._tokens(sequence.tokens[prompt:])
        self.counts[slot].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty

    def _tokens(self, ids: list[int] | tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self._ids(ids)).to(self.device, non_blocking=True)

    def _ids(self, ids: list[int] | tuple[int, ...]) -> NDArray[np.int64]:
        """Those ids that the head has a logit for.

        The input vocabulary may be the larger one, and a token in flight has no id yet.
        """
        all_ids = np.array(ids, dtype=np.int64)
        found: NDArray[np.int64] = all_ids[(all_ids != IN_FLIGHT) & (all_ids < self.vocab_size)]
        return found

    def _columns(self, pairs: list[NDArray[np.int64]]) -> tuple[torch.Tensor, ...]:
        """Both columns of all pairs, on the device."""
        table = np.concatenate([one.reshape(-1, 2) for one in pairs]) if pairs else NO_PAIRS
        columns = np.ascontiguousarray(table.T)
        return torch.from_numpy(columns).to(self.device, non_blocking=True).unbind(0)


def needs_tables(params: SamplingParams) -> bool:
    """Whether a request edits logits by more than what ``min_tokens`` bars."""
    return bool(
        params.allowed_token_ids
        or params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
