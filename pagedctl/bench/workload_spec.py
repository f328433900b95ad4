"""Parsing ``NAME[:key=value,...]``, the SPEC of a built-in workload. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import get_type_hints

from pagedctl.bench.shapes import FIXED, SHAPES, Groups, LengthRange, Shape
from pagedctl.config.groups import MAX_SEED
from pagedctl.config.kinds import Broken, Integer, Kind, Number
from pagedctl.config.loader import broken_fault
from pagedctl.errors import ConfigError, Fault, nearest

NAMES = (*SHAPES, *FIXED)
"""Every built-in workload: those with parameters first."""

SPEC_FORM = "NAME[:key=value,...], or the path of a JSON lines file"


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens: a number, or a range that includes both ends."""

    metavar: str = "LOW..HIGH"

    def parse(self, text: str) -> LengthRange:
        match = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", text)
        if match is None:
            raise Broken("is not a length", self._rule())
        low = int(match[1])
        high = int(match[2]) if match[2] else low
        if not 1 <= low <= high:
            raise Broken("is out of range", self._rule())
        return LengthRange(low, high)

    def check(self, value: object) -> object:
        raise Broken("is not text", self._rule())

    def _rule(self) -> str:
        return "a number of tokens, or LOW..HIGH with 1 <= LOW <= HIGH"


def parse_shape(text: str) -> Shape | None:
    """The shape that *text* asks for; None if it does not start with a built-in name.

    A fixed workload takes no parameters. Raises ConfigError with every fault of *text*.
    """
    name, colon, body = text.partition(":")
    if name in FIXED:
        if colon:
            raise ConfigError.of([_fixed_takes_none(text, name)])
        return FIXED[name].shape
    if name not in SHAPES:
        return None
    return _parse_parameters(text, SHAPES[name], body if colon else None)


def unknown_workload(text: str) -> ConfigError:
    """The refusal of a *text* that is neither a workload nor a file."""
    close = nearest(text.partition(":")[0], NAMES)
    return ConfigError(
        f"{text} is neither a workload nor a file",
        where="workload",
        rule=f"{SPEC_FORM}; NAME is one of {', '.join(NAMES)}",
        remedy=f"did you mean {close}?" if close else "check the name or the path",
    )


def _parse_parameters(text: str, shape: type[Shape], body: str | None) -> Shape:
    kinds = _kinds(shape)
    values: dict[str, object] = {}
    faults: list[Fault] = []
    for key, value in _pairs(text, body, faults):
        if key not in kinds:
            faults.append(_unknown_parameter(text, shape, key, kinds))
        elif key in values:
            faults.append(_given_twice(text, key))
        else:
            try:
                values[key] = kinds[key].parse(value)
            except Broken as broken:
                values[key] = None
                faults.append(broken_fault(key, value, broken, _where(text, key)))
    if faults:
        raise ConfigError.of(faults)
    built = shape(**values)  # type: ignore[arg-type]
    if isinstance(built, Groups) and built.min > built.max:
        raise ConfigError.of([_min_above_max(text, built)])
    return built


def _pairs(text: str, body: str | None, faults: list[Fault]) -> Iterator[tuple[str, str]]:
    for part in body.split(",") if body is not None else ():
        key, equals, value = part.partition("=")
        if equals and key and value:
            yield key, value
        else:
            faults.append(_malformed(text, part))


def _kinds(shape: type[Shape]) -> Mapping[str, Kind]:
    """The kind of each parameter: by its name where that has bounds of its own, else by type."""
    by_name: Mapping[str, Kind] = {
        "seed": Integer(minimum=0, maximum=MAX_SEED),
        "median": Number(above=0),
        "sigma": Number(minimum=0),
    }
    by_type: Mapping[type, Kind] = {int: Integer(minimum=1), LengthRange: Lengths()}
    hints = get_type_hints(shape)
    return {one.name: by_name.get(one.name) or by_type[hints[one.name]] for one in fields(shape)}


def _where(text: str, key: str) -> str:
    return f"workload {text}, parameter {key}"


def _fixed_takes_none(text: str, name: str) -> Fault:
    return Fault(
        what=f"{name} takes no parameters",
        where=f"workload {text}",
        rule="a fixed workload is the same everywhere",
        remedy=f"use {FIXED[name].shape.spec()}",
    )


def _unknown_parameter(text: str, shape: type[Shape], key: str, known: Mapping[str, Kind]) -> Fault:
    close = nearest(key, known)
    return Fault(
        what=f"{shape.name} has no parameter {key}",
        where=_where(text, key),
        rule=f"one of {', '.join(known)}",
        remedy=f"did you mean {close}?" if close else "remove it",
    )


def _given_twice(text: str, key: str) -> Fault:
    return Fault(
        what=f"{key} is given twice",
        where=_where(text, key),
        rule="each parameter stands once",
        remedy="remove one of the two",
    )


def _malformed(text: str, part: str) -> Fault:
    return Fault(
        what=f"{part!r} is not a parameter",
        where=f"workload {text}",
        rule=SPEC_FORM,
        remedy="write it as key=value",
    )


def _min_above_max(text: str, shape: Groups) -> Fault:
    return Fault(
        what=f"min {shape.min} is above max {shape.max}",
        where=f"workload {text}",
        rule="outputs are clipped to [min, max]",
        remedy="give min <= max",
    )
