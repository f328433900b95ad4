"""Request lines: from JSON lines, or texts, to requests and refusals. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from pagedctl.engine.request import Request, RequestFailure, RequestId, SamplingParams
from pagedctl.engine.request_check import check_fields, is_request_id
from pagedctl.engine.request_faults import BrokenField, RequestFaults, spelled
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import ConfigError, RequestError, nearest
from pagedctl.manifest import strict_json

IDS_FIELD = "prompt_token_ids"
PEER_IDS_FIELD = "prompt_ids"
PROMPT_FIELDS = (IDS_FIELD, "prompt", "messages")
SAMPLING_FIELDS = tuple(one.name for one in fields(SamplingParams))
PLAIN_FIELDS = ("id", "group", "cache_salt", "metadata")
KNOWN_FIELDS = (*PLAIN_FIELDS, *PROMPT_FIELDS, *SAMPLING_FIELDS)
OTHER_TOOLS_FIELDS: Mapping[str, str] = {
    "request_id": "id",
    "custom_id": "id",
    "input_ids": IDS_FIELD,
    PEER_IDS_FIELD: IDS_FIELD,
    "text": "prompt",
    "conversations": "messages",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "include_stop_str_in_output": "include_stop",
    "logprobs": "top_logprobs",
}
"""Fields of vLLM, SGLang, transformers and OpenAI, answered with ours."""


class PromptEncoder(Protocol):
    """What turns text into token ids; both raise RequestError for a text they refuse."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class LineRules:
    """How lines are read.

    ``source`` is the name in error messages. ``defaults`` stand for sampling fields that a
    line leaves out (or gives as null). ``keep`` names input fields that are copied to the
    metadata, None where the command keeps none. ``encoder`` is the model's tokenizer, None if it
    has none. ``chat``: a text prompt becomes one user message. ``peer_ids``: another tool's
    ``prompt_ids`` stands for ``prompt_token_ids``.
    """

    source: str
    limits: RequestLimits
    defaults: SamplingParams
    keep: tuple[str, ...] | None = ()
    encoder: PromptEncoder | None = None
    chat: bool = False
    peer_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class RefusedLine:
    """A line that is no request; ``id`` is None where none could be read."""

    id: RequestId | None
    line_number: int
    error: RequestError

    @property
    def failure(self) -> RequestFailure:
        return failure_of(self.error)


def failure_of(error: RequestError) -> RequestFailure:
    """A refusal as data: its first fault."""
    return RequestFailure(
        kind=error.kind,
        what=error.what,
        where=error.where,
        rule=error.rule,
        remedy=error.remedy,
    )


def read_requests(
    lines: Iterable[tuple[int, bytes]], rules: LineRules
) -> Iterator[Request | RefusedLine]:
    """Each of *lines*, ``(number from 1, bytes)``, as a request or a refusal, in order.

    One line at a time; only ids are remembered, because they are unique in a file.
    """
    reader = _Reader(rules)
    for number, line in lines:
        yield reader.of_line(number, line)


def read_prompts(texts: Iterable[str], rules: LineRules) -> Iterator[Request | RefusedLine]:
    """Each text as a request; the default id counts from 0, as that of lines does."""
    reader = _Reader(rules)
    for number, text in enumerate(texts, start=1):
        yield reader.of_values(number, {"prompt": text}, f"{rules.source} {number}")


