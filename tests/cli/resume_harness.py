"""The work of the tests of ``--resume``, its files, and what of two outputs has to be equal."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.generate_harness import Done

INPUT: tuple[dict[str, Any] | str, ...] = (
    {"id": "a", "prompt_token_ids": [5, 6, 7], "n": 3, "max_tokens": 5, "metadata": {"m": 1}},
    {"id": "a", "prompt_token_ids": [5]},  # refused: the id is taken
    "nonsense",  # refused, and has no id
    {"prompt": "Tom has 3 apples and buys 4.", "max_tokens": 6, "answer": "7"},
    {"prompt_token_ids": []},  # refused
    "[1]",  # refused, and has no id
    {"id": "b", "messages": [{"role": "user", "content": "Ann"}], "max_tokens": 4, "n": 2},
    {"id": "long", "prompt_token_ids": [5] * 400},  # refused by the engine: beyond the pool
    {"id": 9, "prompt_token_ids": [8, 9], "max_tokens": 12, "n": 2, "seed": 3},
)
NUM_LINES = 13
WORDS = (
    *("generate", "-i", "in.jsonl", "-o", "out.jsonl", "--keep", "answer", "--seed", "4"),
    *("--ignore-eos", "--kv-cache-memory-bytes", "1MiB", "--max-num-seqs", "2"),
)
QUIET = ("--quiet", "--unverified")
OUTPUT, HEADER, MANIFEST = "out.jsonl", "out.jsonl.partial.json", "out.jsonl.manifest.json"
MAY_DIFFER = ("preemptions", "cached_tokens")
KILL, INTERRUPT, TERMINATE = signal.SIGKILL, signal.SIGINT, signal.SIGTERM
CODES = {KILL: -signal.SIGKILL, INTERRUPT: 130, TERMINATE: 143}


def contents(output: Path) -> list[str]:
    """The lines as a multiset, without what may differ."""
    text = output.read_text()
    assert text.endswith("\n")
    found = []
    for line in text.splitlines():
        values = json.loads(line)
        found.append(
            json.dumps({name: one for name, one in values.items() if name not in MAY_DIFFER})
        )
    return sorted(found)


def killed_after(num_lines: int) -> str:
    """Python that kills the run after *num_lines* whole lines and the start of another."""
    return f"""
import os
from pagedctl.cli.completion_output import FileOutput
append, lines = FileOutput.append_line, []
def counted(output, line):
    lines.append(line)
    append(output, line if len(lines) <= {num_lines} else line[:30])
    if len(lines) > {num_lines}:
        os.kill(os.getpid(), {int(KILL)})
FileOutput.append_line = counted
"""


LONG = tuple(
    {"id": f"r{index}", "prompt_token_ids": [5 + index, 6, 7], "n": 2, "max_tokens": 20 + index}
    for index in range(12)
)
LONG_WORDS = (
    *("generate", "-i", "in.jsonl", "-o", OUTPUT, "--ignore-eos", "--max-num-seqs", "4"),
    *QUIET,
)

Copy = Callable[[], Path]
"""Makes a folder with the input in it."""


def take(source: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copyfile(source / name, folder / name)


def left_as_it_was(done: Done, killed: Path) -> bool:
    """Nothing was written, and no line was touched."""
    names = {"in.jsonl", OUTPUT, HEADER}
    same = all((done.folder / one).read_bytes() == (killed / one).read_bytes() for one in names)
    return same and done.files == names


def no_engine(*arguments: object, **options: object) -> None:
    raise AssertionError("an engine was built")
