"""Kinds of option values: one place that parses, checks and describes each.

A value reaches us as text (a flag or an environment variable) or typed (a plan file or a
Python argument). ``parse`` takes text, ``check`` takes a typed value; both return the value
or raise :class:`Broken` with the rule that was broken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, Protocol

from pagedctl.errors import nearest

_DIGITS = re.compile(r"[+-]?[0-9]{1,400}")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|nan)")
"""Plain ASCII numbers; int() and float() also take 1_0, spaces and the digits of other scripts."""


class Broken(Exception):
    """A value breaks its kind's rule. ``problem`` completes the sentence "<name> <value> ..."."""

    def __init__(self, problem: str, rule: str, remedy: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.rule = rule
        self.remedy = remedy


class Kind(Protocol):
    """What every kind of value offers."""

    @property
    def metavar(self) -> str:
        """The placeholder in help texts, for example ``INT``."""

    def parse(self, text: str) -> object: ...

    def check(self, value: object) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Integer:
    """An integer within inclusive bounds. A bool is not an integer, nor is 5.0."""

    minimum: int | None = None
    maximum: int | None = None
    nonzero: bool = False
    metavar: str = "INT"

    def parse(self, text: str) -> int:
        if not _DIGITS.fullmatch(text):
            raise Broken("is not an integer", self._rule())
        return self.check(int(text))

    def check(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise Broken("is not an integer", self._rule())
        if self.minimum is not None and value < self.minimum:
            raise Broken("is out of range", self._rule())
        if self.maximum is not None and value > self.maximum:
            raise Broken("is out of range", self._rule())
        if self.nonzero and value == 0:
            raise Broken("is out of range", self._rule())
        return value

    def _rule(self) -> str:
        low = "" if self.minimum is None else f" >= {self.minimum}"
        high = "" if self.maximum is None else f" <= {self.maximum}"
        other = " other than 0" if self.nonzero else ""
        return "an integer" + " and".join(part for part in (low, high, other) if part)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A finite number. Bounds are inclusive unless ``above`` is used."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    or_zero: bool = False
    metavar: str = "FLOAT"

    def parse(self, text: str) -> float:
        if not _DECIMAL.fullmatch(text):
            raise Broken("is not a number", self._rule())
        return self.check(float(text))

    def check(self, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Broken("is not a number", self._rule())
        number = float(value)
        if self.or_zero and number == 0:
            return 0.0
        too_low = (self.minimum is not None and number < self.minimum) or (
            self.above is not None and number <= self.above
        )
        too_high = self.maximum is not None and number > self.maximum
        if not math.isfinite(number) or too_low or too_high:
            raise Broken("is out of range", self._rule())
        return number

    def _rule(self) -> str:
        parts = []
        if self.minimum is not None:
            parts.append(f">= {self.minimum:g}")
        if self.above is not None:
            parts.append(f"> {self.above:g}")
        if self.maximum is not None:
            parts.append(f"<= {self.maximum:g}")
        rule = "a finite number" + (" " + " and ".join(parts) if parts else "")
        return f"0, or {rule}" if self.or_zero else rule


@dataclass(frozen=True, kw_only=True)
class Boolean:
    """true or false; on the command line ``--x`` and ``--no-x``."""

    metavar: str = "BOOL"

    def parse(self, text: str) -> bool:
        if text in ("true", "false"):
            return text == "true"
        raise Broken("is not true or false", "true or false")

    def check(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise Broken("is not true or false", "true or false, without quotes")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of a closed set of words.

    ``later`` names words that are reserved and not available in this version; ``instead``
    maps a word that other tools use to ours. ``otherwise`` is the remedy for an unknown word
    where more is to be said than the nearest one.
    """

    values: tuple[str, ...]
    later: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    otherwise: str | None = None

    @property
    def metavar(self) -> str:
        return "|".join(self.values)

    def parse(self, text: str) -> str:
        return self.check(text)

    def check(self, value: object) -> str:
        rule = f"one of {', '.join(self.values)}"
        if not isinstance(value, str):
            raise Broken("is not a word", rule)
        if value in self.values:
            return value
        if value in self.later:
            raise Broken("is not available in this version", rule)
        if value in self.instead:
            raise Broken("is another tool's name", rule, f"use {self.instead[value]}")
        close = nearest(value, self.values)
        raise Broken(
            "is unknown", rule, self.otherwise or (f"did you mean {close}?" if close else None)
        )


@dataclass(frozen=True, kw_only=True)
class IntegerChoice:
    """One of a closed set of integers."""

    values: tuple[int, ...]

    @property
    def metavar(self) -> str:
        return "|".join(map(str, self.values))

    def parse(self, text: str) -> int:
        if not _DIGITS.fullmatch(text):
            raise Broken("is not an integer", self._rule())
        return self.check(int(text))

    def check(self, value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and value in self.values:
            return value
        raise Broken("is not among the allowed values", self._rule())

    def _rule(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"


@dataclass(frozen=True, kw_only=True)
class Text:
    """Any text that is not empty.

    ``path`` says whether a relative path in a plan file is relative to that file: ``never``
    (not a path), ``always``, or ``if_exists`` (a name unless such a file is there).
    """

    metavar: str = "TEXT"
    path: Literal["never", "always", "if_exists"] = "never"

    def parse(self, text: str) -> str:
        return self.check(text)

    def check(self, value: object) -> str:
        if not isinstance(value, str):
            raise Broken("is not text", "text in quotes")
        if not value:
            raise Broken("is empty", "text that is not empty")
        return value


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Text of a fixed form, given as a regular expression and in words."""

    regex: str
    form: str
    metavar: str = "TEXT"

    def parse(self, text: str) -> str:
        return self.check(text)

    def check(self, value: object) -> str:
        if isinstance(value, str) and re.fullmatch(self.regex, value):
            return value
        raise Broken("has an unknown form", self.form)


SIZE_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


MAX_SIZE_BYTES = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """Bytes: an integer, or a number with KiB, MiB or GiB. The value is an int of bytes."""

    minimum: int = 1
    metavar: str = "SIZE"

    def parse(self, text: str) -> int:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(KiB|MiB|GiB)", text)
        if match is not None:
            return self._in_range(round(Fraction(match[1]) * SIZE_UNITS[match[2]]))
        if re.fullmatch(r"[0-9]{1,400}", text):
            return self._in_range(int(text))
        raise Broken("is not a size", self._rule())

    def check(self, value: object) -> int:
        if isinstance(value, str):
            return self.parse(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise Broken("is not a size", self._rule())
        return self._in_range(value)

    def _in_range(self, size_bytes: int) -> int:
        if not self.minimum <= size_bytes <= MAX_SIZE_BYTES:
            raise Broken("is out of range", self._rule())
        return size_bytes

    def _rule(self) -> str:
        return (
            "bytes as an integer, or a number with KiB, MiB or GiB; "
            f"at least {self.minimum}, below 2^63"
        )


DURATION_UNITS = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1_000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A time: a number with us, ms, s, min or h. The value is seconds."""

    metavar: str = "DURATION"

    def parse(self, text: str) -> float:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|min|h)", text)
        if match is None or float(match[1]) == 0:
            raise Broken("is not a duration", "a number above 0 with us, ms, s, min or h")
        return float(Fraction(match[1]) * DURATION_UNITS[match[2]])

    def check(self, value: object) -> float:
        if isinstance(value, str):
            return self.parse(value)
        raise Broken("is not a duration", "text such as 20us or 1.5h")


@dataclass(frozen=True, kw_only=True)
class ListOf:
    """A list of values of one kind; commas separate them in text. One value is a list of one."""

    item: Kind

    @property
    def metavar(self) -> str:
        metavar = self.item.metavar
        return "NAME,..." if "|" in metavar else f"{metavar},..."

    def parse(self, text: str) -> tuple[object, ...]:
        return tuple(self.item.parse(part.strip()) for part in text.split(","))

    def check(self, value: object) -> tuple[object, ...]:
        values = value if isinstance(value, list | tuple) else (value,)
        if not values:
            raise Broken("is empty", "a list with at least one value")
        return tuple(self.item.check(one) for one in values)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """``KEY=VALUE`` replacements of assumed terms, in order; a table in a plan file."""

    metavar: str = "KEY=VALUE"

    def parse(self, text: str) -> tuple[tuple[str, str], ...]:
        key, found, value = text.partition("=")
        if not found or not key or not value:
            raise Broken("has an unknown form", "KEY=VALUE")
        return ((key, value),)

    def check(self, value: object) -> tuple[tuple[str, str], ...]:
        if not isinstance(value, dict):
            raise Broken("is not a table", "a table of KEY = VALUE")
        return tuple((str(key), _assumed_text(one)) for key, one in value.items())


def _assumed_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
