"""The logprobs of given tokens, as steps deliver them: one object per request. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pagedctl.engine.request import Floats


class PromptScores:
    """Logprobs of ``tokens[start:end]``, each given all tokens before it.

    All samples of a request share one: what one of them delivered, no other computes again.
    ``num_scored`` tokens from ``start`` on are known; ``scorer`` is the running sample that
    delivers them.
    """

    def __init__(self, *, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.num_scored = 0
        self.scorer: object | None = None
        self._values = np.zeros(end - start, dtype=np.float32)

    @property
    def is_complete(self) -> bool:
        return self.num_scored == self.end - self.start

    @property
    def first_position(self) -> int:
        """The first position that must be computed: it predicts the first unknown logprob.

        A sequence may find its keys and values before it in the cache, and no further.
        """
        return self.start + self.num_scored - 1

    def offsets(self, start: int, count: int) -> tuple[int, int]:
        """Which of the positions ``[start, start + count)`` to score, as offsets [first, end)."""
        first = max(self.first_position, start) - start
        end = min(self.end - 1 - start, count)
        return (first, end) if first < end else (0, 0)

    def deliver(self, position: int, logprobs: Floats) -> None:
        """Keep the logprobs of the tokens that *position* and those after it predict."""
        first = position + 1 - self.start
        if first > self.num_scored:
            raise RuntimeError(f"scores from {first} on, but only {self.num_scored} are known")
        self._values[first : first + len(logprobs)] = logprobs
        self.num_scored = max(self.num_scored, first + len(logprobs))

    def values(self) -> Floats:
        """float32[end - start]; zero where unknown."""
        return self._values.copy()
