"""The lines that an output holds already, and what is left of the work. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from pagedctl.engine.jsonl import RefusedLine
from pagedctl.engine.request import Request, RequestId
from pagedctl.engine.request_check import is_request_id
from pagedctl.engine.request_faults import spelled
from pagedctl.errors import ConfigError, Fault
from pagedctl.manifest import strict_json


@dataclass(frozen=True, kw_only=True)
class CompletedLines:
    """What an output holds: whole lines, each of one sample or of one refused request.

    ``size_bytes`` are those of whole lines; ``torn_bytes`` follow them, of a line whose writing
    was cut short. ``samples`` are the sample numbers of each request that has any, failed ones
    included; ``failed`` the requests with a failed sample. ``refusals`` counts the lines of
    refused requests by id, which is None where none could be read. ``num_errors`` are the lines
    of refusals and failures.
    """

    num_lines: int = 0
    num_errors: int = 0
    size_bytes: int = 0
    torn_bytes: int = 0
    samples: Mapping[RequestId, frozenset[int]] = field(default_factory=dict)
    failed: frozenset[RequestId] = frozenset()
    refusals: Mapping[RequestId | None, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A request and the numbers of those of its samples that have no line."""

    request: Request
    samples: Sequence[int]


def open_refusals(
    refused: Iterable[RefusedLine], completed: CompletedLines
) -> tuple[RefusedLine, ...]:
    """Those of *refused*, in input order, that have no line in the output.

    The same input is refused the same way each time and is written in order, so the k-th line
    of an id (or of none) is that of its k-th refusal.
    """
    written = Counter(completed.refusals)
    found = []
    for line in refused:
        if written[line.id]:
            written[line.id] -= 1
        else:
            found.append(line)
    return tuple(found)


def open_requests(
    requests: Iterable[Request], refused: Iterable[RefusedLine], completed: CompletedLines
) -> tuple[OpenRequest, ...]:
    """Those of *requests*, in input order, of which a sample has no line in the output.

    Lines of *refused* come before any request runs. One refusal more of an id than they have is
    that of its request, which the engine refused.
    """
    beyond = Counter(completed.refusals)
    beyond.subtract(line.id for line in refused)
    found = []
    for request in requests:
        done = completed.samples.get(request.id)
        samples: Sequence[int] = range(request.params.n)
        if done is not None:
            samples = tuple(one for one in samples if one not in done)
        elif beyond[request.id] > 0:
            samples = ()
        if samples:
            found.append(OpenRequest(request=request, samples=samples))
    return tuple(found)


def read_completed_lines(
    stream: IO[bytes],
    where: str,
    *,
    requests: Iterable[Request],
    refused: Iterable[RefusedLine],
) -> CompletedLines:
    """The lines of an output of *requests* and *refused*, read from the start of *stream*.

    Bytes after the last line end are of a torn line. Raises ConfigError with every whole line
    that is damaged, or belongs to another input; *where* names the output.
    """
    books = _Books(where, requests, refused)
    number = size_bytes = torn_bytes = 0
    for raw in stream:
        if not raw.endswith(b"\n"):
            torn_bytes = len(raw)
            break
        number += 1
        size_bytes += len(raw)
        books.add(number, raw)
    if books.faults:
        raise ConfigError.of(books.faults)
    return CompletedLines(
        num_lines=number,
        num_errors=books.num_errors,
        size_bytes=size_bytes,
        torn_bytes=torn_bytes,
        samples={one: frozenset(samples) for one, samples in books.samples.items()},
        failed=frozenset(books.failed),
        refusals=books.refusals,
    )


class _Damage(Exception):
    """A line cannot stand in this output; the text says why."""


class _Books:
    """Enters lines one by one, each against what the input allows."""

    def __init__(
        self, where: str, requests: Iterable[Request], refused: Iterable[RefusedLine]
    ) -> None:
        self._where = where
        self._requests = {one.id: one for one in requests}
        self._refusable = Counter(line.id for line in refused)
        self._refusable.update(self._requests.keys())
        self.num_errors = 0
        self.samples: dict[RequestId, set[int]] = {}
        self.failed: set[RequestId] = set()
        self.refusals: Counter[RequestId | None] = Counter()
        self.faults: list[Fault] = []

    def add(self, number: int, raw: bytes) -> None:
        try:
            line = self._parsed(number, raw)
            if "error" in line and "token_ids" not in line:
                self._add_refusal(line)
            else:
                self._add_sample(line)
            self.num_errors += "error" in line
        except _Damage as damage:
            self.faults.append(
                Fault(
                    what=str(damage),
                    where=f"{self._where}, line {number}",
                    rule="an output is resumed from whole lines, one for each sample of this input",
                    remedy="remove the line, and its sample is completed again; or name a new "
                    "output",
                )
            )

    def _parsed(self, number: int, raw: bytes) -> Mapping[str, object]:
        try:
            line = strict_json.loads(raw, where=self._where, first_line=number)
        except ConfigError as error:
            raise _Damage(f"the line is damaged: {error.what}") from None
        if not isinstance(line, dict):
            raise _Damage(f"the line holds {spelled(line)}, not an object")
        return line

    def _add_refusal(self, line: Mapping[str, object]) -> None:
        found = line.get("id")
        request_id = None if found is None else _id_of(found)
        if self.refusals[request_id] == self._refusable[request_id]:
            raise _Damage(f"the input has no further request of id {spelled(found)} to refuse")
        self.refusals[request_id] += 1

    def _add_sample(self, line: Mapping[str, object]) -> None:
        request_id = _id_of(line.get("id"))
        request = self._requests.get(request_id)
        if request is None:
            raise _Damage(f"the input has no request of id {spelled(request_id)}")
        sample = line.get("sample")
        if type(sample) is not int or not 0 <= sample < request.params.n:
            numbers = f"0 to {request.params.n - 1}"
            raise _Damage(f"sample {spelled(sample)} is none of the request's samples {numbers}")
        if line.get("prompt_token_ids") != list(request.prompt_token_ids):
            raise _Damage(f"the prompt of id {spelled(request_id)} is another than the input's")
        if not _has_a_logprob_per_token(line):
            raise _Damage("the line has not one logprob for each token")
        done = self.samples.setdefault(request_id, set())
        if sample in done:
            raise _Damage(f"sample {sample} of id {spelled(request_id)} has an earlier line")
        done.add(sample)
        if "error" in line:
            self.failed.add(request_id)


def _id_of(value: object) -> RequestId:
    if not is_request_id(value):
        raise _Damage(f"the id {spelled(value)} is not text or an integer")
    assert isinstance(value, int | str)
    return value


def _has_a_logprob_per_token(line: Mapping[str, object]) -> bool:
    token_ids, logprobs = line.get("token_ids"), line.get("logprobs")
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        return False
    return len(token_ids) == len(logprobs)