class _Reader:
    """Reads lines under one set of rules, and remembers the ids it has seen."""

    def __init__(self, rules: LineRules) -> None:
        self._rules = rules
        self._seen: set[str] = set()
        ids = (PEER_IDS_FIELD,) if rules.peer_ids else ()
        self._prompt_fields = (*PROMPT_FIELDS, *ids)
        self._known = frozenset((*KNOWN_FIELDS, *self._prompt_fields, *(rules.keep or ())))

    def of_line(self, number: int, line: bytes) -> Request | RefusedLine:
        where = f"{self._rules.source}, line {number}"
        try:
            values = strict_json.loads(line, where=self._rules.source, first_line=number)
        except ConfigError as error:
            refusal = RequestError.of_kind("bad_json", error.faults)
            return RefusedLine(id=None, line_number=number, error=refusal)
        if isinstance(values, dict):
            return self.of_values(number, values, where)
        faults = RequestFaults(where)
        what = f"the line holds {spelled(values)}, not an object"
        faults.add(
            None,
            BrokenField(
                what,
                rule="one JSON object on each line",
                remedy='write {"prompt": "..."} or {"prompt_token_ids": [...]}',
                kind="bad_json",
            ),
        )
        return RefusedLine(id=None, line_number=number, error=faults.error())

    def of_values(
        self, number: int, line: Mapping[str, object], where: str
    ) -> Request | RefusedLine:
        """The request of a line's fields; null means absent, for every field."""
        values = {name: value for name, value in line.items() if value is not None}
        values.setdefault("id", number - 1)
        usable_id = values["id"] if is_request_id(values["id"]) else None
        named = "id" in line and usable_id is not None
        faults = RequestFaults(f"{where} (id {spelled(usable_id)})" if named else where)
        self._check_names(values, faults)
        self._check_unique(usable_id, faults)
        field, ids = self._prompt(values, faults)
        fields_of_request = {name: values.get(name) for name in PLAIN_FIELDS}
        with faults.collecting("metadata"):
            fields_of_request["metadata"] = self._metadata(values)
        request = check_fields(
            {**fields_of_request, IDS_FIELD: ids},
            self._sampling(values),
            self._rules.limits,
            faults,
            prompt_field=field,
        )
        if request is not None:
            return request
        return RefusedLine(id=usable_id, line_number=number, error=faults.error())  # type: ignore[arg-type]

    def _check_names(self, values: Mapping[str, object], faults: RequestFaults) -> None:
        for name in values:
            if name not in self._known:
                keeps = self._rules.keep is not None
                faults.add(name, _unknown_field(name, self._known, keeps=keeps))

    def _check_unique(self, request_id: object, faults: RequestFaults) -> None:
        """Ids are compared as text: 5 and "5" would name the same random stream."""
        if request_id is None:
            return
        text = str(request_id)
        if text in self._seen:
            what = f"the id {spelled(request_id)} stands on an earlier line"
            faults.add(
                "id",
                BrokenField(
                    what,
                    rule="ids are unique in a file; without one, a line's id is its number from 0",
                    remedy="give each line its own id",
                    kind="duplicate_id",
                ),
            )
        self._seen.add(text)

    def _prompt(self, values: Mapping[str, object], faults: RequestFaults) -> tuple[str, object]:
        """(field, ids) of the one prompt; harmless ids after recording a fault."""
        given = [name for name in self._prompt_fields if name in values]
        if len(given) != 1:
            what = f"{' and '.join(given)} stand together" if given else "the line has no prompt"
            broken = BrokenField(
                what,
                rule=f"exactly one of {', '.join(PROMPT_FIELDS)}",
                remedy="leave the others out" if given else "give one of them",
            )
            faults.add(given[0] if given else None, broken)
            return IDS_FIELD, (0,)
        field = given[0]
        if field in (IDS_FIELD, PEER_IDS_FIELD):
            return field, values[field]
        try:
            return field, self._encoded(field, values[field])
        except BrokenField as broken:
            faults.add(field, broken)
        except RequestError as error:
            for fault in error.faults:
                faults.add(field, BrokenField(fault.what, rule=fault.rule, remedy=fault.remedy))
        return IDS_FIELD, (0,)

    def _encoded(self, field: str, value: object) -> list[int]:
        encoder = self._rules.encoder
        if encoder is None:
            raise BrokenField(
                f"{field} is text, and this model has no tokenizer.json",
                rule="text needs the model's tokenizer",
                remedy=f"give {IDS_FIELD}",
            )
        if field == "messages":
            return encoder.encode_chat(_checked_messages(value))
        if not isinstance(value, str):
            raise BrokenField(f"{field} {spelled(value)} is not text", rule=f"{field}: a string")
        if self._rules.chat:
            return encoder.encode_chat([{"role": "user", "content": value}])
        return encoder.encode(value)

    def _metadata(self, values: Mapping[str, object]) -> object:
        """The line's metadata with the kept fields beside its own."""
        given = values.get("metadata")
        kept = {name: values[name] for name in self._rules.keep or () if name in values}
        if not kept:
            return given
        if given is not None and not isinstance(given, dict):
            return given  # refused by its own rule
        own: dict[str, object] = given or {}
        for name, value in kept.items():
            if name in own and own[name] != value:
                raise BrokenField(
                    f"{name} is a field to keep, and metadata holds another {name}",
                    rule="a kept field is copied into the metadata",
                    remedy=f"rename one, or drop --keep {name}",
                )
        return {**own, **kept}

    def _sampling(self, values: Mapping[str, object]) -> dict[str, object]:
        defaults = self._rules.defaults
        return {
            name: values[name] if name in values else getattr(defaults, name)
            for name in SAMPLING_FIELDS
        }


def _checked_messages(value: object) -> list[Mapping[str, str]]:
    rule = "messages: [{role, content}, ...], both text, at least one message"
    if not isinstance(value, list) or not value:
        raise BrokenField(f"messages {spelled(value)} is not a list of messages", rule=rule)
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise BrokenField(f"messages[{index}] is {spelled(message)}", rule=rule)
        for name, text in message.items():
            if not isinstance(text, str):
                raise BrokenField(f"messages[{index}].{name} is {spelled(text)}", rule=rule)
    return value


def _unknown_field(name: str, known: Iterable[str], *, keeps: bool) -> BrokenField:
    if name in OTHER_TOOLS_FIELDS:
        remedy = f"use {OTHER_TOOLS_FIELDS[name]}"
    else:
        close = nearest(name, sorted(known))
        other = f"remove it, or give --keep {name}" if keeps else "remove it"
        remedy = f"did you mean {close}?" if close else other
    return BrokenField(
        f"{spelled(name)} is not a field of a request",
        rule="unknown fields are refused" + (", unless --keep names them" if keeps else ""),
        remedy=remedy,
        kind="unknown_field",
    )
