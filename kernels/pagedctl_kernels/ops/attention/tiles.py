"""The arithmetic of attention on the CPU: states of splits, and their merge.

A *state* is (m, l, a): running maximum A[..., h], sum A[..., h], accumulator A[..., h, Dh] of
h query rows. The empty state is (-infinity, 0, 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pagedctl_kernels.ops.halving_tree import halving_tree_sum


@dataclass(frozen=True)
class State:
    """States of several splits or units; the fields' first dimension counts them."""

    maximum: torch.Tensor
    total: torch.Tensor
    accumulator: torch.Tensor

    def at(self, index: torch.Tensor) -> State:
        return State(self.maximum[index], self.total[index], self.accumulator[index])

    def put(self, index: torch.Tensor | slice, other: State) -> None:
        self.maximum[index] = other.maximum
        self.total[index] = other.total
        self.accumulator[index] = other.accumulator


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2^x as exp(fl(x * ln 2)); overwrites x. exp2(-infinity) is 0 and exp2(0) is 1, exactly.

    torch.exp2 rounds the end of a vector otherwise than its middle (61 of 1,000 values), so a
    row's bits would follow its place in the batch; torch.exp gives a value the same bits
    anywhere.
    """
    return x.mul_(math.log(2)).exp_()


def score_tiles(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """z A[I, n, h, 64] = fl(q k^T * scale), not masked yet.

    q A[I, h, Dh], k A[I, n, 64, Dh]; one [h, Dh] x [Dh, 64] product a tile, whose bits are
    those of the 16-row block.
    """
    items, tiles, keys, head_dim = k.shape
    queries = q.unsqueeze(1).expand(-1, tiles, -1, -1).reshape(items * tiles, -1, head_dim)
    scores = torch.bmm(queries, k.view(-1, keys, head_dim).transpose(1, 2))
    return scores.view(items, tiles, -1, keys).mul_(scale)


def split_states(scores: torch.Tensor, v: torch.Tensor, p_dtype: torch.dtype) -> State:
    """The state of each split from its tiles' scores A[I, n, h, 64] and v A[I, n, 64, Dh].

    Tiles in order: m' = max(m, max z), f = exp2(m - m'), P = exp2(z - m') rounded to
    *p_dtype*, l' = fl(l * f) + halving-tree sum of P, a' = fl(a * f) + P v. Everything but
    the recurrences of l and a is computed for all tiles at once.
    """
    maxima = running_maximum(scores.amax(dim=-1))
    offset = finite(maxima)
    probabilities = exp2(scores - offset.unsqueeze(-1)).to(p_dtype).to(scores.dtype)
    sums = halving_tree_sum(probabilities)
    items, tiles, rows, keys = scores.shape
    values = torch.bmm(probabilities.view(-1, rows, keys), v.view(items * tiles, keys, -1)).view(
        items, tiles, rows, -1
    )
    factors = exp2(maxima[:, :-1] - offset[:, 1:])
    total, accumulator = sums[:, 0], values[:, 0]
    for tile in range(1, tiles):
        factor = factors[:, tile - 1]
        total = total * factor + sums[:, tile]
        accumulator = accumulator * factor.unsqueeze(-1) + values[:, tile]
    return State(maxima[:, -1], total, accumulator)


def merge(left: State, right: State) -> State:
    """The state of two neighbouring ranges of keys; an empty one changes nothing."""
    maximum = torch.maximum(left.maximum, right.maximum)
    offset = finite(maximum)
    f, g = exp2(left.maximum - offset), exp2(right.maximum - offset)
    total = left.total * f + right.total * g
    accumulator = left.accumulator * f.unsqueeze(-1) + right.accumulator * g.unsqueeze(-1)
    return State(maximum, total, accumulator)


def output_rows(state: State, dtype: torch.dtype) -> torch.Tensor:
    """y D[..., h, Dh] = fl(fl(a + 0) / l), rounded once; + 0 gives zero one sign."""
    return ((state.accumulator + 0) / state.total.unsqueeze(-1)).to(dtype)


def running_maximum(maxima: torch.Tensor) -> torch.Tensor:
    """Maximum over each tile and those before it: A[I, n, h] -> the same shape."""
    so_far = [maxima[:, 0]]
    for tile in range(1, maxima.shape[1]):
        so_far.append(torch.maximum(so_far[-1], maxima[:, tile]))
    return torch.stack(so_far, dim=1)


def finite(maximum: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: 0 where nothing was seen, so that exp2 gives 0 and not NaN."""
    return maximum.masked_fill(maximum == -torch.inf, 0)
