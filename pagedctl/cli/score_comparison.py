"""Logprobs against those that the lines carry, float32 bit for bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from pagedctl.engine.request import RequestId, Scores
from pagedctl.engine.score_lines import ScoreLine
from pagedctl.manifest.schema import Verdict
from pagedctl.verify.float_bits import bits, ulps


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first unequal logprob of one sequence.

    ``position`` is the token's index in the sequence, prompt included. ``ulps`` counts steps
    between neighbouring float32 values, -0.0 and 0.0 being neighbours; it is never 0.
    """

    id: RequestId
    sample: int
    position: int
    token_id: int
    line_logprob: np.float32
    scored_logprob: np.float32
    ulps: int

    def sentence(self) -> str:
        name = f'"{self.id}"' if isinstance(self.id, str) else str(self.id)
        return (
            f"first difference: id {name}, sample {self.sample}, position {self.position}, "
            f"token {self.token_id}: the line has {self.line_logprob!s}, "
            f"scored {self.scored_logprob!s}, ulps {self.ulps:,}"
        )


class Comparison:
    """Counts sequences whose logprobs are equal; remembers the first that differ, in line order."""

    def __init__(self) -> None:
        self.num_equal = 0
        self.num_differing = 0
        self.num_tokens = 0
        self.num_tokens_differing = 0
        self.max_ulps = 0
        self.first: Difference | None = None
        self._first_line = 0

    def compare(self, line: ScoreLine, scores: Scores) -> None:
        """Compare *scores*, which have no error, with the logprobs of their *line*."""
        given = np.array(line.logprobs, dtype=np.float32)
        if scores.logprobs.dtype != np.float32 or scores.logprobs.shape != given.shape:
            raise RuntimeError(f"{line.id}: {given.shape} and {scores.logprobs.shape} logprobs")
        (places,) = (bits(given) != bits(scores.logprobs)).nonzero()
        self.num_tokens += len(given)
        self.num_tokens_differing += len(places)
        if not len(places):
            self.num_equal += 1
            return
        self.num_differing += 1
        distances = ulps(given[places], scores.logprobs[places])
        self.max_ulps = max(self.max_ulps, int(distances.max()))
        if self.first is None or line.line_number < self._first_line:
            self._first_line = line.line_number
            self.first = _difference(line, scores, int(places[0]), given, int(distances[0]))

    def verdict(self, num_lines: int) -> Verdict:
        """Of *num_lines* to compare. One difference is a no; without one, all must be equal.

        There is no answer where a line was not compared, or nothing was.
        """
        text = f"equal {self.num_equal:,} of {num_lines:,}"
        if self.num_differing:
            return Verdict(holds=False, text=text)
        whole = self.num_equal == num_lines and self.num_tokens > 0
        return Verdict(holds=True if whole else None, text=text)

    def metrics(self) -> dict[str, object]:
        """What the manifest says of it."""
        return {
            "requests_equal": self.num_equal,
            "requests_differing": self.num_differing,
            "tokens_compared": self.num_tokens,
            "tokens_differing": self.num_tokens_differing,
            "max_ulps": self.max_ulps,
            "first_difference": None if self.first is None else asdict(self.first),
        }


def _difference(
    line: ScoreLine, scores: Scores, place: int, given: NDArray[np.float32], distance: int
) -> Difference:
    position = line.sequence.start + place
    return Difference(
        id=line.id,
        sample=line.sample,
        position=position,
        token_id=line.sequence.token_ids[position],
        line_logprob=given[place],
        scored_logprob=scores.logprobs[place],
        ulps=distance,
    )
