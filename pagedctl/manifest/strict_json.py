"""Strict JSON, both ways.

Writing. A NaN, an infinity or an integer that does not fit 64 bits becomes null, and the same
object says why under ``<key>_reason``: ``{"x": null, "x_reason": "NaN"}``. Inside a list,
however deeply nested in further lists, the element becomes null and the reason of the nearest
enclosing key names the indices: ``{"x": [1.0, null], "x_reason": "[1]: -Infinity"}``. If the
object already uses that name for data, the reason goes under ``<key>_reason_2`` (and so on).
Where no key encloses the value (a bare number, a top-level list of numbers) there is no place
for a reason, and the value is refused with ValueError: files of ours are objects.

Reading. ``orjson`` checks grammar, UTF-8 and depth; the standard library's parser then builds
the values, because orjson keeps the last of two equal keys without a word and turns integers
beyond 64 bits into floats. Both together take about 20 ms per MB.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any, NamedTuple

import orjson

from pagedctl.errors import ConfigError

MAX_DEPTH = 200  # orjson writes at most 254 levels
MAX_NON_FINITE_LISTED = 20  # indices spelled out in one reason; the rest is counted

_INT_MIN = -(2**63)
_INT_MAX = 2**64 - 1
_DECIMAL_BITS = 14_000  # below Python's limit of 4,300 digits for int -> decimal text
_BOM = b"\xef\xbb\xbf"
_NON_FINITE_TOKEN = re.compile(r"[+-]?(?:NaN|Infinity|inf\b|nan\b)", re.IGNORECASE)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:]', re.DOTALL)


# -- writing -----------------------------------------------------------------------------


class _Note(NamedTuple):
    """Why one value became null; ``at`` is its index path below the key, e.g. ``[0][3]``."""

    at: str
    text: str
    non_finite: bool


class _Unsupported(TypeError):
    """A type without a JSON form; the path to it grows while the error travels outwards."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.path: list[str] = []
        super().__init__(kind)

    def __str__(self) -> str:
        path = "".join(reversed(self.path)).lstrip(".")
        return f"{path or 'the top-level value'}: {self.kind} has no JSON form"


def dumps(obj: object, *, indent: bool = False) -> bytes:
    """*obj* as strict JSON, UTF-8, without a trailing newline.

    Takes None, bool, int, float, str, dict with string keys (and other mappings), list, tuple,
    dataclass instances (fields in order, or their ``to_json_object()``), Enum (its value), Path,
    aware UTC datetime (``2026-12-01T09:30:00Z``), numpy scalars and numeric arrays. float32 is
    printed with the fewest digits that read back to the same bits. A lone surrogate, which a
    file name may carry but UTF-8 cannot, is written as the six characters ``\\udcXX``.

    Raises TypeError for any other type and ValueError for nesting beyond 200 levels or for a
    null that no key could explain.
    """
    notes: list[_Note] = []
    plain = _plain(obj, notes, "", 0)
    if notes:
        first = notes[0]
        raise ValueError(
            f"{first.at or 'the top-level value'} is {first.text}: strict JSON writes null and "
            "a reason under <key>_reason, and here is no key; wrap the value in an object"
        )
    option = orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_INDENT_2 if indent else 0)
    return orjson.dumps(plain, option=option)


