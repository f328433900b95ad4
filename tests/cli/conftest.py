"""Fixtures of the command line's tests: ``pagedctl generate`` here and in killed children."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedctl.cli.main import main
from tests.cli.generate_harness import Done, Generate, write_lines
from tests.cli.kill_harness import CommandLine, Ended
from tests.cli.resume_harness import (
    CODES,
    HEADER,
    INPUT,
    KILL,
    MANIFEST,
    NUM_LINES,
    OUTPUT,
    QUIET,
    WORDS,
    Copy,
    contents,
    killed_after,
)


@pytest.fixture
def generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Generate]:
    """Run the command in this process, in an empty folder, with *stdin* as its input."""
    for name in [name for name in os.environ if name.startswith("PAGEDCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    on_term, stdin = signal.getsignal(signal.SIGTERM), os.dup(0)

    def run(*words: str, stdin: bytes = b"") -> Done:
        reader, writer = os.pipe()
        os.write(writer, stdin)
        os.close(writer)
        os.dup2(reader, 0)
        os.close(reader)
        capfd.readouterr()
        code = main(["generate", *words])
        out, err = capfd.readouterr()
        return Done(code=code, out=out, err=err, folder=tmp_path)

    yield run
    os.dup2(stdin, 0)
    os.close(stdin)
    signal.signal(signal.SIGTERM, on_term)


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGEDCTL_")}
    home = str(tmp_path_factory.mktemp("home"))
    with CommandLine({**kept, "PAGEDCTL_HOME": home, "NO_COLOR": "1"}) as found:
        yield found


@pytest.fixture
def new_folder(tmp_path: Path) -> Copy:
    """Makes folders with the input in them."""
    made: list[Path] = []

    def make() -> Path:
        folder = tmp_path / f"run{len(made)}"
        folder.mkdir()
        write_lines(folder / "in.jsonl", *INPUT)
        made.append(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def whole(command: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """The folder of a run that nothing interrupted, and how one with ``--resume`` ended.

    The first run also writes the digests of the model's files, once for all.
    """
    plain, resumed = (tmp_path_factory.mktemp("whole") for _ in range(2))
    for folder in (plain, resumed):
        write_lines(folder / "in.jsonl", *INPUT)
    assert command.run(plain, *WORDS, *QUIET).code == 2
    ended = command.run(resumed, *WORDS, *QUIET, "--resume")
    assert ended.code == 2
    assert len(contents(plain / OUTPUT)) == NUM_LINES
    assert contents(resumed / OUTPUT) == contents(plain / OUTPUT)
    return plain, ended


@pytest.fixture(scope="session")
def killed(command: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed with seven lines, two of request a's three samples."""
    folder = tmp_path_factory.mktemp("killed")
    write_lines(folder / "in.jsonl", *INPUT)
    ended = command.run(folder, *WORDS, *QUIET, mutation=killed_after(7))
    assert ended.code == CODES[KILL]
    assert {path.name for path in folder.iterdir()} >= {"in.jsonl", OUTPUT, HEADER}
    assert not (folder / MANIFEST).exists()
    return folder
