"""``generate --resume``: after an end at any moment nothing is lost and nothing is doubled."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.generate_harness import write_lines
from tests.cli.kill_harness import CommandLine, Ended
from tests.cli.resume_harness import (
    CODES,
    HEADER,
    INTERRUPT,
    KILL,
    LONG,
    LONG_WORDS,
    MANIFEST,
    OUTPUT,
    QUIET,
    TERMINATE,
    WORDS,
    Copy,
    contents,
    take,
)

# -- ends at any moment ------------------------------------------------------------------------


def check_ends(
    command: CommandLine,
    new_folder: Copy,
    whole: tuple[Path, Ended],
    number: signal.Signals,
    moments: range,
) -> None:
    """Whatever moment ends the run, the resumed output is that of a run without an end."""
    num_torn = 0
    for kill_at in moments:
        folder = new_folder()
        output = folder / OUTPUT
        ended = command.run(folder, *WORDS, *QUIET, "--resume", kill_at=kill_at, number=number)
        assert ended.code == CODES[number], kill_at
        left = output.read_bytes() if output.exists() else b""
        whole_lines = left[: left.rfind(b"\n") + 1]
        num_torn += left != whole_lines
        finished = command.run(folder, *WORDS, *QUIET, "--resume")
        assert finished.code == 2, (kill_at, finished.err)
        assert output.read_bytes().startswith(whole_lines), kill_at
        assert contents(output) == contents(whole[0] / OUTPUT), kill_at
        assert json.loads((folder / MANIFEST).read_bytes())["status"] == "complete"
        assert not (folder / HEADER).exists()
    assert (num_torn > 0) == (number == KILL)


@pytest.mark.parametrize(
    ("number", "stride"),
    [(KILL, 6), (INTERRUPT, 13), (TERMINATE, 13)],
    ids=["kill", "int", "term"],
)
def test_an_end_at_any_moment_loses_and_doubles_nothing(
    command: CommandLine,
    new_folder: Copy,
    whole: tuple[Path, Ended],
    number: signal.Signals,
    stride: int,
) -> None:
    check_ends(command, new_folder, whole, number, range(2, whole[1].calls + 1, stride))


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, INTERRUPT, TERMINATE])
def test_an_end_at_each_moment_loses_and_doubles_nothing(
    command: CommandLine, new_folder: Copy, whole: tuple[Path, Ended], number: signal.Signals
) -> None:
    check_ends(command, new_folder, whole, number, range(1, whole[1].calls + 1))


def check_a_chain(command: CommandLine, folder: Path, whole: tuple[Path, Ended], seed: int) -> None:
    """End one run after another, by signals in turn, until one comes to its own end."""
    dice = random.Random(seed)
    kept, num_ends, code = b"", 0, 0
    while code != 2:
        kill_at = dice.randrange(1, whole[1].calls)
        number = dice.choice([KILL, INTERRUPT, TERMINATE])
        words = (*WORDS, *QUIET, "--resume")
        code = command.run(folder, *words, kill_at=kill_at, number=number).code
        assert code in (2, CODES[number])
        num_ends += code != 2
        left = (folder / OUTPUT).read_bytes() if (folder / OUTPUT).exists() else b""
        assert left.startswith(kept)
        kept = left[: left.rfind(b"\n") + 1]
    assert num_ends
    assert contents(folder / OUTPUT) == contents(whole[0] / OUTPUT)
    assert not (folder / HEADER).exists()


def test_a_run_may_be_ended_again_and_again(
    command: CommandLine, new_folder: Copy, whole: tuple[Path, Ended]
) -> None:
    check_a_chain(command, new_folder(), whole, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_chain_of_ends_leaves_the_whole_output(
    command: CommandLine, new_folder: Copy, whole: tuple[Path, Ended], seed: int
) -> None:
    check_a_chain(command, new_folder(), whole, seed)


# -- kills from outside ------------------------------------------------------------------------

Moment = Callable[[Path, float], bool]
"""(folder, seconds since the start) -> whether the kill is due."""


def moment_of(name: str) -> Moment:
    def has_lines(folder: Path, count: int) -> bool:
        output = folder / OUTPUT
        return output.exists() and output.read_bytes().count(b"\n") >= count

    return {
        "output": lambda folder, _: (folder / OUTPUT).exists(),
        "header": lambda folder, _: (folder / HEADER).exists(),
        "lines": lambda folder, _: has_lines(folder, 5),
        "end": lambda folder, _: has_lines(folder, 2 * len(LONG)),
    }[name]


def run_killed_at(folder: Path, environ: dict[str, str], moment: Moment) -> int:
    """Start the command and kill it at *moment*; its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagedctl", *LONG_WORDS, "--resume"],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    started_s = time.monotonic()
    while process.poll() is None:
        elapsed_s = time.monotonic() - started_s
        assert elapsed_s < 100
        if moment(folder, elapsed_s):
            process.kill()
            break
        time.sleep(0.001)
    return process.wait(timeout=60)


