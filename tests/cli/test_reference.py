"""The flags are frozen, documented with their default, and the reference is the parser's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from pagedctl.cli.main import BODIES, build_app
from pagedctl.cli.reference import flag_names, reference_page, walk
from pagedctl.config.options import Option
from pagedctl.config.surface import COMMANDS

FILES = [
    "--json",
    "--no-progress",
    "--no-quiet",
    "--plan",
    "--progress",
    "--quiet",
    "-q",
]
FROZEN = {
    "pagedctl env": FILES,
    "pagedctl models list": FILES,
    "pagedctl models inspect": sorted([*FILES, "--tp"]),
}


def commands() -> dict[str, Any]:
    return dict(walk(typer.main.get_command(build_app()), "pagedctl"))


def test_the_list_of_flags_is_frozen() -> None:
    assert {path: flag_names(one) for path, one in commands().items()} == FROZEN


def test_every_command_of_the_parser_is_in_the_surface_table() -> None:
    assert {path.removeprefix("pagedctl ") for path in commands()} == set(BODIES) <= set(COMMANDS)


def test_every_line_of_help_ends_with_the_default_and_names_its_variable() -> None:
    for one in commands().values():
        for parameter in one.params:
            if parameter.name in ("help", "model", "files"):
                continue
            assert "Default: " in parameter.help
            assert parameter.help.endswith(".")
    plan = next(p for p in commands()["pagedctl env"].params if p.name == "plan")
    assert "PAGEDCTL_PLAN" in plan.help


def test_the_reference_page_has_every_command_and_flag() -> None:
    page = reference_page()
    for path, one in commands().items():
        assert f"## {path}\n" in page
        assert all(f"`{name}`" in page for name in flag_names(one))


def test_the_reference_page_on_disk_is_current() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == reference_page()


def test_every_option_of_the_surface_says_its_default() -> None:
    options: list[Option] = [
        one for command in COMMANDS.values() for one in command.all_options().values()
    ]
    assert len(options) > 100
    assert all(one.default_words() and one.help for one in options)
