"""The CPU leaf of the logprob: one function for sampled, prompt and likeliest tokens."""

from __future__ import annotations

import torch

from pagedctl_kernels.leaf import CallSite
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.ops.interfaces import BlockSumexp
from pagedctl_kernels.ops.sample.truncation import first_tokens
from pagedctl_kernels.ops.temperature import scale_logits
from pagedctl_kernels.ops.torch_checks import dtype_fact, expect, int_fact


class TorchLogprob:
    def __init__(self, site: CallSite) -> None:
        self.form = str(site.facts["form"])
        self.block_size = int_fact(site, "block_size")
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
        """logits A[R, V], temperature A[R], token_ids int64[R, K] -> A[R, K].

        Order: temperature, the exact maximum, one difference, block sums of exp added left to
        right, one logarithm, one difference a token. T = 0 and T = 1 leave the logits as they
        are. A row with a NaN or +infinity, or without a finite value, gives NaN; no other does.
        """
        expect("logprob: token_ids", token_ids, torch.int64, (logits.shape[0], "K"))
        scaled = self._scaled(logits, temperature)
        shifted = scaled - scaled.amax(dim=-1, keepdim=True)
        token = shifted.gather(-1, token_ids)  # first: the leaf may be another package's
        sums = block_sumexp(shifted, block_size=self.block_size)
        num_blocks = -(-logits.shape[1] // self.block_size)
        expect("logprob: block sums", sums, self.internal, (logits.shape[0], num_blocks))
        total = fold_left(sums)
        log_total = torch.log(total).unsqueeze(-1)
        return -(log_total - token) if self.form == "blockwise" else token - log_total

    def likeliest(
        self, logits: torch.Tensor, temperature: torch.Tensor, count: int
    ) -> torch.Tensor:
        """logits A[R, V], temperature A[R] -> int64[R, count], count in 1..V.

        The first tokens by (z descending, id ascending), z being what the logprob is of. A
        removed token comes after all others, and so does a NaN.
        """
        scaled = self._scaled(logits, temperature)
        return first_tokens(scaled.masked_fill(scaled.isnan(), -torch.inf), count)

    def _scaled(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        expect("logprob: logits", logits, self.internal, ("R", "V"))
        expect("logprob: temperature", temperature, self.internal, (logits.shape[0],))
        return scale_logits(logits, temperature, self.temperature_form)


def fold_left(sums: torch.Tensor) -> torch.Tensor:
    """[R, blocks] -> [R]: b_0 + b_1 + ..., one rounded sum a block."""
    total, *rest = sums.unbind(dim=-1)
    for block in rest:
        total = total + block
    return total


def build(site: CallSite, machine: Machine) -> TorchLogprob:
    return TorchLogprob(site)
