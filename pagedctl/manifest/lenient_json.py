"""Other tools' JSON, as they write it; ours is strict (``strict_json``).

Python's ``json.dump`` writes bare NaN and Infinity, and tools that append put one value after
another into a file. Both are read here. What is ambiguous stays refused: two equal keys of one
object, numbers beyond float64, text that is not UTF-8, a BOM anywhere but at the start.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import NamedTuple

from pagedctl.errors import ConfigError

_BOM = b"\xef\xbb\xbf"
_BLANKS = re.compile(r"[ \t\r\n]*")


class Value(NamedTuple):
    """One JSON value of a file, and the line on which it starts, counted from 1."""

    line: int
    value: object


def read_values(data: bytes, *, where: str) -> tuple[Value, ...]:
    """All values in *data*, in order; ConfigError with the place of what is no JSON.

    *where* is the file's name. A byte order mark at the start is dropped.
    """
    text = _text(data.removeprefix(_BOM), where)
    decoder = json.JSONDecoder(object_pairs_hook=_unique_object, parse_float=_finite)
    values: list[Value] = []
    line, counted_to = 1, 0
    at = _after_blanks(text, 0)
    while at < len(text):
        line += text.count("\n", counted_to, at)
        counted_to = at
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _syntax_error(error, text, where) from None
        except ValueError as error:
            raise _unusable(str(error), f"{where}, line {line} and after") from None
        except RecursionError:
            raise _unusable("JSON nested too deeply", f"{where}, line {line} and after") from None
        values.append(Value(line, value))
        at = _after_blanks(text, end)
    return tuple(values)


def _after_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return at if blanks is None else blanks.end()


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {key!r} appears twice in one object")
    return result


def _finite(token: str) -> float:
    value = float(token)
    if math.isinf(value):
        raise ValueError(f"{token} is beyond float64")
    return value


def _text(body: bytes, where: str) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"byte 0x{body[error.start]:02x} is not UTF-8",
            where=f"{where}, line {line}",
            rule="JSON files are UTF-8",
            remedy="save the file as UTF-8",
        ) from None


def _syntax_error(error: json.JSONDecodeError, text: str, where: str) -> ConfigError:
    place = f"{where}, line {error.lineno}, column {error.colno}"
    if text.startswith("\ufeff", error.pos):
        return ConfigError(
            "a byte order mark (BOM) stands inside the file",
            where=place,
            rule="a BOM is accepted at the start of a file only",
            remedy="remove it; files joined with cat keep the BOM of each part",
        )
    return ConfigError(
        f"not JSON: {error.msg}",
        where=place,
        rule="JSON values, one after another",
        remedy="correct the file at this place; a run that was killed leaves half a value",
    )


def _unusable(what: str, where: str) -> ConfigError:
    return ConfigError(
        what,
        where=where,
        rule="distinct keys, numbers within float64, integers of at most 4300 digits, "
        "at most about 900 levels",
        remedy="name the tool's own result file: none of this is in it",
    )
