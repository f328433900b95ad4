"""Every command that the page about the contract shows gives what the page shows."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.conftest import ROOT, Cli

PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
SHOWN = [
    (command, output)
    for command, output in re.findall(r"```\n\$ (.*)\n((?:.*\n)*?)```", PAGE)
    if output
]
WIDE = {"COLUMNS": "400"}


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("command", "output"), SHOWN, ids=[command.split(" | ")[0] for command, _ in SHOWN]
)
def test_a_command_of_the_page_gives_what_it_shows(cli: Cli, command: str, output: str) -> None:
    """A list may be cut off where the page says so, behind the first error."""
    call, _, tail = command.partition(" | tail -")
    words = shlex.split(call)
    env = dict(word.split("=", 1) for word in words[: words.index("pagedctl")])
    done = cli(*words[words.index("pagedctl") + 1 :], env={**env, **WIDE})
    got = lines(done.stdout + done.stderr)
    want = lines(output)
    if tail:
        assert got[-int(tail) :] == want
    elif "--leaf" in call:
        assert got[: len(want)] == want
    else:
        assert got == want
    assert done.returncode == (0 if tail else 2)


def test_the_page_shows_commands() -> None:
    assert len(SHOWN) >= 8
