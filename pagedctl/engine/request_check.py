"""Whether a request can be served: every rule, all faults together. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from pagedctl.engine.params_check import check_params, check_token_ids
from pagedctl.engine.request import Request, RequestId, SamplingParams
from pagedctl.engine.request_faults import BrokenField, RequestFaults, plain, spelled
from pagedctl.engine.request_limits import RequestLimits
from pagedctl.errors import RequestError
from pagedctl.manifest import strict_json

__all__ = ["RequestLimits", "check_fields", "check_id", "check_request", "is_request_id"]

ID_BITS = 63


def check_request(request: Request, limits: RequestLimits) -> Request:
    """*request* with every value in its own type: ids as a tuple of int, and so on.

    Takes lists, and numpy or torch arrays, where the type says tuple. Raises RequestError with
    all faults; its ``kind`` is that of the first.
    """
    if not isinstance(request, Request):
        raise _not_a_request(request)
    faults = RequestFaults(f"request {spelled(request.id)}")
    values = {one.name: getattr(request, one.name) for one in fields(request)}
    params = values.pop("params")
    sampling: dict[str, object] = {}
    if isinstance(params, SamplingParams):
        sampling = {one.name: getattr(params, one.name) for one in fields(params)}
    else:
        what = f"params {spelled(params)} is not a SamplingParams"
        faults.add("params", BrokenField(what, rule="params: a SamplingParams"))
    checked = check_fields(values, sampling, limits, faults)
    if checked is None:
        raise faults.error()
    return checked


def check_fields(
    values: Mapping[str, object],
    sampling: Mapping[str, object],
    limits: RequestLimits,
    faults: RequestFaults,
    *,
    prompt_field: str = "prompt_token_ids",
) -> Request | None:
    """The request of *values* (``id``, ``prompt_token_ids``, ``group``, ``cache_salt``,
    ``metadata``) and of the *sampling* fields; None after recording any fault.

    *prompt_field* is the field that the user wrote, where the ids came from text.
    """
    request_id: RequestId = 0
    prompt: tuple[int, ...] = ()
    group: RequestId | None = None
    salt: str | None = None
    metadata: Mapping[str, object] | None = None
    with faults.collecting("id"):
        request_id = check_id("id", values["id"])
    with faults.collecting(prompt_field):
        prompt = _prompt(prompt_field, values["prompt_token_ids"], limits)
    with faults.collecting("group"):
        given = values.get("group")
        group = None if given is None else check_id("group", given)
    with faults.collecting("cache_salt"):
        salt = _salt(values.get("cache_salt"))
    with faults.collecting("metadata"):
        metadata = _metadata(values.get("metadata"))
    params = check_params(sampling, limits, faults)
    if params is None or faults:
        return None
    return Request(
        id=request_id,
        prompt_token_ids=prompt,
        params=params,
        group=group,
        cache_salt=salt,
        metadata=metadata,
    )


def check_id(name: str, value: object) -> RequestId:
    """A string that UTF-8 can hold, or an integer of at most 64 bits; a bool is none."""
    found = plain(value)
    if not is_request_id(found):
        raise BrokenField(
            f"{name} {spelled(found)} is not text or an integer",
            rule=f"{name}: a string (UTF-8) or a 64-bit integer",
            remedy="give a string or an integer",
        )
    return found  # type: ignore[return-value]


def is_request_id(value: object) -> bool:
    """Whether *value* can be a request's id."""
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return type(value) is int and -(1 << ID_BITS) <= value < 1 << ID_BITS


def _not_a_request(value: object) -> RequestError:
    faults = RequestFaults("argument request")
    broken = BrokenField(
        f"{spelled(value)} is not a Request",
        rule="an engine takes pagedctl.Request objects",
        remedy="write Request(id=..., prompt_token_ids=...)",
    )
    faults.add(None, broken)
    return faults.error()


def _prompt(name: str, value: object, limits: RequestLimits) -> tuple[int, ...]:
    place = name if name == "prompt_token_ids" else f"token ids of {name}: "
    ids = check_token_ids(place, value, limits.input_vocab_size, "input vocabulary")
    if not ids:
        raise BrokenField(
            f"{name} is empty",
            rule="a prompt has at least one token",
            remedy="give at least one token",
            kind="empty_prompt",
        )
    if len(ids) >= limits.max_model_len:
        raise limits.too_long(f"the prompt has {len(ids)} tokens", len(ids))
    return ids


def _salt(value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and is_request_id(value)):
        raise BrokenField(
            f"cache_salt {spelled(value)} is not text", rule="cache_salt: a string (UTF-8)"
        )
    return value


def _metadata(value: object) -> Mapping[str, object] | None:
    """An object that the completion line can echo."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BrokenField(
            f"metadata {spelled(value)} is not an object", rule="metadata: a JSON object"
        )
    try:
        strict_json.dumps({"metadata": value})
    except (TypeError, ValueError) as error:
        raise BrokenField(
            f"metadata cannot be written: {error}",
            rule="metadata: a JSON object, nested at most 198 levels deep",
            remedy="use strings, numbers, lists and objects",
        ) from None
    return value
