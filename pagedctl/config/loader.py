"""The one loader: flags, environment, plan file and defaults become values with origins.

Precedence is flag > environment variable > plan file > default. Every fault of every source
is reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pagedctl.config.kinds import Broken
from pagedctl.config.options import Option
from pagedctl.config.other_tools import OTHER_TOOLS
from pagedctl.errors import ConfigError, Fault, nearest

DEFAULT = "default"
ARGUMENT = "argument"
FLAG = "flag"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Values of one level of precedence, not yet checked.

    ``origin`` is what the manifest records. ``where`` names the place of one value for an
    error. ``as_text`` marks values that arrive as text (flags, environment).
    """

    origin: Callable[[str], str]
    where: Callable[[str], str]
    values: Mapping[str, object]
    as_text: bool = False


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Every option's value, and where each came from."""

    values: Mapping[str, object]
    origins: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Two options that may not be given at the same level; across levels the higher wins."""

    first: str
    second: str
    rule: str


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        first="gpu_memory_utilization",
        second="kv_cache_memory_bytes",
        rule="the pool is sized by a share of the device or by exact bytes, not by both",
    ),
)


@dataclass(kw_only=True)
class _Resolution:
    """The values found so far, and the faults."""

    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def flag_source(values: Mapping[str, object]) -> Source:
    """Values given on the command line."""
    return Source(
        origin=lambda name: FLAG,
        where=lambda name: f"flag {flag_of(name)}",
        values=values,
        as_text=True,
    )


def argument_source(values: Mapping[str, object]) -> Source:
    """Values given as Python keyword arguments."""
    return Source(
        origin=lambda name: ARGUMENT, where=lambda name: f"argument {name}", values=values
    )


def environment_source(options: Mapping[str, Option], environ: Mapping[str, str]) -> Source:
    """Values of the environment variables that the options name; an empty one is absent."""
    variables = {one.name: one.env for one in options.values() if one.env is not None}
    values = {
        name: environ[variable] for name, variable in variables.items() if environ.get(variable)
    }
    return Source(
        origin=lambda name: f"env {variables[name]}",
        where=lambda name: f"environment variable {variables[name]}",
        values=values,
        as_text=True,
    )


def plan_source(path: str, values: Mapping[str, object], tables: Mapping[str, str]) -> Source:
    """Values of a plan file; ``tables`` names the table of each key."""
    return Source(
        origin=lambda name: f"plan {path}",
        where=lambda name: f"{path}, key {tables.get(name, '?')}.{name}",
        values=values,
    )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def resolve(options: Mapping[str, Option], sources: Sequence[Source]) -> Resolved:
    """Resolve *options* over *sources*, the strongest first.

    Raises ConfigError with every unknown name, broken value and clash of all sources.
    """
    state = _Resolution()
    dropped: set[str] = set()
    for source in sources:
        given = {name: value for name, value in source.values.items() if value is not None}
        state.faults.extend(_unknown_names(options, source, given))
        checked = _check_values(options, source, given, state.faults)
        state.faults.extend(_clashes(source, checked))
        for name, value in checked.items():
            if name not in state.values and name not in dropped:
                state.values[name] = value
                state.origins[name] = source.origin(name)
        dropped |= _excluded_by(state.values)
    if state.faults:
        raise ConfigError.of(state.faults)
    for name, one in options.items():
        state.values.setdefault(name, one.default)
        state.origins.setdefault(name, DEFAULT)
    ordered = {name: state.values[name] for name in options}
    return Resolved(values=ordered, origins={name: state.origins[name] for name in options})


def _check_values(
    options: Mapping[str, Option],
    source: Source,
    given: Mapping[str, object],
    faults: list[Fault],
) -> dict[str, object]:
    checked: dict[str, object] = {}
    for name, value in given.items():
        if name not in options:
            continue
        try:
            checked[name] = check_value(options[name], value, as_text=source.as_text)
        except Broken as broken:
            faults.append(broken_fault(name, value, broken, source.where(name)))
    return checked


def check_value(one: Option, value: object, *, as_text: bool) -> object:
    if one.repeatable:
        return _check_repeated(one, value, as_text=as_text)
    if as_text and isinstance(value, str):
        return one.kind.parse(value)
    return one.kind.check(value)


def _check_repeated(one: Option, value: object, *, as_text: bool) -> tuple[object, ...]:
    if not as_text and isinstance(value, dict):
        checked = one.kind.check(value)
        assert isinstance(checked, tuple)
        return checked
    parts = value if isinstance(value, list | tuple) else (value,)
    take = one.kind.parse if as_text else one.kind.check
    found: list[object] = []
    for part in parts:
        item = take(part)
        found.extend(item) if isinstance(item, tuple) else found.append(item)
    return tuple(found)


def broken_fault(name: str, value: object, broken: Broken, where: str) -> Fault:
    return Fault(
        what=f"{name} {spell(value)} {broken.problem}",
        where=where,
        rule=f"{name}: {broken.rule}",
        remedy=broken.remedy or "give a value that keeps the rule",
    )


def spell(value: object) -> str:
    """A value as an error shows it: as written in a plan file, cut at 80 characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value) if isinstance(value, str) and (not value or " " in value) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown_names(
    options: Mapping[str, Option], source: Source, given: Iterable[str]
) -> list[Fault]:
    return [
        unknown_name(name, options, source.where(name)) for name in given if name not in options
    ]


def unknown_name(name: str, known: Iterable[str], where: str) -> Fault:
    """The fault of a name that is not an option, with the nearest one that is."""
    names = list(known)
    if name in OTHER_TOOLS:
        remedy = f"use {OTHER_TOOLS[name]}"
    else:
        close = nearest(name, names)
        remedy = f"did you mean {close}?" if close else "remove it"
    return Fault(
        what=f"{name} is not a known option",
        where=where,
        rule="unknown names are refused",
        remedy=remedy,
    )


def _clashes(source: Source, checked: Mapping[str, object]) -> list[Fault]:
    return [
        Fault(
            what=f"{pair.first} and {pair.second} exclude each other",
            where=f"{source.where(pair.first)} and {source.where(pair.second)}",
            rule=pair.rule,
            remedy="give one of them",
        )
        for pair in EXCLUSIONS
        if pair.first in checked and pair.second in checked
    ]


def _excluded_by(values: Mapping[str, object]) -> set[str]:
    """Names that a value of this or a higher level shuts out at the levels below."""
    shut = {pair.second for pair in EXCLUSIONS if pair.first in values}
    return shut | {pair.first for pair in EXCLUSIONS if pair.second in values}
