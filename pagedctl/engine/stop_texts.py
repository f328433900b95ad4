"""The stop texts of one sample, found in its text as it grows. No torch, no tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedctl.models.text_stream import TextStream


@dataclass(frozen=True, kw_only=True)
class StopMatch:
    """A stop text that ended a sample, and the completion's final text."""

    stop: str
    text: str


class StopTexts:
    """Looks for stop texts in the text of one sample, and keeps that text.

    A match starts and ends anywhere, in a token or over several. The stop text that is
    complete first wins; of those that are complete at the same character, the longest. So the
    result depends on the text and not on how it is cut into tokens. The time of a token
    depends on the stop texts and on its own text, not on the text before it.

    Example: of stop texts ("unknown", "stop2"), tokens "a", "sto", "p2!" give at the third
    ``StopMatch(stop="stop2", text="a")``, or text "astop2" with *include_stop*.
    """

    def __init__(
        self,
        stops: Sequence[str],
        stream: TextStream,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """*stops* are one or more texts, none empty. *stream* has had no token.

        The text is cut before the match, or behind it with *include_stop*. A match has to be
        complete in text that came after the first *min_tokens* tokens; it may start before.
        """
        if not stops or "" in stops:
            raise ValueError(f"stops are one or more texts, none empty, not {tuple(stops)}")
        self._stops = tuple(stops)
        self._stream = stream
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._parts: list[str] = []
        self._tail = ""
        self._tail_size = max(map(len, stops)) - 1

    def push(self, token_id: int) -> StopMatch | None:
        """The match that *token_id* completes, if any. No token may be pushed after a match."""
        new = self._stream.push(token_id)
        self._num_tokens += 1
        if not new:
            return None
        window, start = self._tail + new, len(self._tail)
        self._parts.append(new)
        self._tail = window[max(0, len(window) - self._tail_size) :]
        if self._num_tokens <= self._min_tokens:
            return None
        found = first_completed(self._stops, window, start)
        return None if found is None else self._match(found[0], len(window) - found[1])

    def finish(self) -> str:
        """The whole text, for a sample that no stop text ended. Nothing may be pushed then."""
        self._parts.append(self._stream.finish())
        return "".join(self._parts)

    def _match(self, stop: str, num_after: int) -> StopMatch:
        """*num_after* characters came after the match."""
        text = "".join(self._parts)
        end = len(text) - num_after
        return StopMatch(stop=stop, text=text[: end if self._include_stop else end - len(stop)])


def first_completed(stops: Sequence[str], window: str, start: int) -> tuple[str, int] | None:
    """The stop that ends first in *window* behind its first *start* characters, and that end."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        place = window.find(stop, max(0, start + 1 - len(stop)))
        if place >= 0:
            found = (place + len(stop), -len(stop), stop)
            best = found if best is None else min(best, found)
    return None if best is None else (best[2], best[0])