def _plain(value: object, notes: list[_Note], at: str, depth: int) -> object:
    """*value* in types that orjson writes exactly; nulls that stand for a value add a note."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels, or an object holds itself")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value)  # type: ignore[arg-type]
    if isinstance(value, Enum):
        return _plain(value.value, notes, at, depth + 1)
    if isinstance(value, int):
        return _integer(int(value), notes, at)
    if isinstance(value, float):
        return _float(float(value), notes, at)
    if isinstance(value, Mapping):
        return _object(value, depth)
    if isinstance(value, list | tuple):
        return _array(value, notes, at, depth)
    if isinstance(value, str | PurePath):
        return _text(str(value))
    if isinstance(value, datetime):
        return _utc_text(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _object(_dataclass_items(value), depth)
    return _numpy(value, notes, at, depth)


def _text(value: str) -> str:
    if value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _integer(value: int, notes: list[_Note], at: str) -> int | None:
    if _INT_MIN <= value <= _INT_MAX:
        return value
    exact = str(value) if value.bit_length() < _DECIMAL_BITS else hex(value)
    notes.append(_Note(at, f"integer beyond 64 bits: {exact}", non_finite=False))
    return None


def _float(value: float, notes: list[_Note], at: str) -> float | None:
    if math.isfinite(value):
        return value
    notes.append(_Note(at, _non_finite_name(value), non_finite=True))
    return None


def _non_finite_name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _utc_text(value: datetime) -> str:
    if value.utcoffset() != timedelta(0):
        raise _Unsupported("a datetime that is not UTC")
    return value.replace(tzinfo=None).isoformat() + "Z"


def _dataclass_items(value: object) -> Mapping[object, object]:
    convert = getattr(value, "to_json_object", None)
    if convert is not None:
        converted: Mapping[object, object] = convert()
        return converted
    return {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]


def _object(value: Mapping[Any, object], depth: int) -> dict[str, object]:
    names = [_key(key) for key in value]
    taken = set(names)
    if len(taken) != len(names):
        raise ValueError("two keys of one object have the same JSON text")
    plain: dict[str, object] = {}
    for name, item in zip(names, value.values(), strict=True):
        notes: list[_Note] = []
        try:
            plain[name] = _plain(item, notes, "", depth + 1)
        except _Unsupported as error:
            error.path.append(f".{name}")
            raise
        if notes:
            plain[_free_name(f"{name}_reason", taken)] = _reason(notes)
    return plain


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise _Unsupported(f"key {key!r} of type {type(key).__name__}")
    return _text(str.__str__(key))


def _free_name(wanted: str, taken: set[str]) -> str:
    """*wanted*, or with the first number from 2 on that the object does not use; now taken."""
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}_{number}", number + 1
    taken.add(name)
    return name


def _reason(notes: list[_Note]) -> str:
    """Notes in one line: every integer exactly, the first 20 non-finite values by index."""
    parts: list[str] = []
    listed = hidden = 0
    for note in notes:
        if note.non_finite:
            listed += 1
            if listed > MAX_NON_FINITE_LISTED:
                hidden += 1
                continue
        parts.append(f"{note.at}: {note.text}" if note.at else note.text)
    if hidden:
        parts.append(f"and {hidden} more non-finite values")
    return "; ".join(parts)


def _array(
    values: list[object] | tuple[object, ...], notes: list[_Note], at: str, depth: int
) -> list[object]:
    plain: list[object] = []
    for index, item in enumerate(values):
        # The common element needs no index path: building one for each would double the time.
        if _is_plain_number(item):
            plain.append(item)
        else:
            try:
                plain.append(_plain(item, notes, f"{at}[{index}]", depth + 1))
            except _Unsupported as error:
                error.path.append(f"[{index}]")
                raise
    return plain


def _is_plain_number(item: object) -> bool:
    """A finite float or a 64-bit integer of exactly Python's own types."""
    if type(item) is float:
        return math.isfinite(item)
    return type(item) is int and _INT_MIN <= item <= _INT_MAX


def _numpy(value: object, notes: list[_Note], at: str, depth: int) -> object:
    numpy = sys.modules.get("numpy")  # not imported yet: then nothing can be an array
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        raise _Unsupported(type(value).__name__)
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise _Unsupported(f"numpy {value.dtype.name}")
    if value.ndim == 0:
        return _numpy_scalar(value[()], notes, at)
    return _numpy_array(numpy, value, notes, at, depth)


def _numpy_scalar(value: Any, notes: list[_Note], at: str) -> object:
    """*value* kept in its own width where it is finite, so that float32 keeps its digits."""
    if value.dtype.kind != "f":
        return value.item()
    if _float(float(value), notes, at) is None:
        return None
    return float(value) if value.dtype.itemsize == 8 else value


