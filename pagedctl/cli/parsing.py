"""Command classes: flags with an optional value, and refusals in our own form.

Typer has no option whose value may be left out, so a bare one is rewritten to
``--flag=<marker>`` before parsing. Unknown flags are collected and answered together, each
with the nearest name or with ours for another tool's spelling.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from pagedctl.cli.help_page import write_help
from pagedctl.config.loader import unknown_name
from pagedctl.config.surface import COMMANDS
from pagedctl.errors import ConfigError, Fault, nearest

STANDARD_STREAM = "-"
"""As a path: stdin or stdout."""

BARE = "\0"
"""The value of an optional-value flag that stands bare. No argument can hold a NUL."""


class Command(TyperCommand):
    """A command whose bare optional-value flags and unknown flags are handled before parsing."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_help(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        optional = set(optional_value_flags(self.name_path(ctx)))
        rewritten = fill_bare_flags(args, optional)
        self._refuse_unknown(rewritten)
        return super().parse_args(ctx, rewritten)

    def name_path(self, ctx: Any) -> str:
        """The command's words without the program's: ``models inspect``."""
        return " ".join(str(ctx.command_path).split()[1:])

    def _refuse_unknown(self, args: list[str]) -> None:
        takes_value = {
            spelling: not getattr(one, "is_flag", False)
            for one in self.params
            for spelling in (*one.opts, *one.secondary_opts)
            if spelling.startswith("-")
        }
        takes_value["--help"] = False
        faults = [_unknown_flag(flag, takes_value) for flag in unknown_flags(args, takes_value)]
        if faults:
            raise ConfigError.of(faults)


class Group(TyperGroup):
    """A group that answers an unknown or reserved command with the nearest name."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        write_help(self, ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        raise ConfigError.of([self._unknown_command(ctx, name)])

    def _unknown_command(self, ctx: Any, name: str) -> Fault:
        prefix = " ".join(str(ctx.command_path).split()[1:])
        full = f"{prefix} {name}".strip()
        known = list(self.commands)
        reserved = [other.split()[0] for other in COMMANDS if not prefix]
        if full in COMMANDS or name in reserved:
            return Fault(
                what=f"{full} is not available in this version",
                where="command line",
                rule=f"this version has the commands {', '.join(known)}",
                remedy="use a version that has it",
            )
        close = _meant(name, [*known, *reserved])
        return Fault(
            what=f"{full} is not a command",
            where="command line",
            rule=f"one of {', '.join(known)}",
            remedy=f"did you mean {close}?" if close else f"see {ctx.command_path} --help",
        )


def _meant(name: str, names: list[str]) -> str | None:
    """The name that *name* begins, else the nearest one."""
    begun = (one for one in names if name and one.startswith(name))
    return next(begun, None) or nearest(name, names)


def optional_value_flags(command: str) -> Iterable[str]:
    """The flags of *command* whose value may be left out."""
    known = COMMANDS.get(command)
    options = known.all_options().values() if known else ()
    return (one.flag for one in options if one.optional_value)


def fill_bare_flags(args: list[str], optional: set[str]) -> list[str]:
    """Give each bare optional-value flag the marker; words after ``--`` are left alone.

    A flag is bare if it is the last word or is followed by a word that starts with ``-``
    (``-`` itself is a path).
    """
    filled: list[str] = []
    for position, word in enumerate(args):
        if word == "--":
            return filled + args[position:]
        following = args[position + 1] if position + 1 < len(args) else None
        bare = following is None or (following.startswith("-") and following != "-")
        filled.append(f"{word}={BARE}" if word in optional and bare else word)
    return filled


def unknown_flags(args: list[str], takes_value: dict[str, bool]) -> list[str]:
    """The words of *args* that look like flags and are none, in order, each once."""
    unknown: dict[str, None] = {}
    words = iter(args)
    for word in words:
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            continue
        name, has_value, _ = word.partition("=")
        if name in takes_value:
            if takes_value[name] and not has_value:
                next(words, None)
        elif word[:2] not in takes_value:
            unknown[name] = None
    return list(unknown)


def _unknown_flag(flag: str, known: Iterable[str]) -> Fault:
    name = flag.lstrip("-").replace("-", "_")
    names = [one.lstrip("-").replace("-", "_") for one in known if one.startswith("--")]
    fault = unknown_name(name, names, "command line")
    remedy = fault.remedy
    if remedy.startswith("did you mean "):
        close = remedy.removeprefix("did you mean ").rstrip("?")
        remedy = f"did you mean --{close.replace('_', '-')}?"
    return Fault(
        what=f"{flag} is not a flag of this command",
        where="command line",
        rule="unknown flags are refused",
        remedy=remedy,
    )
