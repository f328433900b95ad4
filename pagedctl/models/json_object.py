"""JSON objects from a model's files: strict JSON, every departure a ModelError."""

from __future__ import annotations

from pathlib import Path

from pagedctl.errors import ConfigError, ModelError
from pagedctl.manifest import strict_json


def parse_object(data: bytes, *, where: str) -> dict[str, object]:
    """The JSON object in *data*; any other value, and what is not strict JSON, is refused."""
    try:
        value = strict_json.loads(data, where=where)
    except ConfigError as error:
        raise ModelError.of(error.faults) from None
    if not isinstance(value, dict):
        raise ModelError(
            f"the file holds {json_kind(value)}, not an object",
            where=where,
            rule="the file holds one JSON object",
            remedy="correct the file, or fetch it again",
        )
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
