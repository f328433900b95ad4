"""The fields of a line to score: names, rules, and the sequence that they make. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from pagedctl.config.kinds import Integer
from pagedctl.engine.params_check import RULES, check_token_ids, of_kind
from pagedctl.engine.request_faults import BrokenField, RequestFaults, spelled
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import nearest

IDS_FIELD = "token_ids"
PROMPT_FIELD = "prompt_token_ids"
SCORE_FIELDS = (
    "id",
    "sample",
    IDS_FIELD,
    "start",
    "temperature",
    "logprobs",
    "logprob_basis",
    "weight_version_first",
    "weight_version_last",
)
COMPLETION_FIELDS = (
    "id",
    "sample",
    "group",
    PROMPT_FIELD,
    IDS_FIELD,
    "logprobs",
    "logprob_basis",
    "text",
    "finish_reason",
    "stop_reason",
    "temperature",
    "seed",
    "weight_version_first",
    "weight_version_last",
    "cached_tokens",
    "preemptions",
    "metadata",
    "top_logprobs",
    "prompt_logprobs",
    "error",
)
REASON_FIELDS = ("logprobs_reason", "top_logprobs_reason", "prompt_logprobs_reason")
"""Why a logprob of the line is null."""

OTHER_TOOLS_FIELDS: Mapping[str, str] = {
    "request_id": "id",
    "custom_id": "id",
    "input_ids": IDS_FIELD,
    "tokens": IDS_FIELD,
    "prompt_ids": PROMPT_FIELD,
    "completion_ids": IDS_FIELD,
}
"""Fields of vLLM, SGLang, transformers and TRL, answered with ours."""

SCORED_BASES = ("scaled", "raw")
"""Bases that the sequence and the temperature decide; penalties and truncation do not count."""

FLOAT32_END = float(2**128 - 2**103)
"""Numbers below this in magnitude round to a finite float32."""


@dataclass(frozen=True, kw_only=True)
class ScoreLineRules:
    """How lines are read.

    ``source`` is the name in error messages. ``start`` and ``temperature`` stand for what a
    line leaves out. ``check``: each line must carry its own logprobs, and is scored as they
    were made. ``logprob_basis`` is the engine's.
    """

    source: str
    limits: RequestLimits
    start: int = 1
    temperature: float = 1.0
    check: bool = False
    logprob_basis: str = "scaled"


@dataclass(frozen=True, kw_only=True)
class GivenSequence:
    """Token ids, prompt first, in four bytes each, and the index of the first to score."""

    token_ids: array[int]
    start: int

    @property
    def num_scored_tokens(self) -> int:
        return len(self.token_ids) - self.start


def check_names(values: Mapping[str, object], faults: RequestFaults) -> None:
    """Record each field that such a line does not have."""
    is_completion = PROMPT_FIELD in values or "error" in values
    noun = "a completion line" if is_completion else "a score line"
    known = (*(COMPLETION_FIELDS if is_completion else SCORE_FIELDS), *REASON_FIELDS)
    for name in values:
        if name not in known:
            close = OTHER_TOOLS_FIELDS.get(name) or nearest(name, known)
            broken = BrokenField(
                f"{spelled(name)} is not a field of {noun}",
                rule="unknown fields are refused",
                remedy=f"did you mean {close}?" if close else "remove it",
                kind="unknown_field",
            )
            faults.add(name, broken)


def sequence_of(
    values: Mapping[str, object], rules: ScoreLineRules, faults: RequestFaults
) -> GivenSequence | None:
    """A completion's prompt and tokens, else the line's own ids; None after a fault."""
    if IDS_FIELD not in values:
        faults.add(None, _no_ids())
        return None
    prompt, ids, start = array("i"), array("i"), 0
    num_faults = len(faults.faults)
    with faults.collecting(IDS_FIELD):
        ids = _ids(IDS_FIELD, values, rules.limits)
    if PROMPT_FIELD in values:
        with faults.collecting(PROMPT_FIELD):
            prompt = _ids(PROMPT_FIELD, values, rules.limits)
            start = len(_not_empty(PROMPT_FIELD, prompt, "a prompt"))
    else:
        with faults.collecting("start"):
            start = of_kind("start", values.get("start", rules.start), Integer(minimum=1))
    if len(faults.faults) > num_faults:
        return None
    with faults.collecting(IDS_FIELD):
        sequence = _not_empty(IDS_FIELD, prompt + ids, "a sequence")
        if len(sequence) > rules.limits.max_model_len:
            what = f"the sequence has {len(sequence)} tokens"
            raise rules.limits.too_long(what, len(sequence) - 1)
        if start <= len(sequence):
            return GivenSequence(token_ids=sequence, start=start)
        faults.add("start", _beyond(start, len(sequence)))
    return None


def temperature_of(
    values: Mapping[str, object], rules: ScoreLineRules, faults: RequestFaults
) -> float:
    """The one to score at: with ``check``, that at which the line's logprobs were taken."""
    temperature = rules.temperature
    with faults.collecting("temperature"):
        given = values.get("temperature", temperature)
        temperature = RULES["temperature"]("temperature", given, rules.limits)  # type: ignore[assignment]
    if rules.check:
        with faults.collecting("logprob_basis"):
            basis = values.get("logprob_basis", "scaled")
            temperature = _temperature_of_basis(basis, temperature, rules.logprob_basis)
    return temperature


