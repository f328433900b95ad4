"""One sample in flight: its tokens and one counter of what has been computed. No torch.

There is no prefill phase and no decode phase. A sequence is ``tokens`` plus
``num_computed_tokens``; a step computes some of the rest, and samples where it reaches the end.
A sequence whose tokens are all given (a score) is the same thing, and samples nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedctl.engine.prefix_index import Link
from pagedctl.engine.prompt_scores import PromptScores
from pagedctl.engine.request import FinishReason, Request, RequestFailure
from pagedctl.engine.stop_texts import StopTexts

IN_FLIGHT = -1
"""Stands for a token that was sampled on the device and has not been committed yet."""

TopTokens = tuple[list[int], list[float]]
"""The likeliest token ids at one position, and their logprobs."""


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A sample of a request while it is scheduled.

    ``tokens`` are prompt and output, sampled tokens standing as IN_FLIGHT until they are
    committed. ``num_computed_tokens`` counts the tokens whose KV is (or will be, once the
    launched steps end) in the cache. ``max_len`` bounds ``len(tokens)``. ``row`` is the index
    of its device row while it runs. ``block_keys``, from ``root_key`` on, are the prefix keys of
    its first blocks as far as they were needed; the first ``num_shared`` of its blocks were found
    in the prefix cache, and of the others those before ``num_published`` were entered there;
    ``parent`` is what the next one stands behind. ``furthest`` is the most tokens it ever had
    computed before a preemption.

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
    prompt_scores: PromptScores | None = None
    stop_texts: StopTexts | None = None
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    blocks: list[int] = field(default_factory=list)
    root_key: bytes = b""
    block_keys: list[bytes] = field(default_factory=list)
    num_shared: int = 0
    num_published: int = 0
    parent: Link = field(default=b"", repr=False)
    furthest: int = 0
    row: int | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    cached_tokens: int | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None
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
    def is_scored(self) -> bool:
        """Whether it is there to be scored, and has been."""
        scores = self.prompt_scores
        given = self.num_prompt_tokens >= self.max_len
        return given and scores is not None and scores.is_complete

    @property
    def num_computable(self) -> int:
        """Tokens that steps may compute; the last token of a full sequence is never fed."""
        return min(len(self.tokens), self.max_len - 1)

    @property
    def num_schedulable(self) -> int:
        """Tokens that a step may compute now."""
        return self.num_computable - self.num_computed_tokens

    @property
    def num_skippable(self) -> int:
        """Tokens that need not be computed if their keys and values are found.

        The last one is: its hidden state gives the next token. So is every position whose
        logprob is asked for.
        """
        last = len(self.tokens) - 1
        return last if self.prompt_scores is None else min(last, self._first_unscored())

    def append_in_flight(self) -> None:
        """Count a token that the launched step samples."""
        self.tokens.append(IN_FLIGHT)
        self.num_in_flight += 1

    def commit(self, token: int, logprob: float, top: TopTokens | None = None) -> None:
        """Replace the oldest in-flight token by its value, and decide whether it ends here."""
        position = len(self.tokens) - self.num_in_flight
        self.tokens[position] = token
        self.num_in_flight -= 1
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        if self.weight_version_first is None:
            self.weight_version_first = self.weight_version_last
        if token in self.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self._meets_stop_text(token):
            self.finish_reason = "stop"
        elif position + 1 >= self.max_len:
            self.finish_reason = "length"

    def fail(self, failure: RequestFailure) -> None:
        """End here without an answer; what was committed before is kept."""
        self.failure = failure

    def abort(self) -> None:
        """End here because somebody cancelled it; what was committed before is kept."""
        self.finish_reason = "abort"

    def committed_tokens(self) -> list[int]:
        """The committed output tokens."""
        start = self.num_prompt_tokens
        return self.tokens[start : start + self.num_output_tokens]

    def rewind(self) -> None:
        """Forget the computed KV; tokens, stream and results are kept."""
        self.furthest = max(self.furthest, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.num_published = 0
        self.num_preemptions += 1

    def _meets_stop_text(self, token: int) -> bool:
        match = None if self.stop_texts is None else self.stop_texts.push(token)
        if match is not None:
            self.stop_reason, self.text = match.stop, match.text
        return match is not None

    def _first_unscored(self) -> int:
        scores = self.prompt_scores
        assert scores is not None
        return len(self.tokens) if scores.is_complete else scores.first_position
