"""Options as data: a dataclass field that also knows its kind, its help and its default's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedctl.config.kinds import Kind

_KEY = "pagedctl.option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: the same name as flag, plan key, dataclass field and manifest key.

    ``default`` None means "not given"; ``default_text`` then says what is derived from.
    ``env`` is the one environment variable that may set it. ``repeatable`` options take a
    tuple. ``optional_value`` marks a flag that may stand without its value. ``short`` is the
    short flag.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    default_text: str | None = None
    env: str | None = None
    repeatable: bool = False
    optional_value: bool = False
    short: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def default_words(self) -> str:
        """The default as help prints it."""
        if self.default_text is not None:
            return self.default_text
        if self.default is None:
            return "not given"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.default == ():
            return "none"
        return str(self.default)


def option(
    kind: Kind,
    help: str,
    *,
    default: Any = None,
    default_text: str | None = None,
    env: str | None = None,
    repeatable: bool = False,
    optional_value: bool = False,
    short: str | None = None,
) -> Any:
    """A dataclass field that is an option; see :class:`Option` for the arguments."""
    described = {
        "kind": kind,
        "help": help,
        "default": default,
        "default_text": default_text,
        "env": env,
        "repeatable": repeatable,
        "optional_value": optional_value,
        "short": short,
    }
    return dataclasses.field(default=default, metadata={_KEY: described})


def options_of(group: type) -> Mapping[str, Option]:
    """The options of a dataclass, by name, in the order of their definition."""
    return {
        one.name: Option(name=one.name, **one.metadata[_KEY])
        for one in dataclasses.fields(group)
        if _KEY in one.metadata
    }
