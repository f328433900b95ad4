"""The draw: argmax of z + noise over the kept tokens, with noise only where it can decide."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as functional

from pagedctl_kernels.ops.gumbel_noise import gumbel_noise, uniform_variates
from pagedctl_kernels.ops.philox import token_words

TOKENS_PER_COUNTER = 4
GROUPS_AT_ONCE = 8192
"""Counters whose words are made together; bounds memory and stays in cache."""

Contenders = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Row int64[C], token id int64[C] and score fl(z + noise) A[C] of tokens that may win."""


def draw(
    scaled: torch.Tensor, kept: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """argmax of fl(z + noise) over the kept tokens, ties to the lowest id: int64[R].

    scaled A[R, V], kept bool[R, V] (at least one a row), seed and position int64[R]. The
    likeliest token's score is a floor for the winner's. So the words of all kept tokens are
    made, but noise, with its two logarithms, only where the word allows that score.
    """
    masked = scaled.masked_fill(~kept, -torch.inf)
    floor = leading_score(masked, seed, position)
    pieces = list(contenders(masked, seed, position, floor))
    row, token, score = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    best = floor.scatter_reduce(0, row, score, "amax")
    winners = score == best[row]
    ids = torch.full_like(seed, scaled.shape[-1])
    return ids.scatter_reduce(0, row[winners], token[winners], "amin")


def leading_score(masked: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Score fl(z + noise) of each row's likeliest token, A[R]."""
    z, token = masked.max(dim=-1)
    words = token_words(seed, position, token // TOKENS_PER_COUNTER)
    word = words.gather(-1, (token % TOKENS_PER_COUNTER).unsqueeze(-1)).squeeze(-1)
    return z + gumbel_noise(word)


def contenders(
    masked: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, floor: torch.Tensor
) -> Iterator[Contenders]:
    """Every token whose score can reach its row's *floor*, in pieces; maybe some more.

    Noise is -ln(E) with E >= v, so z + noise >= floor needs v <= exp(z - floor). The slack
    covers the rounding of that difference, of the score and of the noise itself.
    """
    rows, vocab = masked.shape
    padding = (0, -vocab % TOKENS_PER_COUNTER)
    grouped = functional.pad(masked, padding, value=-torch.inf).view(rows, -1, TOKENS_PER_COUNTER)
    reachable = floor - (floor.abs() * 2.0**-20 + 2.0**-10)
    row_of, group_of = (grouped.amax(dim=-1) > -torch.inf).nonzero(as_tuple=True)
    for start in range(0, len(row_of), GROUPS_AT_ONCE):
        taken = slice(start, start + GROUPS_AT_ONCE)
        row, group = row_of[taken], group_of[taken]
        z = grouped[row, group]
        words = token_words(seed[row], position[row], group)
        limit = torch.exp(z - reachable[row].unsqueeze(-1))
        place, lane = (uniform_variates(words) <= limit).nonzero(as_tuple=True)
        token = group[place] * TOKENS_PER_COUNTER + lane
        yield row[place], token, z[place, lane] + gumbel_noise(words[place, lane])
