"""The text of ``--help``: panels of options, names never cut, plain enough for a pipe.

Typer's own tables cut long flag names at 80 columns, and a name that is cut cannot be typed.
"""

from __future__ import annotations

from typing import Any

BELOW = 28
"""Columns of the names; a longer name has its help on the next line."""


def write_help(command: Any, context: Any, formatter: Any) -> None:
    """Write a command's or group's help with the parser's own formatter."""
    command.format_usage(context, formatter)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(str(command.help or ""))
    for panel, rows in _panels(command, context).items():
        with formatter.section(panel):
            formatter.write_dl(rows, col_max=BELOW)
    children = _children(command, context)
    if children:
        with formatter.section("Commands"):
            formatter.write_dl(children, col_max=BELOW)


def _panels(command: Any, context: Any) -> dict[str, list[tuple[str, str]]]:
    """Options by help panel, in the order of their first option."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for one in command.get_params(context):
        if any(spelling.startswith("-") for spelling in one.opts):
            panel = getattr(one, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append((_names(one), str(one.help or "")))
    own = panels.pop("Options", None)
    return panels if own is None else {**panels, "Options": own}


def _names(one: Any) -> str:
    """``-n, --n INT``, or ``--x/--no-x`` for a switch."""
    names = "/".join([", ".join(one.opts), *one.secondary_opts])
    is_switch = getattr(one, "is_flag", False)
    return names if is_switch else f"{names} {one.metavar or 'TEXT'}"


def _children(command: Any, context: Any) -> list[tuple[str, str]]:
    """A group's commands with the first line of their help."""
    children = getattr(command, "commands", {})
    return [(name, str(child.help or "").splitlines()[0]) for name, child in children.items()]
