"""Which keys the rows of one part do not see: the same in every layer, so worked out once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedctl_kernels.house import TILE_KEYS


@dataclass(frozen=True)
class Mask:
    """Of I items with n tiles and h rows.

    ``hidden`` bool[I, n, h, 64]: the row does not see the key. ``unseen`` int64: places, in
    values viewed [I * n * 64, Dh], of keys that no row of their item sees.
    """

    hidden: torch.Tensor
    unseen: torch.Tensor

    def hide(self, scores: torch.Tensor, v: torch.Tensor) -> None:
        """In place: hidden scores A[I, n, h, 64] become -infinity, unseen values
        A[I, n, 64, Dh] become zero (what lies there may be anything)."""
        scores.masked_fill_(self.hidden, -torch.inf)
        v.view(-1, v.shape[-1]).index_fill_(0, self.unseen, 0)


def build_mask(
    positions: torch.Tensor, first_key: torch.Tensor, tiles: int, window: int | None
) -> Mask:
    """The mask of items whose rows are at *positions* int64[I, h], and whose first tiles' first
    keys are at *first_key* int64[I]."""
    items, rows = positions.shape
    at = positions.view(items, 1, rows, 1)
    keys = first_key.unsqueeze(1) + torch.arange(tiles * TILE_KEYS)
    keys = keys.view(items, tiles, 1, TILE_KEYS)
    first, last = at.amin(dim=2, keepdim=True), at.amax(dim=2, keepdim=True)
    unseen = ~visible_keys(keys, first, last, window)
    return Mask(
        hidden=~visible_keys(keys, at, at, window),
        unseen=unseen.view(-1).nonzero().squeeze(-1),
    )


def visible_keys(
    keys: torch.Tensor, first: torch.Tensor, last: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Which key positions any of the rows at positions first..last sees, as bool; broadcasts.

    A row at p sees key j iff j <= p and, with a window of W keys, j > p - W.
    """
    visible = keys <= last
    if window is not None:
        visible &= keys > first - window
    return visible
