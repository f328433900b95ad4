"""The command reference, written from the parser itself: ``docs/cli.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from pagedctl.cli.main import build_app

HEADER = """\
# Command reference

Generated from the parser by `scripts/write_docs.py`; a test keeps it current.

Options resolve as flag > environment variable > plan file > default. stdout is the result,
stderr the talk. Exit codes: 0 yes, 1 no, 2 no answer, 70 a fault of ours, 130 interrupted,
143 terminated.
"""


def reference_page() -> str:
    """The whole page as Markdown."""
    root = typer.main.get_command(build_app())
    sections = [_section(path, command) for path, command in walk(root, "pagedctl")]
    return HEADER + "\n" + "\n".join(sections)


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every runnable command below *command* with its full path."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    for name, child in children.items():
        yield from walk(child, f"{path} {name}")


def flag_names(command: Any) -> list[str]:
    """Every flag spelling of a command, sorted."""
    return sorted(
        spelling
        for one in command.params
        for spelling in (*one.opts, *one.secondary_opts)
        if spelling.startswith("-")
    )


def _section(path: str, command: Any) -> str:
    words = [one.metavar or one.name.upper() for one in command.params if not _is_option(one)]
    lines = [f"## {path}", "", str(command.help), "", f"`{' '.join([path, *words])} [OPTIONS]`", ""]
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        if _is_option(one):
            panel = getattr(one, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append(one)
    for panel, options in panels.items():
        lines += [f"**{panel}**", "", "| option | value | meaning |", "|---|---|---|"]
        lines += [_row(one) for one in options]
        lines.append("")
    return "\n".join(lines)


def _row(one: Any) -> str:
    spellings = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    value = "" if getattr(one, "is_flag", False) else str(one.metavar or "TEXT")
    help_text = str(one.help or "").replace("|", "\\|")
    return f"| {spellings} | {value.replace('|', chr(92) + '|')} | {help_text} |"


def _is_option(one: Any) -> bool:
    return any(spelling.startswith("-") for spelling in one.opts)