def check_kills_from_outside(
    command: CommandLine, folders: tuple[Path, Path], environ: dict[str, str], moments: list[Moment]
) -> None:
    whole, folder = folders
    for one in folders:
        write_lines(one / "in.jsonl", *LONG)
    assert command.run(whole, *LONG_WORDS).code == 0
    codes = [run_killed_at(folder, environ, moment) for moment in moments]
    assert CODES[KILL] in codes
    assert set(codes) <= {CODES[KILL], 0}
    assert command.run(folder, *LONG_WORDS, "--resume").code == 0
    assert contents(folder / OUTPUT) == contents(whole / OUTPUT)
    assert len(contents(folder / OUTPUT)) == 2 * len(LONG)


def test_a_process_killed_from_outside_is_resumed(
    command: CommandLine, new_folder: Copy, clean_environ: dict[str, str]
) -> None:
    moments = [moment_of(name) for name in ("output", "lines", "end")]
    folders = (new_folder(), new_folder())
    check_kills_from_outside(command, folders, clean_environ, moments)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_process_killed_at_random_times_is_resumed(
    command: CommandLine, new_folder: Copy, clean_environ: dict[str, str], seed: int
) -> None:
    dice = random.Random(seed)
    folder = new_folder()
    write_lines(folder / "in.jsonl", *LONG)
    started_s = time.monotonic()
    assert run_killed_at(folder, clean_environ, lambda _folder, _now_s: False) == 0
    whole_s = time.monotonic() - started_s
    times_s = [whole_s * share for share in (0.5, *(dice.uniform(0.01, 1.0) for _ in range(5)))]
    moments: list[Moment] = [lambda _, now_s, at=at: now_s >= at for at in times_s]  # type: ignore[misc]
    check_kills_from_outside(command, (new_folder(), new_folder()), clean_environ, moments)


# -- mutants -----------------------------------------------------------------------------------

MUTANTS = {
    "torn line kept": """
from pagedctl.cli.completion_output import FileOutput
begin = FileOutput.begin
def kept(output, size_bytes=0):
    open("reached", "a").close()
    begin(output, output.size_bytes)
FileOutput.begin = kept
""",
    "done samples ignored": """
from pagedctl.cli import generate
from pagedctl.engine.completed_lines import CompletedLines
open_requests = generate.open_requests
def ignoring(requests, refused, completed):
    open("reached", "a").close()
    return open_requests(requests, refused, CompletedLines())
generate.open_requests = ignoring
""",
    "done refusals ignored": """
from pagedctl.cli import generate
from pagedctl.engine.completed_lines import CompletedLines
open_refusals = generate.open_refusals
def ignoring(refused, completed):
    open("reached", "a").close()
    return open_refusals(refused, CompletedLines())
generate.open_refusals = ignoring
""",
    "header not compared": """
from pagedctl.cli import resume
def trusting(before, now, **options):
    open("reached", "a").close()
resume.require_same_run = trusting
""",
}


def resumes_rightly(
    command: CommandLine,
    folder: Path,
    killed: Path,
    whole: tuple[Path, Ended],
    mutation: str,
) -> bool:
    """Whether another seed is refused, and the same command completes the output."""
    take(killed, folder, OUTPUT, HEADER)
    other = command.run(folder, *WORDS, *QUIET, "--resume", "--seed", "5", mutation=mutation)
    if (folder / OUTPUT).read_bytes() != (killed / OUTPUT).read_bytes():
        return False
    finished = command.run(folder, *WORDS, *QUIET, "--resume", mutation=mutation)
    try:
        same = contents(folder / OUTPUT) == contents(whole[0] / OUTPUT)
    except json.JSONDecodeError:
        same = False
    return (other.code, finished.code, same) == (2, 2, True)


def test_the_check_finds_every_planted_fault(
    command: CommandLine, new_folder: Copy, killed: Path, whole: tuple[Path, Ended]
) -> None:
    for name, mutation in MUTANTS.items():
        folder = new_folder()
        assert not resumes_rightly(command, folder, killed, whole, mutation), name
        assert (folder / "reached").exists(), name
    assert resumes_rightly(command, new_folder(), killed, whole, "")
