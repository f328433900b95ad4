"""Reading a manifest back: our own major version, every key checked, nothing thrown away."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pagedctl.errors import ConfigError, Fault, nearest
from pagedctl.manifest import strict_json
from pagedctl.manifest.schema import SCHEMA, Manifest

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
class ManifestView:
    """A manifest as read. ``manifest`` has the known keys; ``raw`` is the whole object.

    ``extra`` are the top-level keys that this version does not know; unknown keys of inner
    objects are in ``raw``, where they stood. ``sha256`` is of the file's bytes, so that what
    was compared can be named.
    """

    path: Path
    sha256: str
    raw: Mapping[str, object]
    manifest: Manifest
    extra: Mapping[str, object]


def read_manifest(path: Path) -> ManifestView:
    """The manifest at *path*; ConfigError with every missing or ill-typed key otherwise."""
    data = _read_bytes(path)
    raw = strict_json.loads(data, where=str(path))
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} holds {_name_of(raw)}, not a manifest",
            where=str(path),
            rule="a manifest is one JSON object",
            remedy="name a file written by pagedctl",
        )
    _check_schema(raw, path)
    faults: list[Fault] = []
    manifest = _section(Manifest, raw, "", _Report(path, faults))
    if faults:
        raise ConfigError.of(faults)
    assert isinstance(manifest, Manifest)
    known = {each.name for each in fields(Manifest)}
    return ManifestView(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        raw=raw,
        manifest=manifest,
        extra={key: value for key, value in raw.items() if key not in known},
    )


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            where=str(path),
            rule="a manifest is a readable file",
            remedy="name an existing file written by pagedctl",
        ) from error
    if not data:
        raise ConfigError(
            f"{path} is empty",
            where=str(path),
            rule="a manifest is complete or absent",
            remedy="its writer was killed on a file system without hard links: run it again",
        )
    return data


def _check_schema(raw: Mapping[str, object], path: Path) -> None:
    """Accept our own major only; anything else is refused by its name."""
    found = raw.get("schema")
    if found == SCHEMA:
        return
    kind, major = SCHEMA.rsplit("/", 1)
    if "schema" not in raw:
        what, remedy = "key 'schema' is missing", "name a file written by pagedctl"
    elif isinstance(found, str) and found.rsplit("/", 1)[0] == kind:
        what = f"schema {found!r} is of another major version"
        remedy = "read it with the pagedctl version that it names under tool.version"
    else:
        what, remedy = f"schema {found!r} is not a manifest", "name a manifest"
    raise ConfigError(
        what,
        where=f"{path}, key schema",
        rule=f"this version reads {SCHEMA} (major {major})",
        remedy=remedy,
    )


@dataclass(frozen=True)
class _Report:
    """Collects the faults of one file."""

    path: Path
    faults: list[Fault]

    def missing(self, key: str, hint: str | None) -> None:
        remedy = f"is it written {hint!r}?" if hint else "write it; null means not measured"
        self._add(f"key {key!r} is missing", key, f"{SCHEMA} has the key {key}", remedy)

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
        elif name not in cls._omitted_if_none:
            report.missing(key, nearest(name, [k for k in value if k not in names]))
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
