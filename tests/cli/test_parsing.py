"""Flags with an optional value, unknown flags, unknown and reserved commands."""

from __future__ import annotations

import pytest

from pagedctl.cli.parsing import BARE, fill_bare_flags, unknown_flags
from tests.conftest import Cli

OPTIONAL = {"--json", "--hf-ref"}


@pytest.mark.parametrize(
    ("args", "filled"),
    [
        (["--json"], [f"--json={BARE}"]),
        (["--json", "--quiet"], [f"--json={BARE}", "--quiet"]),
        (["--json", "-q"], [f"--json={BARE}", "-q"]),
        (["--json", "a.json"], ["--json", "a.json"]),
        (["--json", "-"], ["--json", "-"]),
        (["--json=a.json", "--quiet"], ["--json=a.json", "--quiet"]),
        (["--hf-ref", "--json", "x"], [f"--hf-ref={BARE}", "--json", "x"]),
        (["--tp", "--json"], ["--tp", f"--json={BARE}"]),
        (["--", "--json"], ["--", "--json"]),
        ([], []),
    ],
)
def test_a_bare_flag_is_filled_and_nothing_else_is(args: list[str], filled: list[str]) -> None:
    assert fill_bare_flags(args, OPTIONAL) == filled


@pytest.mark.parametrize(
    ("args", "unknown"),
    [
        (["--tp", "2", "-q"], []),
        (["--top-k", "-1"], []),
        (["--tp=2", "-n3", "-"], []),
        (["--tpp", "2", "--tp", "--weird"], ["--tpp"]),
        (["--bad=1", "--worse", "--bad=2"], ["--bad", "--worse"]),
        (["--", "--bad"], []),
    ],
)
def test_unknown_flags_are_found_and_values_are_not_mistaken(
    args: list[str], unknown: list[str]
) -> None:
    known = {"--tp": True, "--top-k": True, "-q": False, "-n": True}
    assert unknown_flags(args, known) == unknown


def test_all_unknown_flags_are_answered_together(cli: Cli) -> None:
    done = cli("env", "--jsn", "--enable-deterministic-inference", "--max-seq-len", "4")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "error: --jsn is not a flag of this command"
    assert lines[3] == "remedy: did you mean --json?"
    assert "remedy: use --numerics invariant" in lines
    assert "remedy: use --max-model-len" in lines
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "first", "remedy"),
    [
        (["envv"], "error: envv is not a command", "remedy: did you mean env?"),
        (["gen"], "error: gen is not a command", "remedy: did you mean generate?"),
        (["zzz"], "error: zzz is not a command", "remedy: see pagedctl --help"),
        (["models", "zzz"], "error: models zzz is not", "remedy: see pagedctl models --help"),
        (["serve"], "error: serve is not available in this version", None),
        (["models", "lst"], "error: models lst is not a command", "remedy: did you mean list?"),
        (["env", "surplus"], "error: Got unexpected extra argument", None),
        (["env", "--plan"], "error: Option '--plan' requires an argument", None),
        (["models", "inspect"], "error: Missing argument 'MODEL'", None),
    ],
)
def test_a_wrong_command_line_is_refused_in_our_form(
    cli: Cli, words: list[str], first: str, remedy: str | None
) -> None:
    done = cli(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(first)
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "error",
        "where",
        "rule",
        "remedy",
    ]
    if remedy is not None:
        assert remedy in done.stderr
