"""From hidden states to tokens, logprobs and scores: the last stretch of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedctl.models.binding import DecoderPlans
from pagedctl.models.decoder import Decoder
from pagedctl_kernels.ops.interfaces import EditedRows, SamplingRows

SCORED_AT_ONCE = 64
"""Positions whose logits are in memory together while tokens are scored.

At most four copies of them, 156 MB for 152,064 columns in float32. No bit depends on it.
"""


@dataclass(frozen=True, kw_only=True)
class TopRows:
    """Which of R sampled rows report their likeliest tokens.

    ``counts`` has one entry a row, 0 for none; ``rows`` int64[Q] are the others' places.
    """

    rows: torch.Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LikeliestTokens:
    """``token_ids`` int64[Q, K] and ``logprobs`` A[Q, K], K being the largest asked for."""

    asked: TopRows
    token_ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """``token_ids`` int64[R], ``logprobs`` A[R], ``faulty`` bool[R], on the device."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    faulty: torch.Tensor
    top: LikeliestTokens | None


class Sampler:
    """Draws tokens, and reports their logprobs and those of given tokens in one basis."""

    def __init__(self, decoder: Decoder, basis: str) -> None:
        self.decoder = decoder
        self.plans: DecoderPlans = decoder.plans
        self.basis = basis

    def __call__(
        self,
        hidden: torch.Tensor,
        rows: SamplingRows,
        edits: EditedRows | None = None,
        top: TopRows | None = None,
    ) -> Sampled:
        """Hidden states D[R, H] of the sampled positions -> one token a row."""
        return self.sample(self.decoder.logits(hidden), rows, edits, top)

    def sample(
        self,
        logits: torch.Tensor,
        rows: SamplingRows,
        edits: EditedRows | None = None,
        top: TopRows | None = None,
    ) -> Sampled:
        """Logits A[R, V] -> one token a row, drawn from the edited logits.

        A row is faulty if what it is drawn from, or what its logprob is of, has a NaN or
        +infinity, or nothing finite; its logprob is a NaN exactly in the second case.
        """
        edited = self._edited(logits, edits)
        drawn = self.plans.sample.run(edited, rows)
        reported, temperature = self._reported(logits, edited, rows)
        ids = drawn.token_ids.unsqueeze(1)
        if top is not None:
            ids = self._with_likeliest(ids, reported, temperature, top)
        logprobs = self._logprobs(reported, temperature, ids)
        return Sampled(
            token_ids=drawn.token_ids,
            logprobs=logprobs[:, 0],
            faulty=drawn.faulty | logprobs[:, 0].isnan(),
            top=None if top is None else _likeliest(top, ids, logprobs),
        )

    def score(
        self, hidden: torch.Tensor, temperature: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states D[N, H] and the tokens that follow them, int64[N] -> logprobs A[N].

        temperature A[N]. NaN where the logits are not finite; -infinity for a token of the
        input vocabulary that the head has no logit for.
        """
        if self.basis == "processed":
            raise RuntimeError("given tokens have no logprob after truncation")
        if self.basis == "raw":
            temperature = torch.ones_like(temperature)
        scores = torch.empty_like(temperature)
        for start in range(0, len(scores), SCORED_AT_ONCE):
            part = slice(start, start + SCORED_AT_ONCE)
            scores[part] = self._score(hidden[part], temperature[part], token_ids[part])
        return scores

    def _score(
        self, hidden: torch.Tensor, temperature: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        logits = self.decoder.logits(hidden)
        present = token_ids.clamp(max=logits.shape[1] - 1)
        logprobs = self._logprobs(logits, temperature, present.unsqueeze(1)).squeeze(1)
        return logprobs.masked_fill((present != token_ids) & ~logprobs.isnan(), -torch.inf)

    def _edited(self, logits: torch.Tensor, edits: EditedRows | None) -> torch.Tensor:
        if edits is None:
            return logits
        edited = logits.clone()
        self.plans.logit_edits.run(edited, edits)
        return edited

    def _reported(
        self, logits: torch.Tensor, edited: torch.Tensor, rows: SamplingRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What logprobs are of, A[R, V], and at which temperature, A[R].

        ``scaled``: of logits / T; ``raw``: of the logits; ``processed``: of edited logits / T
        with the tokens that truncation removed at -infinity. At T = 0 each is taken at T = 1.
        """
        if self.basis == "raw":
            return logits, torch.ones_like(rows.temperature)
        if self.basis == "processed":
            return self.plans.sample.run.truncated(edited, rows), rows.temperature
        return logits, rows.temperature

    def _with_likeliest(
        self, ids: torch.Tensor, reported: torch.Tensor, temperature: torch.Tensor, top: TopRows
    ) -> torch.Tensor:
        """Each row's token and, where asked for, its likeliest ones: int64[R, 1 + K]."""
        count = max(top.counts)
        likeliest = self.plans.logprob.run.likeliest(
            reported[top.rows], temperature[top.rows], count
        )
        ids = ids.repeat(1, 1 + count)
        ids[top.rows, 1:] = likeliest
        return ids

    def _logprobs(
        self, reported: torch.Tensor, temperature: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """The one function that turns a row of logits into logprobs, int64[R, K] -> A[R, K]."""
        logprobs: torch.Tensor = self.plans.logprob.run(
            reported, temperature, token_ids, block_sumexp=self.plans.block_sumexp.run
        )
        return logprobs


def _likeliest(top: TopRows, ids: torch.Tensor, logprobs: torch.Tensor) -> LikeliestTokens:
    """Columns 1.. of the rows that asked, from int64[R, 1 + K] and A[R, 1 + K]."""
    return LikeliestTokens(asked=top, token_ids=ids[top.rows, 1:], logprobs=logprobs[top.rows, 1:])
