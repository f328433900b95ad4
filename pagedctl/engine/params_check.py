"""The sampling fields of a request: the rule of each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pagedctl.config.groups import SamplingOptions
from pagedctl.config.kinds import Boolean, Broken, Integer, Kind, Number
from pagedctl.config.options import options_of
from pagedctl.engine.params_together import check_together
from pagedctl.engine.request import SamplingParams
from pagedctl.engine.request_faults import BrokenField, RequestFaults, plain, spelled
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import ConfigError

MOST_TOP_LOGPROBS = 1000
MOST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
LEAST_FLOAT32 = 2.0**-126
"""Logits are float32, and so is what edits them: it is neither infinite there nor zero."""

_BIAS = Number(minimum=-MOST_FLOAT32, maximum=MOST_FLOAT32)
_OPTIONS = options_of(SamplingOptions)
T = TypeVar("T")


Rule = Callable[[str, object, RequestLimits], object]
"""(name, value, limits) -> the value in its own type, or BrokenField."""


def check_params(
    values: Mapping[str, object], limits: RequestLimits, faults: RequestFaults
) -> SamplingParams | None:
    """The parameters in *values*, the rest by default; None after recording any fault.

    ``top_k`` comes back as 0 where it keeps every token.
    """
    checked: dict[str, Any] = {}
    for name, value in values.items():
        with faults.collecting(name):
            checked[name] = RULES[name](name, plain(value), limits)
    if len(checked) < len(values) or faults:
        return None
    params = SamplingParams(**checked)
    check_together(params, limits, faults)
    return None if faults else params


def params_of_options(options: Mapping[str, object]) -> SamplingParams:
    """The run's defaults, from the values of the sampling options; ConfigError if not served.

    ``seed`` is not among them: the option is the run's seed, from which each request derives
    its own.
    """
    given = {name: options[name] for name in _OPTIONS if name != "seed"}
    if "" in given["stop"]:  # type: ignore[operator]
        raise ConfigError(
            "--stop is empty",
            where="option stop",
            rule="a stop text has at least one character",
            remedy="name a text, or leave --stop out",
        )
    return SamplingParams(**given)  # type: ignore[arg-type]


def check_token_ids(name: str, value: object, vocab_size: int, vocabulary: str) -> tuple[int, ...]:
    """A flat sequence of token ids, each a true integer in [0, *vocab_size*).

    The refusal names the index and the value of the first id that is none, and counts the
    others. *vocabulary* is its name in the message, for example "input vocabulary".
    """
    ids = plain(value)
    if not isinstance(ids, list | tuple):
        raise BrokenField(
            f"{name} {spelled(ids)} is not a list", rule=f"{name} is a list of token ids"
        )
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return tuple(ids)
    plain_ids = [plain(one) for one in ids]
    bad = [index for index, one in enumerate(plain_ids) if not _is_id(one, vocab_size)]
    if not bad:
        return tuple(plain_ids)  # type: ignore[arg-type]
    raise _bad_id(f"{name}[{bad[0]}]", plain_ids[bad[0]], len(bad) - 1, vocab_size, vocabulary)


def _is_id(value: object, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _bad_id(
    place: str, value: object, others: int, vocab_size: int, vocabulary: str
) -> BrokenField:
    more = f"; {others} more ids of this list are refused too" if others else ""
    if type(value) is not int:
        return BrokenField(
            f"{place} is {spelled(value)}, not an integer{more}",
            rule='a token id is an integer: 5.0, true and "5" are none',
        )
    return BrokenField(
        f"{place} is {spelled(value)}, outside the {vocabulary}{more}",
        rule=f"0 <= id < {vocab_size}",
        remedy="use ids of this model's tokenizer",
        kind="out_of_vocabulary",
    )


def of_kind(name: str, value: object, kind: Kind) -> Any:
    """*value* checked by an option's kind."""
    try:
        return kind.check(value)
    except Broken as broken:
        raise BrokenField.of(name, value, broken) from None
    except OverflowError:
        beyond = Broken("is out of range", "a number that float64 holds")
        raise BrokenField.of(name, value, beyond) from None


