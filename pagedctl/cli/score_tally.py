"""What a run of scores amounts to: counts, the manifest's metrics, and the last line."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pagedctl.cli.words import count_of
from pagedctl.engine.request import Capacity, Scores, Stats
from pagedctl.engine.score_lines import ScoreLine
from pagedctl.errors import Fault, RequestError


class ScoreTally:
    """Counts sequences as they are scored, refused, skipped and failed.

    ``wall_s`` is the time in the engine, without reading and writing.
    """

    def __init__(self, *, num_skipped: int = 0) -> None:
        self.num_completed = 0
        self.num_failed = 0
        self.num_refused = 0
        self.num_skipped = num_skipped
        self.prompt_tokens = 0
        self.scored_tokens = 0
        self.wall_s = 0.0
        self._late: list[Fault] = []

    @property
    def num_answered(self) -> int:
        """Sequences that came back, scored or failed."""
        return self.num_completed + self.num_failed

    def timed(self, found: Iterator[Scores]) -> Iterator[Scores]:
        """*found*, the time spent in it counted into ``wall_s``."""
        while True:
            started_s = time.perf_counter()
            try:
                scores = next(found, None)
            finally:
                self.wall_s += time.perf_counter() - started_s
            if scores is None:
                return
            yield scores

    def refuse(self, error: RequestError | None = None) -> None:
        """A line without an answer; *error* where the engine refused it."""
        self.num_refused += 1
        self._late += error.faults if error is not None else ()

    def finish(self, line: ScoreLine, scores: Scores) -> None:
        """One sequence, scored or failed."""
        if scores.error is not None:
            self.num_failed += 1
            self._late.append(scores.error.fault)
            return
        self.num_completed += 1
        self.prompt_tokens += line.sequence.start
        self.scored_tokens += len(scores.logprobs)

    def problems(self) -> RequestError | None:
        """What the engine refused and what failed mid-run, as one error; None if nothing."""
        return RequestError.of_kind("bad_field", self._late) if self._late else None

    def metrics(
        self, stats: Stats | None, capacity: Capacity | None, *, end_to_end_s: float
    ) -> dict[str, object]:
        """The manifest's ``metrics``; None is what was not measured.

        ``prompt_tokens`` are those before ``start``, of completed sequences.
        *end_to_end_s* has reading and writing in it. *stats* None: no engine.
        """
        total_tokens = self.prompt_tokens + self.scored_tokens
        return {
            "wall_s": self.wall_s,
            "requests_completed": self.num_completed,
            "requests_failed": self.num_failed,
            "requests_refused": self.num_refused,
            "lines_skipped": self.num_skipped,
            "prompt_tokens": self.prompt_tokens,
            "scored_tokens": self.scored_tokens,
            "scored_tokens_per_s": _rate(self.scored_tokens, self.wall_s),
            "total_tokens_per_s": _rate(total_tokens, self.wall_s),
            "tokens_per_s_end_to_end": _rate(
                self.scored_tokens, end_to_end_s if self.wall_s else 0.0
            ),
            "requests_per_s": _rate(self.num_completed, self.wall_s),
            "kv_tokens": capacity.kv_tokens if capacity else None,
            "preemptions": stats.preemptions if stats else None,
            "forward_tokens": stats.forward_tokens if stats else None,
            "prefix_hit_tokens": stats.prefix_hit_tokens if stats else None,
        }

    def summary(self, stats: Stats | None) -> str:
        """The run in one line."""
        rate = _rate(self.scored_tokens, self.wall_s) or 0.0
        parts = [
            count_of(self.num_completed, "sequence"),
            f"{count_of(self.scored_tokens, 'token')} scored",
            f"{self.wall_s:,.1f} s",
            f"{rate:,.0f} scored tokens/s",
            f"prefix hits {stats.prefix_hit_tokens if stats else 0:,}",
            f"preemptions {stats.preemptions if stats else 0:,}",
        ]
        counts = {
            "failed": self.num_failed,
            "refused": self.num_refused,
            "skipped": self.num_skipped,
        }
        return " · ".join(
            [*parts, *(f"{name} {count:,}" for name, count in counts.items() if count)]
        )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
