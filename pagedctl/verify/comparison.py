"""Two answers to one request, bit for bit; where they first differ. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pagedctl.engine.request import Completion, RequestId, TopLogprobs
from pagedctl.verify.float_bits import bits, ulps

Kind = Literal[
    "failure", "token", "top token", "prompt logprob", "logprob", "top logprob", "length"
]
KINDS: tuple[Kind, ...] = (
    "failure",
    "token",
    "top token",
    "prompt logprob",
    "logprob",
    "top logprob",
    "length",
)
"""In the order in which they are told where several differ at one position."""

Value = int | str | np.float32 | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What of a sample is compared.

    ``token_ids`` int32[N] and ``logprobs`` float32[N] are of the sequence's positions from
    ``start`` on; ``prompt_logprobs`` float32[P], if asked for, of the positions from 1 on.
    ``failure`` is the kind of a request that failed mid-run.
    """

    start: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    prompt_logprobs: NDArray[np.float32] | None = None
    top: TopLogprobs | None = None
    failure: str | None = None

    def part(self, first: int, end: int | None) -> Answer:
        """The answer's output tokens [first, end); the prompt's logprobs if it starts at 0."""
        chosen = slice(first, end)
        top = self.top
        if top is not None:
            ids, logprobs = top.token_ids[chosen], top.logprobs[chosen]
            top = TopLogprobs(token_ids=ids, logprobs=logprobs)
        return Answer(
            start=self.start + first,
            token_ids=self.token_ids[chosen],
            logprobs=self.logprobs[chosen],
            prompt_logprobs=self.prompt_logprobs if first == 0 else None,
            top=top,
            failure=self.failure,
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two answers differ.

    ``position`` is the token's index in the sequence, prompt included. ``ulps`` counts steps
    between neighbouring float32 values, None where ids or lengths differ.
    """

    kind: Kind
    position: int
    expected: Value
    found: Value
    ulps: int | None = None

    def sentence(self) -> str:
        """``position 41, logprob -1.25 became -1.2500001, 1 ulp``."""
        distance = "" if self.ulps is None else f", {_counted(self.ulps)}"
        change = f"{self.kind} {self.expected!s} became {self.found!s}"
        return f"position {self.position}, {change}{distance}"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A difference, and the request and run in which it was found.

    ``request_id`` is that of the request whose answer is known; the run may have asked for part
    of it under the name ``asked_id``.
    """

    case: str
    run: str
    request_id: RequestId
    asked_id: RequestId
    sample: int
    difference: Difference

    def sentence(self) -> str:
        name = f'"{self.request_id}"' if isinstance(self.request_id, str) else str(self.request_id)
        return (
            f"case {self.case}, run {self.run}: request {name}, sample {self.sample}, "
            f"{self.difference.sentence()}"
        )

    def to_json_object(self) -> dict[str, object]:
        """What the manifest says of it."""
        found = self.difference
        return {
            "case": self.case,
            "run": self.run,
            "id": self.request_id,
            "sample": self.sample,
            "kind": found.kind,
            "position": found.position,
            "expected": found.expected,
            "found": found.found,
            "ulps": found.ulps,
        }


def answer_of(completion: Completion) -> Answer:
    """What of *completion* is compared."""
    return Answer(
        start=len(completion.prompt_token_ids),
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        prompt_logprobs=completion.prompt_logprobs,
        top=completion.top_logprobs,
        failure=None if completion.error is None else completion.error.kind,
    )


def first_difference(expected: Answer, found: Answer) -> Difference | None:
    """Where *found* first departs from *expected*, in a token id, a bit or a length."""
    places = list(_differences(expected, found))
    return min(places, key=lambda one: (one.position, KINDS.index(one.kind)), default=None)


def _differences(expected: Answer, found: Answer) -> Iterator[Difference]:
    """The first difference of each kind."""
    count = min(len(expected.token_ids), len(found.token_ids))
    start = expected.start
    if expected.failure != found.failure:
        yield Difference(
            kind="failure",
            position=start + count,
            expected=expected.failure,
            found=found.failure,
        )
    if len(expected.token_ids) != len(found.token_ids):
        yield Difference(
            kind="length",
            position=start + count,
            expected=len(expected.token_ids),
            found=len(found.token_ids),
        )
    yield from _ids("token", start, expected.token_ids[:count], found.token_ids[:count])
    yield from _floats("logprob", start, expected.logprobs[:count], found.logprobs[:count])
    yield from _prompt(expected.prompt_logprobs, found.prompt_logprobs)
    yield from _top(start, count, expected.top, found.top)


def _prompt(
    expected: NDArray[np.float32] | None, found: NDArray[np.float32] | None
) -> Iterator[Difference]:
    if expected is not None and found is not None and len(expected) == len(found):
        yield from _floats("prompt logprob", 1, expected, found)
    elif expected is not None or found is not None:
        counts = [None if one is None else len(one) for one in (expected, found)]
        yield Difference(kind="prompt logprob", position=1, expected=counts[0], found=counts[1])


def _top(
    start: int, count: int, expected: TopLogprobs | None, found: TopLogprobs | None
) -> Iterator[Difference]:
    if expected is None and found is None:
        return
    if expected is None or found is None or expected.token_ids.shape[1] != found.token_ids.shape[1]:
        widths = [None if one is None else one.token_ids.shape[1] for one in (expected, found)]
        yield Difference(kind="top token", position=start, expected=widths[0], found=widths[1])
        return
    yield from _ids("top token", start, expected.token_ids[:count], found.token_ids[:count])
    yield from _floats("top logprob", start, expected.logprobs[:count], found.logprobs[:count])


def _ids(
    kind: Kind, start: int, expected: NDArray[np.int32], found: NDArray[np.int32]
) -> Iterator[Difference]:
    places = np.argwhere(expected != found)
    if len(places):
        first = tuple(places[0])
        yield Difference(
            kind=kind,
            position=start + int(first[0]),
            expected=int(expected[first]),
            found=int(found[first]),
        )


def _floats(
    kind: Kind, start: int, expected: NDArray[np.float32], found: NDArray[np.float32]
) -> Iterator[Difference]:
    places = np.argwhere(bits(expected) != bits(found))
    if len(places):
        first = tuple(places[0])
        one, other = expected[first], found[first]
        yield Difference(
            kind=kind,
            position=start + int(first[0]),
            expected=one,
            found=other,
            ulps=int(ulps(np.atleast_1d(one), np.atleast_1d(other))[0]),
        )


def _counted(number: int) -> str:
    return f"{number:,} ulp{'' if number == 1 else 's'}"
