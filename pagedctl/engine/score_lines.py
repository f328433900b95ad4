"""Score lines: sequences to score come in, scores go out, one JSON line each. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from pagedctl.config.kinds import Integer
from pagedctl.engine.params_check import of_kind
from pagedctl.engine.request import RequestId, ScoreRequest, Scores
from pagedctl.engine.request_check import check_id, is_request_id
from pagedctl.engine.request_faults import BrokenField, RequestFaults, spelled
from pagedctl.engine.score_fields import (
    IDS_FIELD,
    GivenSequence,
    ScoreLineRules,
    check_names,
    logprobs_of,
    sequence_of,
    temperature_of,
)
from pagedctl.errors import ConfigError, RequestError
from pagedctl.manifest import strict_json


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """A sequence to score, held compactly until its turn.

    ``where`` is the line's place in error messages. ``logprobs`` are the line's own, of the
    tokens from ``sequence.start`` on; None unless they are to be compared.
    """

    id: RequestId
    sample: int
    line_number: int
    where: str
    sequence: GivenSequence
    temperature: float
    logprobs: array[float] | None = None

    def request(self) -> ScoreRequest:
        return ScoreRequest(
            id=self.id,
            sample=self.sample,
            token_ids=tuple(self.sequence.token_ids),
            start=self.sequence.start,
            temperature=self.temperature,
        )


@dataclass(frozen=True, kw_only=True)
class RefusedScoreLine:
    """A line that cannot be scored; ``id`` is None where none could be read."""

    id: RequestId | None
    sample: int
    line_number: int
    error: RequestError


@dataclass(frozen=True, kw_only=True)
class SkippedLine:
    """An error line without tokens: a request that was refused has nothing to score."""

    line_number: int


FoundLine = ScoreLine | RefusedScoreLine | SkippedLine


def read_score_lines(
    lines: Iterable[tuple[int, bytes]], rules: ScoreLineRules
) -> Iterator[FoundLine]:
    """Each of *lines*, ``(number from 1, bytes)``, in order.

    One line at a time; only (id, sample) is remembered, because it is unique in a file.
    """
    reader = _Reader(rules)
    for number, line in lines:
        yield reader.of_line(number, line)


def score_line(scores: Scores) -> bytes:
    """The line of one sequence, line end included; an error line if it failed mid-run.

    float32 logprobs have the fewest digits that read back to the same bits.
    """
    if scores.error is not None:
        return _error_line(scores.id, scores.sample, asdict(scores.error))
    line = {
        "id": scores.id,
        "sample": scores.sample,
        "start": scores.start,
        "temperature": scores.temperature,
        "logprob_basis": scores.logprob_basis,
        "logprobs": scores.logprobs,
        "weight_version_first": scores.weight_version_first,
        "weight_version_last": scores.weight_version_last,
    }
    return strict_json.dumps(line) + b"\n"


def refused_score_line(id: RequestId | None, sample: int, error: RequestError) -> bytes:
    """The line of a sequence that was refused, with all its faults if there are several."""
    return _error_line(id, sample, {"kind": error.kind, **error.as_dict()})


def _error_line(id: RequestId | None, sample: int, problem: Mapping[str, object]) -> bytes:
    return strict_json.dumps({"id": id, "sample": sample, "error": problem}) + b"\n"


class _Reader:
    """Reads lines under one set of rules, and remembers what it has seen."""

    def __init__(self, rules: ScoreLineRules) -> None:
        self._rules = rules
        self._seen: set[tuple[str, int]] = set()

    def of_line(self, number: int, line: bytes) -> FoundLine:
        try:
            values = strict_json.loads(line, where=self._rules.source, first_line=number)
        except ConfigError as error:
            refusal = RequestError.of_kind("bad_json", error.faults)
            return RefusedScoreLine(id=None, sample=0, line_number=number, error=refusal)
        if isinstance(values, dict):
            return self._of_values(number, values)
        faults = RequestFaults(f"{self._rules.source}, line {number}")
        faults.add(None, _not_an_object(values))
        return RefusedScoreLine(id=None, sample=0, line_number=number, error=faults.error())

    def _of_values(self, number: int, line: Mapping[str, object]) -> FoundLine:
        """The sequence of a line's fields; null means absent, for every field."""
        values = {name: value for name, value in line.items() if value is not None}
        faults = RequestFaults(self._where(number, values))
        check_names(values, faults)
        if "error" in values and IDS_FIELD not in values and not faults:
            return SkippedLine(line_number=number)
        id_, sample = self._key(number, values, faults)
        sequence = sequence_of(values, self._rules, faults)
        temperature = temperature_of(values, self._rules, faults)
        logprobs = logprobs_of(values, sequence, faults) if self._rules.check else None
        if faults or sequence is None or id_ is None:
            return RefusedScoreLine(id=id_, sample=sample, line_number=number, error=faults.error())
        return ScoreLine(
            id=id_,
            sample=sample,
            line_number=number,
            where=faults.where,
            sequence=sequence,
            temperature=temperature,
            logprobs=logprobs,
        )

    def _where(self, number: int, values: Mapping[str, object]) -> str:
        where = f"{self._rules.source}, line {number}"
        if not is_request_id(values.get("id")):
            return where
        sample = f", sample {spelled(values['sample'])}" if "sample" in values else ""
        return f"{where} (id {spelled(values['id'])}{sample})"

    def _key(
        self, number: int, values: Mapping[str, object], faults: RequestFaults
    ) -> tuple[RequestId | None, int]:
        """(id, sample), which no earlier line has; ids are compared as text, like requests'."""
        num_faults = len(faults.faults)
        id_: RequestId | None = None
        sample = 0
        with faults.collecting("id"):
            id_ = check_id("id", values.get("id", number - 1))
        with faults.collecting("sample"):
            sample = of_kind("sample", values.get("sample", 0), Integer(minimum=0))
        if id_ is not None and len(faults.faults) == num_faults:
            key = (str(id_), sample)
            if key in self._seen:
                faults.add("id", _duplicate(id_, sample))
            self._seen.add(key)
        return id_, sample


def _duplicate(id_: RequestId, sample: int) -> BrokenField:
    return BrokenField(
        f"the id {spelled(id_)} with sample {sample} stands on an earlier line",
        rule="(id, sample) is unique in a file; without an id, a line's is its number from 0",
        remedy="give each line its own id, or each line of one id its own sample",
        kind="duplicate_id",
    )


def _not_an_object(value: object) -> BrokenField:
    return BrokenField(
        f"the line holds {spelled(value)}, not an object",
        rule="one JSON object on each line",
        remedy='write {"token_ids": [...]}, or give lines of generate',
        kind="bad_json",
    )
