"""Top-k, top-p and min-p as exact sets: no result depends on a summation order or a sort.

A kept set of top-k and top-p is a prefix by (z descending, id ascending), so it is described
by the z of its last token and by how many tokens tied with it still belong.
"""

from __future__ import annotations

import torch

MASS_SCALE = 2.0**40
"""One unit of the fixed-point mass is 2^-40 of the largest token's."""

PROBED_TOKENS = 1024
"""Largest prefix that is looked for without sorting the row."""


def kept_mask(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Tokens that survive top-k, then top-p, then min-p: bool[R, V].

    scaled A[R, V] (finite maximum; -infinity marks removed tokens), top_k int64[R], top_p
    float64[R], min_p A[R]. A token at -infinity is never kept; the maximum always is.
    """
    vocab = scaled.shape[-1]
    kept = scaled > -torch.inf
    top_k = torch.where((top_k <= 0) | (top_k >= vocab), vocab, top_k)
    cut = ((top_k < vocab) | (top_p < 1)).nonzero().squeeze(-1)
    if cut.numel():
        kept[cut] &= _prefix_mask(scaled[cut], top_k[cut], top_p[cut])
    floored = (min_p > 0).nonzero().squeeze(-1)
    if floored.numel():
        kept[floored] &= relative_weights(scaled[floored]) >= min_p[floored].unsqueeze(-1)
    return kept


def first_tokens(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """The first *count* tokens by (z descending, id ascending), in that order: int64[R, count].

    scaled A[R, V] without NaN, count in 1..V.
    """
    last = _largest(scaled, count)[:, -1]
    first = _first_of_order(scaled, torch.full_like(last, count, dtype=torch.int64), last)
    ids = first.nonzero()[:, 1].view(-1, count)
    descending = scaled.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, descending.indices)


def relative_weights(scaled: torch.Tensor) -> torch.Tensor:
    """exp(fl(z - max)) of each token: A[R, V]."""
    return torch.exp(scaled - scaled.amax(dim=-1, keepdim=True))


def integer_mass(weights: torch.Tensor) -> torch.Tensor:
    """Weights in [0, 1] as int64 multiples of 2^-40, rounded to even."""
    return torch.round(weights * MASS_SCALE).to(torch.int64)


def _prefix_mask(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The prefix that top-k and top-p keep, bool[R, V]; top_k in 1..V."""
    vocab = scaled.shape[-1]
    length, last, found = _probe(scaled, top_k, top_p, min(PROBED_TOKENS, vocab))
    if not bool(found.all()):
        long = (~found).nonzero().squeeze(-1)
        length[long], last[long], _ = _probe(scaled[long], top_k[long], top_p[long], vocab)
    return _first_of_order(scaled, length, last)


def _probe(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Look for the end of the prefix among the *width* largest tokens.

    Returns its length int64[R], the z of its last token A[R], and bool[R]: it was found.
    Which of several tied tokens come first does not matter: only values are read.
    """
    largest = _largest(scaled, width)
    mass = integer_mass(torch.exp(largest - largest[:, :1])).cumsum(dim=-1)
    total = _mass_of_first(scaled, mass, top_k)
    target = _target_mass(top_p, total)
    crossing = (mass < target.unsqueeze(-1)).sum(dim=-1) + 1
    length = torch.where(top_p < 1, torch.minimum(crossing, top_k), top_k)
    known = (top_k <= width) | (top_k == scaled.shape[-1])
    found = known & (length <= width)
    last = largest.gather(-1, length.clamp(max=width).unsqueeze(-1) - 1).squeeze(-1)
    return length, last, found


def _largest(scaled: torch.Tensor, width: int) -> torch.Tensor:
    """The *width* largest values of each row, descending: a selection, or a sort of all."""
    if width == scaled.shape[-1]:
        return torch.sort(scaled, dim=-1, descending=True).values
    return torch.topk(scaled, width).values


def _mass_of_first(scaled: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Mass of the first top_k tokens, int64[R]: from the running sums, or of the whole row."""
    total = mass.gather(-1, top_k.clamp(max=mass.shape[-1]).unsqueeze(-1) - 1).squeeze(-1)
    beyond = (top_k > mass.shape[-1]).nonzero().squeeze(-1)
    if beyond.numel():
        total[beyond] = integer_mass(relative_weights(scaled[beyond])).sum(dim=-1)
    return total


def _target_mass(top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """ceil(p * S) in float64 as int64, at most S."""
    return torch.minimum(torch.ceil(top_p * total.to(torch.float64)).to(torch.int64), total)


def _first_of_order(scaled: torch.Tensor, length: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The first *length* tokens by (z descending, id ascending), given the last one's z."""
    above = scaled > last.unsqueeze(-1)
    tied = scaled == last.unsqueeze(-1)
    admitted = (length - above.sum(dim=-1)).unsqueeze(-1)
    return above | (tied & (tied.cumsum(dim=-1) <= admitted))
