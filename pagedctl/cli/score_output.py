"""Where scores go: lines of a new file, lines on stdout, or nowhere (a mere check)."""

from __future__ import annotations

from typing import Protocol

from pagedctl.cli.completion_output import FileOutput, LinesOutput
from pagedctl.engine.request import RequestId, Scores
from pagedctl.engine.score_lines import refused_score_line, score_line
from pagedctl.errors import RequestError


class ScoreOutput(Protocol):
    """Takes scores in the order they finish; each is out when the call returns."""

    def scores(self, scores: Scores) -> None:
        """One sequence, scored or failed."""

    def refused(self, id: RequestId | None, sample: int, error: RequestError) -> None:
        """A line that was not scored."""

    def close(self) -> None:
        """Nothing follows; what was written is durable where that is possible."""


class ScoreFile(FileOutput):
    """Score lines of a new file."""

    def scores(self, scores: Scores) -> None:
        self.append_line(score_line(scores))

    def refused(self, id: RequestId | None, sample: int, error: RequestError) -> None:
        self.append_line(refused_score_line(id, sample, error))


class ScoreStream(LinesOutput):
    """Score lines on a stream."""

    def scores(self, scores: Scores) -> None:
        self.write_line(score_line(scores))

    def refused(self, id: RequestId | None, sample: int, error: RequestError) -> None:
        self.write_line(refused_score_line(id, sample, error))


class NoScores:
    """A check without an output: only the comparison counts."""

    def scores(self, scores: Scores) -> None:
        """Compared elsewhere."""

    def refused(self, id: RequestId | None, sample: int, error: RequestError) -> None:
        """Refusals stand on stderr already."""

    def close(self) -> None:
        """Nothing was opened."""
