"""Command lines with small work for every command that the program has.

A new command is covered by being registered. If it needs more than the values below, add the
value of its option or argument here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagedctl.cli.main import BODIES, main
from pagedctl.config.surface import COMMANDS, Command
from pagedctl.manifest.reader import read_manifest

SEED = 7
OPTIONS = {
    "seed": str(SEED),
    "max_tokens": "4",
    "requests": "2",
    "workload": "decode:requests=2,prompt=4,output=2",
    "warmup": "0",
    "repeats": "1",
    "kv_cache_memory_bytes": "16MiB",
    "input": "input.jsonl",
    "output": "output.jsonl",
    "cases": "rescore",
}
"""Small work for the commands that run an engine, by option."""

ARGUMENTS = {"model": ("embedded",), "plan": ("plan.toml",), "files": ("old.json", "old.json")}
PLAN = 'schema = "pagedctl.plan/1"\nname = "p"\n'
REQUESTS = (
    '{"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 2}',
    '{"id": "b", "prompt_token_ids": [8, 9], "max_tokens": 2}',
)
SEQUENCES = ('{"id": "a", "token_ids": [5, 6, 7, 8]}', '{"id": "b", "token_ids": [9, 10]}')


def input_lines(command: Command) -> tuple[str, ...]:
    """Two lines that the command takes."""
    return SEQUENCES if command.name == "score" else REQUESTS


def runs_an_engine(command: Command) -> bool:
    """Those that plan for an engine only, or never end, have its options too."""
    return "contract" in command.groups and command.name not in ("plan", "serve")


def engine_commands() -> list[str]:
    return [name for name in BODIES if runs_an_engine(COMMANDS[name])]


def words_of(command: Command, **options: str) -> list[str]:
    """The command with its arguments and, if it runs an engine, small work; *options* win."""
    words = command.name.split()
    for name in command.arguments:
        words += ARGUMENTS[name]
    given = OPTIONS if runs_an_engine(command) else {}
    for name, value in {**given, **options}.items():
        if name in command.all_options():
            words.append(f"--{name.replace('_', '-')}={value}")
    return words


class Folder:
    """A folder with what the commands read; they run in it, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *words: str) -> int:
        return main([*words])

    def manifest(self, command: Command, *, code: int = 0, **options: str) -> dict[str, Any]:
        """The manifest of *command*, which ends with *code*."""
        (self.path / "input.jsonl").write_text("\n".join(input_lines(command)) + "\n")
        (self.path / "output.jsonl").unlink(missing_ok=True)
        path = self.path / "m.json"
        path.unlink(missing_ok=True)
        assert self.run(*words_of(command, **options), "--json", str(path)) == code
        return dict(read_manifest(path).raw)


@contextmanager
def folder_of_commands(
    path: Path, monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str]
) -> Iterator[Folder]:
    """*path* as the working folder, with *environ* beside the test's own environment."""
    for name in [name for name in os.environ if name.startswith("PAGEDCTL_")]:
        monkeypatch.delenv(name)
    for name, value in {"PAGEDCTL_HOME": str(path / "home"), "NO_COLOR": "1", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(path)
    (path / "plan.toml").write_text(PLAN)
    on_term = signal.getsignal(signal.SIGTERM)
    folder = Folder(path)
    folder.run("env", "--quiet", "--json", "old.json")
    yield folder
    signal.signal(signal.SIGTERM, on_term)
