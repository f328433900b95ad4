"""Persistent rows of running sequences, on host and device, updated by differences.

A row holds what the device needs to know of a sequence between steps: its block table, how it
is sampled, the last token that was sampled for it, and whether it is faulty. A step sends only
what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from pagedctl.engine.sampler import TopRows
from pagedctl.engine.scheduler import SequenceKey
from pagedctl.engine.sequence import IN_FLIGHT, Sequence
from pagedctl.engine.step_plan import ScheduledRow, StepPlan
from pagedctl.models.decoder import DecoderBatch
from pagedctl_kernels.ops.interfaces import AttentionMetadata, SamplingRows


@dataclass(frozen=True, kw_only=True)
class ScoredPositions:
    """N positions of a batch whose next tokens are given and scored.

    ``index`` int64[N] are flat positions, ``rows`` int64[N] their rows, ``token_ids`` int64[N]
    the tokens that follow them, ``temperature`` A[N].
    """

    index: torch.Tensor
    rows: torch.Tensor
    token_ids: torch.Tensor
    temperature: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """A step as tensors.

    ``decoder`` is the flat batch of T tokens. ``sample_index`` int64[R] are the flat positions
    that are sampled, ``sample_rows`` int64[R] their rows, ``sampling`` how, ``top`` which of
    them report their likeliest tokens. ``last_samples`` are the places in those R of each
    row's last sample, which feeds its next step. ``row_of_token`` int64[T] is the row of each
    token of the batch, ``rows`` int64[S] those of the plan.
    """

    decoder: DecoderBatch
    sample_index: torch.Tensor
    sample_rows: torch.Tensor
    last_samples: torch.Tensor
    row_of_token: torch.Tensor
    rows: torch.Tensor
    sampling: SamplingRows
    top: TopRows | None
    scored: ScoredPositions | None


class BatchRows:
    """``max_num_seqs`` rows of at most ``max_blocks`` blocks; *dtype* is the internal one, A."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.faulty = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(max_num_seqs, dtype=dtype, device=device)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_p = torch.ones(max_num_seqs, dtype=torch.float64, device=device)
        self.min_p = torch.zeros(max_num_seqs, dtype=dtype, device=device)
        self.seed = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.top_logprobs = np.zeros(max_num_seqs, dtype=np.int64)

    def update(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> None:
        """Write the rows that the plan admits and append the blocks that it hands out.

        An admitted row's blocks may begin with some whose tokens are computed already.
        """
        admitted = [row for row in plan.rows if row.admitted]
        if admitted:
            self._write_sampling(admitted, sequences)
        for row in plan.rows:
            if row.admitted:
                self.num_blocks[row.row] = 0
            first = self.num_blocks[row.row]
            end = first + len(row.new_blocks)
            self.block_tables[row.row, first:end] = row.new_blocks
            self.num_blocks[row.row] = end

    def step_batch(self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence]) -> StepBatch:
        """The plan's tokens as one flat batch, in the plan's order."""
        counts = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
        starts = np.array([row.start for row in plan.rows], dtype=np.int64)
        rows = np.array([row.row for row in plan.rows], dtype=np.int64)
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        offsets = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], counts)
        positions = np.repeat(starts, counts) + offsets
        row_of_token = np.repeat(rows, counts)
        blocks = self.block_tables[row_of_token, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        table_width = int(self.num_blocks[rows].max())
        decoder = DecoderBatch(
            token_ids=self._token_ids(plan, sequences, row_of_token),
            positions=self._to_device(positions),
            slot_mapping=self._writable(slots, row_of_token),
            metadata=AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=(starts + counts).astype(np.int32),
                block_tables=self.block_tables[rows, :table_width],
            ),
        )
        return self._with_samples(plan, sequences, decoder, query_start_loc, rows)

    def mark_faulty(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """Mark the rows of tokens whose hidden state, D[T, H], is not finite.

        Every computed token counts, not only the sampled ones: whether a later token of the
        row is reached by a non-finite value depends on how attention was tiled, the mark not.
        """
        self._mark(batch.row_of_token, ~torch.isfinite(hidden).all(dim=-1))

    def mark_scores(self, scored: ScoredPositions, logprobs: torch.Tensor) -> None:
        """Mark the rows of scored positions whose logits were not finite: their score is NaN."""
        self._mark(scored.rows, logprobs.isnan())

    def store(self, batch: StepBatch, token_ids: torch.Tensor, faulty: torch.Tensor) -> None:
        """Keep each row's last token for its next step; a row that was faulty once stays so."""
        self.last_token[batch.sample_rows[batch.last_samples]] = token_ids[batch.last_samples]
        self._mark(batch.sample_rows, faulty)

    def _mark(self, rows: torch.Tensor, faulty: torch.Tensor) -> None:
        """Mark each of *rows* int64[N], with repeats, that is faulty bool[N] at one place."""
        found = torch.zeros(len(self.faulty), dtype=torch.int32, device=self.device)
        self.faulty |= found.index_add_(0, rows, faulty.to(torch.int32)) > 0

    def _token_ids(
        self, plan: StepPlan, sequences: Mapping[SequenceKey, Sequence], row_of_token: np.ndarray
    ) -> torch.Tensor:
        """Token ids int64[T]; those in flight are taken from the device."""
        known = np.concatenate([_known_ids(row, sequences) for row in plan.rows])
        ids = self._to_device(known)
        if not (known == IN_FLIGHT).any():
            return ids
        return torch.where(ids == IN_FLIGHT, self.last_token[self._to_device(row_of_token)], ids)

    def _writable(self, slots: np.ndarray, row_of_token: np.ndarray) -> torch.Tensor:
        """Slots int64[T], negative (written nowhere) for the tokens of faulty rows."""
        faulty = self.faulty[self._to_device(row_of_token)]
        return self._to_device(slots).masked_fill_(faulty, -1)

    def _with_samples(
        self,
        plan: StepPlan,
        sequences: Mapping[SequenceKey, Sequence],
        decoder: DecoderBatch,
        query_start_loc: np.ndarray,
        plan_rows: np.ndarray,
    ) -> StepBatch:
        places = [
            (int(first) + offset, row.row, row.start + offset + 1)
            for first, row in zip(query_start_loc[:-1], plan.rows, strict=True)
            for offset in row.sample_offsets
        ]
        table = np.array(places, dtype=np.int64).reshape(-1, 3)
        index, rows, position = self._to_device(table).unbind(1)
        ends = np.cumsum([len(row.sample_offsets) for row in plan.rows])
        sampled = [len(row.sample_offsets) > 0 for row in plan.rows]
        return StepBatch(
            decoder=decoder,
            sample_index=index,
            sample_rows=rows,
            last_samples=self._to_device(ends[sampled] - 1),
            row_of_token=self._to_device(np.repeat(plan_rows, np.diff(query_start_loc))),
            rows=self._to_device(plan_rows),
            sampling=SamplingRows(
                temperature=self.temperature[rows],
                top_k=self.top_k[rows],
                top_p=self.top_p[rows],
                min_p=self.min_p[rows],
                seed=self.seed[rows],
                position=position,
            ),
            top=self._top(self.top_logprobs[table[:, 1]]),
            scored=self._scored(plan, sequences, query_start_loc),
        )

    def _top(self, counts: np.ndarray) -> TopRows | None:
        if not counts.any():
            return None
        return TopRows(rows=self._to_device(np.flatnonzero(counts)), counts=tuple(counts.tolist()))

    def _scored(
        self,
        plan: StepPlan,
        sequences: Mapping[SequenceKey, Sequence],
        query_start_loc: np.ndarray,
    ) -> ScoredPositions | None:
        parts = [
            _scored_positions(int(first), row, sequences)
            for first, row in zip(query_start_loc[:-1], plan.rows, strict=True)
            if row.num_scored
        ]
        if not parts:
            return None
        index, rows, token_ids = self._to_device(np.concatenate(parts, axis=1)).unbind(0)
        return ScoredPositions(
            index=index, rows=rows, token_ids=token_ids, temperature=self.temperature[rows]
        )

    def _write_sampling(
        self, admitted: list[ScheduledRow], sequences: Mapping[SequenceKey, Sequence]
    ) -> None:
        index = torch.tensor([row.row for row in admitted], device=self.device)
        chosen = [sequences[row.request_id, row.sample] for row in admitted]
        params = [sequence.request.params for sequence in chosen]
        self.faulty[index] = False
        self.temperature[index] = self._values(
            [one.temperature for one in params], self.temperature
        )
        self.top_k[index] = self._values([one.top_k or 0 for one in params], self.top_k)
        self.top_p[index] = self._values([one.top_p for one in params], self.top_p)
        self.min_p[index] = self._values([one.min_p for one in params], self.min_p)
        self.seed[index] = self._values([sequence.seed for sequence in chosen], self.seed)
        self.top_logprobs[[row.row for row in admitted]] = [one.top_logprobs for one in params]

    def _values(self, values: list[float] | list[int], like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(values, dtype=like.dtype, device=self.device)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _known_ids(row: ScheduledRow, sequences: Mapping[SequenceKey, Sequence]) -> np.ndarray:
    tokens = sequences[row.request_id, row.sample].tokens
    return np.array(tokens[row.start : row.start + row.num_tokens], dtype=np.int64)


def _scored_positions(
    first: int, row: ScheduledRow, sequences: Mapping[SequenceKey, Sequence]
) -> np.ndarray:
    """Flat position, row and next token of each scored position of *row*: int64[3, N].

    *first* is the flat position of the row's first token.
    """
    begin, end = row.scored_offsets
    tokens = sequences[row.request_id, row.sample].tokens
    index = np.arange(first + begin, first + end, dtype=np.int64)
    following = np.array(tokens[row.start + begin + 1 : row.start + end + 1], dtype=np.int64)
    return np.stack([index, np.full_like(index, row.row), following])
