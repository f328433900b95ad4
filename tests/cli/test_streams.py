"""Standard streams that are closed, full, or that nobody reads: what that does to the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GENERATE = ("generate", "--prompt", "Tom", "--max-tokens", "2", "--unverified")
SMALL_POOL = ("--kv-cache-memory-bytes", "16MiB")
BENCH = ("bench", "--workload", "decode:requests=1,prompt=3,output=2", "--repeats", "1")
COMMANDS = [
    ("--help",),
    ("generate", "--help"),
    ("--version",),
    ("models",),
    ("models", "list"),
    ("models", "inspect", "embedded"),
    ("env",),
    ("env", "--json"),
    (*GENERATE, *SMALL_POOL),
    (*BENCH, *SMALL_POOL),
]
TO_A_FILE = (*GENERATE, *SMALL_POOL, "-o", "out.jsonl")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path, clean_environ: dict[str, str]) -> Run:
    """Run ``pagedctl WORDS REDIRECTION`` by a shell, in an empty folder."""

    def run(
        words: tuple[str, ...], redirection: str, **options: int
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "pagedctl", *words],
            cwd=tmp_path,
            env=clean_environ,
            text=True,
            timeout=120,
            check=False,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),  # type: ignore[call-overload]
        )

    return run


@pytest.fixture
def unread() -> int:
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_that_goes_away_is_no_answer_and_never_a_no(
    shell: Run, unread: int, words: tuple[str, ...]
) -> None:
    done = shell(words, "", stdout=unread)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_result_that_cannot_be_written_is_refused_in_our_form(
    shell: Run, words: tuple[str, ...]
) -> None:
    done = shell(words, ">/dev/full")
    assert done.returncode == 2
    assert "error: cannot write stdout: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", [("--version",), ("env",)], ids=" ".join)
def test_a_closed_stdout_takes_no_result(shell: Run, words: tuple[str, ...]) -> None:
    done = shell(words, ">&-")
    assert done.returncode == 2
    assert "error: cannot write stdout: Bad file descriptor" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", [">/dev/full", "<&- >&- 2>&-"])
def test_a_finished_file_is_a_success_though_nothing_can_be_said(
    shell: Run, tmp_path: Path, redirection: str
) -> None:
    done = shell(TO_A_FILE, redirection)
    assert done.returncode == 0
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len(json.loads(line)["token_ids"]) == 2
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_bytes())
    assert manifest["status"] == "complete"


def test_a_finished_file_is_a_success_though_the_reader_went_away(
    shell: Run, tmp_path: Path, unread: int
) -> None:
    assert shell(TO_A_FILE, "", stdout=unread).returncode == 0
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_bytes())
    assert manifest["status"] == "complete"


def test_a_run_whose_reader_went_away_is_interrupted(
    shell: Run, tmp_path: Path, unread: int
) -> None:
    done = shell((*GENERATE, *SMALL_POOL, "--json", "m.json"), "", stdout=unread)
    assert done.returncode == 2
    assert json.loads((tmp_path / "m.json").read_bytes())["status"] == "interrupted"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("words", "code"), [(("env",), 0), (("envv",), 2), (("--version",), 0)])
def test_talk_that_cannot_be_written_does_not_change_the_end(
    shell: Run, redirection: str, words: tuple[str, ...], code: int
) -> None:
    done = shell(words, redirection)
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)


def test_closed_input_is_refused_as_input(shell: Run) -> None:
    done = shell(("generate", "-i", "-"), "<&-")
    assert done.returncode == 2
    assert "error: the input cannot be read: Bad file descriptor" in done.stderr
