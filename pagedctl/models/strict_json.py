"""Strict JSON objects from files that others wrote: every departure is a typed refusal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NoReturn

from pagedctl.errors import ModelError

BOM = b"\xef\xbb\xbf"


class _Broken(ValueError):
    """A rule of strict JSON that Python's parser does not hold by itself."""


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise _Broken(f'the key "{key}" stands twice in one object')
        result[key] = value
    return result


def _no_constant(text: str) -> NoReturn:
    raise _Broken(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Broken(f"the number {text} does not fit a float")
    return value


def parse_object(data: bytes, *, where: str) -> dict[str, object]:
    """The JSON object in *data* (UTF-8; one byte-order mark at the very start is skipped).

    Refused: duplicate keys, NaN and infinities (also by overflow), bytes that are not
    UTF-8, nesting too deep to parse, and any value that is not an object.
    """
    try:
        value = json.loads(
            data.removeprefix(BOM).decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise _refusal(f"byte {error.start} is not UTF-8", where) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise _refusal(f"{place}: {error.msg}", where) from None
    except RecursionError:
        raise _refusal("objects are nested too deeply", where) from None
    except ValueError as error:
        raise _refusal(str(error), where) from None
    if not isinstance(value, dict):
        raise _refusal(f"the file holds {json_kind(value)}, not an object", where)
    return value


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in the file at *path*; :class:`ModelError` if it cannot be had."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{path.name} cannot be read: {error.strerror or error}",
            where=str(path),
            rule="the file must exist and be readable",
            remedy="check the path and its permissions",
        ) from None
    return parse_object(data, where=str(path))


def json_kind(value: object) -> str:
    """The JSON name of *value*'s type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a float"
    if isinstance(value, str):
        return "a string"
    return "an object" if isinstance(value, dict) else "a list"


def _refusal(problem: str, where: str) -> ModelError:
    return ModelError(
        f"not strict JSON: {problem}",
        where=where,
        rule="UTF-8 JSON, one object, every key once, only finite numbers",
        remedy="correct the file, or fetch it again",
    )