def _numpy_array(numpy: Any, array: Any, notes: list[_Note], at: str, depth: int) -> object:
    """*array* as orjson takes it (C order, native bytes), or as lists where an element is null."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if array.dtype.kind != "f" or numpy.isfinite(array).all():
        return numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    if array.ndim == 1:
        return [_numpy_scalar(item, notes, f"{at}[{index}]") for index, item in enumerate(array)]
    return [
        _numpy_array(numpy, row, notes, f"{at}[{index}]", depth + 1)
        for index, row in enumerate(array)
    ]


# -- reading -----------------------------------------------------------------------------


class _DuplicateKey(Exception):
    pass


def loads(data: bytes, *, where: str, first_line: int = 1) -> object:
    """The value in *data*, or a ConfigError that names *where*, line and column.

    ``first_line`` is the 1-based line of the file on which *data* starts, for a caller that
    reads a file line by line. A byte order mark is accepted at the start of line 1 only.
    Refused: NaN and Infinity tokens, numbers beyond float64, duplicate keys, invalid UTF-8, a
    BOM elsewhere outside a string, trailing data. Integers of any size are read exactly.
    """
    body = data.removeprefix(_BOM) if first_line == 1 else data
    text = _decode(body, where, first_line)
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _syntax_error(error, text, where, first_line) from None
    try:
        return json.loads(text, object_pairs_hook=_unique_object)
    except _DuplicateKey:
        key, offset = next(_duplicate_keys(text))
        raise _refusal(
            f"key {key!r} appears twice in one object",
            _place(text, offset, where, first_line),
            rule="the keys of one JSON object are distinct",
            remedy="remove one of the two",
        ) from None
    except RecursionError:
        raise _refusal(
            "JSON nested too deeply",
            where,
            rule="at most about 900 levels",
            remedy="use a flatter file",
        ) from None


def _unique_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _DuplicateKey
    return result


def _duplicate_keys(text: str) -> Iterator[tuple[str, int]]:
    """Key and character offset of every repeated key of *text*, which is valid JSON."""
    open_objects: list[set[str]] = []
    last_string, offset = "", 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in ("{", "["):
            open_objects.append(set())
        elif token in ("}", "]"):
            open_objects.pop()
        elif token == ":":
            key = json.loads(last_string)
            if key in open_objects[-1]:
                yield key, offset
            open_objects[-1].add(key)
        else:
            last_string, offset = token, match.start()


def _decode(body: bytes, where: str, first_line: int) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        before = body[: error.start].decode("utf-8")
        raise _refusal(
            f"byte 0x{body[error.start]:02x} is not UTF-8",
            _place(before, len(before), where, first_line),
            rule="JSON files are UTF-8",
            remedy="save the file as UTF-8",
        ) from None


def _syntax_error(
    error: orjson.JSONDecodeError, text: str, where: str, first_line: int
) -> ConfigError:
    place = _place(text, error.pos, where, first_line)
    if text.startswith("\ufeff", error.pos):
        return _refusal(
            "a byte order mark (BOM) stands inside the file",
            place,
            rule="a BOM is accepted at the start of a file only",
            remedy="remove it; files joined with cat keep the BOM of each part",
        )
    signed = error.pos > 0 and text[error.pos - 1] in "+-"
    token = _NON_FINITE_TOKEN.match(text, error.pos - signed)
    if token is not None:
        return _refusal(
            f"{token.group()} is not a JSON value",
            _place(text, token.start(), where, first_line),
            rule="strict JSON has no NaN and no Infinity",
            remedy="write null, and why under <key>_reason",
        )
    return _refusal(
        f"not strict JSON: {error.msg}",
        place,
        rule="one JSON value (RFC 8259), UTF-8, nothing after it",
        remedy="correct the file at this place",
    )


def _place(text: str, offset: int, where: str, first_line: int) -> str:
    """*where* with the 1-based line and the 1-based column, in characters, of *offset*."""
    line = first_line + text.count("\n", 0, offset)
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    return f"{where}, line {line}, column {column}"


def _refusal(what: str, where: str, *, rule: str, remedy: str) -> ConfigError:
    return ConfigError(what, where=where, rule=rule, remedy=remedy)
