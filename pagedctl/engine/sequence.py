"""One sample in flight: its tokens and one counter of what has been computed. No torch.

There is no prefill phase and no decode phase. A sequence is ``tokens`` plus
``num_computed_tokens``; a step computes some of the rest, and samples where it reaches the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedctl.engine.request import FinishReason, Request, RequestFailure

IN_FLIGHT = -1
"""Stands for a token that was sampled on the device and has not been committed yet."""


@dataclass(kw_only=True)
class Sequence:
    """A sample of a request while it is scheduled.

    ``tokens`` are prompt and output, sampled tokens standing as IN_FLIGHT until they are
    committed. ``num_computed_tokens`` counts the tokens whose KV is (or will be, once the
    launched steps end) in the cache. ``max_len`` bounds ``len(tokens)``. ``row`` is the index
    of its device row while it runs.

    Example: prompt (5, 6, 7), first step schedules 3 tokens and samples: ``tokens=[5, 6, 7,
    -1]``, ``num_computed_tokens=3``; the next step feeds the fourth token.
    """

    request: Request
    sample: int
    seed: int
    max_len: int
    stop_token_ids: frozenset[int]
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int | None = None
    logprobs: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    failure: RequestFailure | None = None
    weight_version_first: int | None = None
    weight_version_last: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.logprobs)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def is_full(self) -> bool:
        """Whether its last token has been sampled, so that nothing is left to schedule."""
        return len(self.tokens) >= self.max_len

    def append_in_flight(self) -> None:
        """Count a token that the launched step samples."""
        self.tokens.append(IN_FLIGHT)
        self.num_in_flight += 1

    def commit(self, token: int, logprob: float) -> None:
        """Replace the oldest in-flight token by its value, and decide whether it ends here."""
        position = len(self.tokens) - self.num_in_flight
        self.tokens[position] = token
        self.num_in_flight -= 1
        self.logprobs.append(logprob)
        if self.weight_version_first is None:
            self.weight_version_first = self.weight_version_last
        if token in self.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif position + 1 >= self.max_len:
            self.finish_reason = "length"

    def fail(self, failure: RequestFailure) -> None:
        """End here without an answer; what was committed before is kept."""
        self.failure = failure

    def committed_tokens(self) -> list[int]:
        """The committed output tokens."""
        start = self.num_prompt_tokens
        return self.tokens[start : start + self.num_output_tokens]

    def rewind(self) -> None:
        """Forget the computed KV; tokens, stream and results are kept."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1