def _kind(kind: Kind, *, optional: bool = False) -> Rule:
    """The rule of a kind; an *optional* field may also be None."""

    def rule(name: str, value: object, limits: RequestLimits) -> object:
        return None if optional and value is None else of_kind(name, value, kind)

    return rule


def _option(name: str, *, optional: bool = False) -> Rule:
    """The rule of the sampling option of the same name."""
    return _kind(_OPTIONS[name].kind, optional=optional)


def _top_k(name: str, value: object, limits: RequestLimits) -> int:
    """None, 0, -1 and anything from the vocabulary's size on keep every token: 0."""
    count: int = 0 if value is None else of_kind(name, value, _OPTIONS[name].kind)
    return count if 0 < count < limits.output_vocab_size else 0


def _stop(name: str, value: object, limits: RequestLimits) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    rule = f"{name}: a text, or a list of texts, none of them empty"
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
        raise BrokenField(f"{name} {spelled(value)} is not text or a list of texts", rule=rule)
    if "" in texts:
        raise BrokenField(f"{name} holds an empty text", rule=rule, remedy='remove ""')
    return tuple(texts)


def _stop_token_ids(name: str, value: object, limits: RequestLimits) -> tuple[int, ...]:
    return check_token_ids(name, value, limits.input_vocab_size, "input vocabulary")


def _allowed_token_ids(name: str, value: object, limits: RequestLimits) -> tuple[int, ...]:
    return check_token_ids(name, value, limits.output_vocab_size, "output vocabulary")


def _logit_bias(name: str, value: object, limits: RequestLimits) -> tuple[tuple[int, float], ...]:
    pairs: Sequence[object] = value if isinstance(value, list | tuple) else (None,)
    biases: list[tuple[int, float]] = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BrokenField(
                f"{name} {spelled(value)} is not a list of pairs",
                rule=f"{name}: [[id, value], ...]",
            )
        token, bias = plain(pair[0]), plain(pair[1])
        if not _is_id(token, limits.output_vocab_size):
            raise _bad_id(
                f"{name}[{index}][0]", token, 0, limits.output_vocab_size, "output vocabulary"
            )
        biases.append((token, of_kind(f"{name}[{index}][1]", bias, _BIAS)))  # type: ignore[arg-type]
    _refuse_repeated(name, [token for token, _ in biases])
    return tuple(biases)


def _refuse_repeated(name: str, tokens: Sequence[int]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    index = next(n for n, token in enumerate(tokens) if token in tokens[:n])
    raise BrokenField(
        f"{name}[{index}][0] is {tokens[index]}, which has a bias already",
        rule=f"{name} names a token once",
        remedy="add its biases up",
    )


def _top_logprobs(name: str, value: object, limits: RequestLimits) -> int:
    most = min(limits.output_vocab_size, MOST_TOP_LOGPROBS)
    count: int = of_kind(name, value, Integer(minimum=0, maximum=most))
    return count


RULES: Mapping[str, Rule] = {
    "n": _option("n"),
    "max_tokens": _option("max_tokens", optional=True),
    "min_tokens": _kind(Integer(minimum=0)),
    "temperature": _option("temperature"),
    "top_p": _option("top_p"),
    "top_k": _top_k,
    "min_p": _option("min_p"),
    "repetition_penalty": _kind(Number(minimum=LEAST_FLOAT32, maximum=MOST_FLOAT32)),
    "presence_penalty": _kind(Number(minimum=-2, maximum=2)),
    "frequency_penalty": _kind(Number(minimum=-2, maximum=2)),
    "seed": _option("seed", optional=True),
    "stop": _stop,
    "include_stop": _kind(Boolean()),
    "stop_token_ids": _stop_token_ids,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "ignore_eos": _option("ignore_eos"),
    "top_logprobs": _top_logprobs,
    "prompt_logprobs": _kind(Boolean()),
}
"""The rule of each sampling field, by name: exactly the fields of SamplingParams."""
