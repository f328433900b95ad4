"""From hidden states to sampled tokens and their logprobs: the last stretch of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedctl.models.binding import DecoderPlans
from pagedctl.models.decoder import Decoder
from pagedctl_kernels.ops.interfaces import SamplingRows


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """``token_ids`` int64[R], ``logprobs`` A[R], ``faulty`` bool[R], on the device."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    faulty: torch.Tensor


class Sampler:
    """Draws one token a row and reports its logprob in the engine's basis."""

    def __init__(self, decoder: Decoder, basis: str) -> None:
        self.decoder = decoder
        self.plans: DecoderPlans = decoder.plans
        self.basis = basis

    def __call__(self, hidden: torch.Tensor, rows: SamplingRows) -> Sampled:
        """Hidden states D[R, H] of the sampled positions -> one token a row."""
        logits = self.decoder.logits(hidden)
        drawn = self.plans.sample.run(logits, rows)
        return Sampled(
            token_ids=drawn.token_ids,
            logprobs=self.logprobs(logits, rows, drawn.token_ids),
            faulty=drawn.faulty,
        )

    def logprobs(
        self, logits: torch.Tensor, rows: SamplingRows, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """The one function that turns a row of logits into a token's logprob, A[R].

        ``scaled``: of logits / T; ``raw``: of the logits; ``processed``: of logits / T with
        the tokens that truncation removed at minus infinity. At T = 0 each is taken at T = 1.
        """
        temperature = rows.temperature
        if self.basis == "raw":
            temperature = torch.ones_like(temperature)
        elif self.basis == "processed":
            logits = self.plans.sample.run.truncated(logits, rows)
        logprobs: torch.Tensor = self.plans.logprob.run(
            logits, temperature, token_ids, block_sumexp=self.plans.block_sumexp.run
        )
        return logprobs
