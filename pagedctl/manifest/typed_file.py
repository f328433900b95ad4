"""Reading a JSON file of ours as a dataclass: its own major version, every key checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pagedctl.errors import ConfigError, Fault, nearest
from pagedctl.manifest import strict_json

_JSON_NAMES: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file: its ``schema``, the type that its object becomes, and its name in words.

    ``closed``: a key that this version does not know is refused. ``absent`` says what to do
    about a missing key.
    """

    schema: str
    type: type[Any]
    name: str
    absent: str
    closed: bool = False


def read_bytes(path: Path, kind: FileKind) -> bytes:
    """The file's bytes; ConfigError if it cannot be read or is empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            where=str(path),
            rule=f"a {kind.name} is a readable file",
            remedy="name an existing file written by pagedctl",
        ) from error
    if not data:
        raise ConfigError(
            f"{path} is empty",
            where=str(path),
            rule=f"a {kind.name} is complete or absent",
            remedy="its writer was killed on a file system without hard links: run it again",
        )
    return data


def decode(data: bytes, path: Path, kind: FileKind) -> tuple[Any, Mapping[str, object]]:
    """The object of *data*, read from *path*, as ``kind.type``, and as it was written.

    Raises ConfigError with every missing, ill-typed and, if the kind is closed, unknown key.
    """
    raw = strict_json.loads(data, where=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} holds {_name_of(raw)}, not a {kind.name}",
            where=str(path),
            rule=f"a {kind.name} is one JSON object",
            remedy="name a file written by pagedctl",
        )
    _check_schema(raw, path, kind)
    report = _Report(path, kind, [])
    found = _section(kind.type, raw, "", report)
    if report.faults:
        raise ConfigError.of(report.faults)
    return found, raw


def _check_schema(raw: Mapping[str, object], path: Path, kind: FileKind) -> None:
    """Accept our own major only; anything else is refused by its name."""
    found = raw.get("schema")
    if found == kind.schema:
        return
    name, major = kind.schema.rsplit("/", 1)
    if "schema" not in raw:
        what, remedy = "key 'schema' is missing", "name a file written by pagedctl"
    elif isinstance(found, str) and found.rsplit("/", 1)[0] == name:
        what = f"schema {found!r} is of another major version"
        remedy = "read it with the pagedctl version that it names"
    else:
        what, remedy = f"schema {found!r} is not a {kind.name}", f"name a {kind.name}"
    raise ConfigError(
        what,
        where=f"{path}, key schema",
        rule=f"this version reads {kind.schema} (major {major})",
        remedy=remedy,
    )


@dataclass(frozen=True)
class _Report:
    """Collects the faults of one file."""

    path: Path
    kind: FileKind
    faults: list[Fault]

    def missing(self, key: str, hint: str | None) -> None:
        remedy = f"is it written {hint!r}?" if hint else self.kind.absent
        rule = f"{self.kind.schema} has the key {key}"
        self._add(f"key {key!r} is missing", key, rule, remedy)

    def unknown(self, key: str) -> None:
        rule = f"every key of {self.kind.schema} is known"
        self._add(f"key {key!r} is not known", key, rule, "remove it, or read it with its version")

    def ill_typed(self, key: str, expected: str, value: object) -> None:
        self._add(
            f"{key} is {_name_of(value)}", key, f"{key} is {expected}", f"give {expected} there"
        )

    def invalid(self, key: str, error: ValueError) -> None:
        self._add(str(error), key or "top level", str(error), "correct the file")

    def _add(self, what: str, key: str, rule: str, remedy: str) -> None:
        where = f"{self.path}, key {key}"
        self.faults.append(Fault(what=what, where=where, rule=rule, remedy=remedy))


def _section(cls: type[Any], value: object, at: str, report: _Report) -> object:
    """*value* as the dataclass *cls*, or None after reporting; *at* is its path of keys."""
    if not isinstance(value, dict):
        report.ill_typed(at, "an object", value)
        return None
    faults_before = len(report.faults)
    hints = get_type_hints(cls)
    names = [each.name for each in fields(cls) if each.init]
    known: dict[str, object] = {}
    for name in names:
        key = f"{at}.{name}" if at else name
        if name in value:
            known[name] = _decoded(hints[name], value[name], key, report)
        elif name not in getattr(cls, "_omitted_if_none", ()):
            report.missing(key, nearest(name, [k for k in value if k not in names]))
    if report.kind.closed:
        for name in value:
            if name not in {each.name for each in fields(cls)}:
                report.unknown(f"{at}.{name}" if at else name)
    if len(report.faults) > faults_before:
        return None
    try:
        return cls(**known)
    except ValueError as error:
        report.invalid(at, error)
        return None


def _decoded(hint: Any, value: object, at: str, report: _Report) -> object:
    """*value* checked against the type *hint* of its field, in the field's Python form."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is object:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        return _decoded(next(a for a in arguments if a is not NoneType), value, at, report)
    if is_dataclass(hint) and isinstance(hint, type):
        return _section(hint, value, at, report)
    if origin is Literal:
        if value not in arguments:
            report.ill_typed(at, "one of " + ", ".join(map(str, arguments)), value)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            report.ill_typed(at, "a list", value)
            return ()
        items = [_decoded(arguments[0], v, f"{at}[{i}]", report) for i, v in enumerate(value)]
        return tuple(items)
    if origin is Mapping:
        if not isinstance(value, dict):
            report.ill_typed(at, "an object", value)
            return {}
        return {k: _decoded(arguments[1], v, f"{at}.{k}", report) for k, v in value.items()}
    if not _is_scalar(hint, value):
        report.ill_typed(at, _JSON_NAMES[hint], value)
    return value


def _is_scalar(hint: type, value: object) -> bool:
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint  # exact: a JSON true is not the integer 1


def _name_of(value: object) -> str:
    name = _JSON_NAMES.get(type(value), type(value).__name__)
    return f"{value!r} ({name})" if isinstance(value, str | int | float) else name
