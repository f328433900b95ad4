"""Turns the surface table into Typer parameters, so that a flag exists exactly once.

Flags arrive as text and stay text here: the one loader parses and checks them together with
the environment and the plan file, and reports all faults at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Optional

import typer

from pagedctl.config.kinds import Boolean
from pagedctl.config.options import Option
from pagedctl.config.surface import (
    GROUPS,
    PRESET_OPTIONS,
    SINGLE_SWITCHES_PANEL,
    Command,
)

OWN_PANEL = "This command"


def signature_of(command: Command) -> inspect.Signature:
    """The Typer signature of *command*: positional arguments, own options, shared groups."""
    parameters = [_argument(name, command) for name in command.arguments]
    parameters += [_parameter(one, OWN_PANEL) for one in command.options.values()]
    for name in command.groups:
        for one in GROUPS[name].options.values():
            if one.name not in command.options:
                parameters.append(_parameter(one, panel_of(name, one)))
    return inspect.Signature(parameters)


def panel_of(group: str, one: Option) -> str:
    """The help panel of a shared option."""
    if group == "contract" and one.name not in PRESET_OPTIONS:
        return SINGLE_SWITCHES_PANEL
    return GROUPS[group].panel


def help_of(one: Option) -> str:
    """An option's help line: what it is, its environment variable, its default."""
    variable = f" (environment: {one.env})" if one.env else ""
    return f"{one.help}{variable}. Default: {one.default_words()}."


def declarations(one: Option) -> tuple[str, ...]:
    """The spellings of an option on the command line."""
    long = one.flag
    if isinstance(one.kind, Boolean):
        long = f"{one.flag}/--no-{one.flag[2:]}"
    return (long,) if one.short is None else (one.short, long)


def metavar_of(one: Option) -> str:
    metavar = one.kind.metavar
    return f"[{metavar}]" if one.optional_value else metavar


def split_arguments(
    command: Command, values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate positional arguments from flags, by the surface table."""
    arguments = {name: values[name] for name in command.arguments}
    flags = {name: value for name, value in values.items() if name not in arguments}
    return arguments, flags


def _argument(name: str, command: Command) -> inspect.Parameter:
    plural = name.endswith("s")
    kind: Any = list[str] if plural else str
    annotation = Annotated[kind, typer.Argument(metavar=name.rstrip("s").upper())]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _parameter(one: Option, panel: str) -> inspect.Parameter:
    boolean = isinstance(one.kind, Boolean)
    value: Any = bool if boolean else list[str] if one.repeatable else str
    info = typer.Option(
        *declarations(one),
        help=help_of(one),
        metavar=None if boolean else metavar_of(one),
        rich_help_panel=panel,
        show_default=False,
    )
    return inspect.Parameter(
        one.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[value], info],  # noqa: UP045  (a runtime annotation)
    )
