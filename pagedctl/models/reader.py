"""Typed reads from one JSON object that collect every fault instead of stopping at the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pagedctl.errors import Fault
from pagedctl.models.json_object import json_kind

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SpecWarning:
    """Something that was decided for the user and does not stop the model from being served."""

    code: str
    where: str
    text: str


class ConfigReader:
    """Reads keys of one object; null means absent, a bool is never a number.

    Each read returns None both for an absent key and after recording a fault, so a caller
    that needs the value asks ``required`` (absence is then a fault too), and nobody builds
    a result while ``faults`` is not empty.
    """

    def __init__(self, values: Mapping[str, object], *, where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix
        self.faults: list[Fault] = []
        self.warnings: list[SpecWarning] = []

    def child(self, values: Mapping[str, object], prefix: str) -> ConfigReader:
        """A reader of an object inside this one; faults and warnings go to the same lists."""
        reader = ConfigReader(values, where=self.where, prefix=f"{self.prefix}{prefix}.")
        reader.faults = self.faults
        reader.warnings = self.warnings
        return reader

    def place(self, key: str) -> str:
        return f"{self.where}, key {self.prefix}{key}"

    def fault(self, key: str, what: str, rule: str, remedy: str) -> None:
        self.faults.append(Fault(what=what, where=self.place(key), rule=rule, remedy=remedy))

    def warn(self, code: str, key: str, text: str) -> None:
        self.warnings.append(SpecWarning(code=code, where=self.place(key), text=text))

    def get(self, key: str) -> object:
        """The raw value, or None if the key is absent or null."""
        return self.values.get(key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def integer(self, key: str, *, low: int = 1, high: int = MAX_INTEGER) -> int | None:
        """An integer in [low, high]; ``true`` and ``5.0`` are not integers."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self._bad_type(key, value, f"an integer in [{low}, {high}]")
            return None
        if not low <= value <= high:
            self._bad_range(key, value, f"{low} <= {key} <= {high}")
            return None
        return value

    def number(self, key: str, *, low: float, low_is_legal: bool = True) -> float | None:
        """A finite number at least *low* (above it, if ``low_is_legal`` is False)."""
        value = self.get(key)
        if value is None:
            return None
        rule = f"a finite number {'>=' if low_is_legal else '>'} {low:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._bad_type(key, value, rule)
            return None
        number = _as_float(value)
        if number is None or number < low or (number == low and not low_is_legal):
            self._bad_range(key, value, rule)
            return None
        return number

    def boolean(self, key: str) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        self._bad_type(key, value, "true or false")
        return None

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is None or isinstance(value, str):
            return value
        self._bad_type(key, value, "a string")
        return None

    def mapping(self, key: str) -> dict[str, object] | None:
        value = self.get(key)
        if value is None or isinstance(value, dict):
            return value
        self._bad_type(key, value, "an object")
        return None

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings (a transformers config object may hold a tuple)."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            self._bad_type(key, value, "a list of strings")
            return None
        return tuple(value)

    def required(self, key: str, *, high: int = MAX_INTEGER) -> int | None:
        """A positive integer that has no default: absence is a fault."""
        if not self.has(key):
            self.fault(
                key,
                f"{key} is missing",
                "the key must hold a positive integer; it has no default",
                f"add {key} to {self.where}",
            )
            return None
        return self.integer(key, high=high)

    def _bad_type(self, key: str, value: object, wanted: str) -> None:
        self.fault(
            key,
            f"{key} is {json_kind(value)}: {shown(value)}",
            f"{key} must be {wanted}",
            "correct the value",
        )

    def _bad_range(self, key: str, value: int | float, rule: str) -> None:
        self.fault(key, f"{key} is {shown(value)}", rule, "correct the value")


def _as_float(value: int | float) -> float | None:
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: object, limit: int = 80) -> str:
    """*value* as it stands in a message: JSON-like and short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def same_number(left: object, right: object) -> bool:
    """Equality in which a bool equals only itself and 1 equals 1.0."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return left == right