def logprobs_of(
    values: Mapping[str, object], sequence: GivenSequence | None, faults: RequestFaults
) -> array[float]:
    """The line's own logprobs, as many as *sequence* has tokens to score.

    They were written with the fewest digits that name one float32, and are that float32 again.
    """
    logprobs = array("f")
    with faults.collecting("logprobs"):
        logprobs = _float32(values.get("logprobs"))
        if sequence is not None and len(logprobs) != sequence.num_scored_tokens:
            raise BrokenField(
                f"{len(logprobs)} logprobs meet {sequence.num_scored_tokens} tokens to score",
                rule="one logprob for each token from start on",
                remedy="give the start that belongs to the logprobs",
            )
    return logprobs


def _ids(name: str, values: Mapping[str, object], limits: RequestLimits) -> array[int]:
    ids = check_token_ids(name, values[name], limits.input_vocab_size, "input vocabulary")
    return array("i", ids)


def _not_empty(name: str, ids: array[int], noun: str) -> array[int]:
    if not ids:
        raise BrokenField(
            f"{name} is empty",
            rule=f"{noun} has at least one token",
            remedy="give at least one token",
            kind="empty_prompt",
        )
    return ids


def _beyond(start: int, length: int) -> BrokenField:
    return BrokenField(
        f"start {start} is beyond the {length} tokens of the sequence",
        rule="1 <= start <= number of token_ids",
        remedy="give the index of the first token to score",
    )


def _temperature_of_basis(basis: object, temperature: float, engine_basis: str) -> float:
    """basis raw is log_softmax(logits): basis scaled at temperature 1."""
    if basis not in SCORED_BASES:
        raise BrokenField(
            f"logprob_basis {spelled(basis)} cannot be compared",
            rule="--check compares the bases scaled and raw; the line does not hold all that a "
            "processed logprob depends on",
            remedy="generate with --logprob-basis scaled",
        )
    if basis == "raw":
        return 1.0
    if engine_basis == "raw" and temperature not in (0.0, 1.0):
        raise BrokenField(
            f"logprobs of basis scaled at temperature {temperature:g} meet --logprob-basis raw",
            rule="logprobs of one basis are compared",
            remedy="leave --logprob-basis out",
        )
    return temperature


def _float32(value: object) -> array[float]:
    rule = "with --check, logprobs is a list of numbers that float32 holds"
    if value is None:
        raise BrokenField("the line has no logprobs", rule=rule, remedy="leave --check out")
    if not isinstance(value, list):
        raise BrokenField(f"logprobs {spelled(value)} is not a list", rule=rule)
    for index, one in enumerate(value):
        if type(one) not in (float, int) or not -FLOAT32_END < one < FLOAT32_END:
            raise BrokenField(f"logprobs[{index}] is {spelled(one)}", rule=rule)
    return array("f", value)


def _no_ids() -> BrokenField:
    return BrokenField(
        "the line has no token_ids",
        rule="a line to score has token_ids, or is a completion: prompt_token_ids and token_ids",
        remedy="give the whole sequence as token_ids",
    )
