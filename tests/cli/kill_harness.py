"""Runs of the command line that a real signal ends at a chosen moment.

A moment is a call that changes a file: the k-th one, counted from the start of the command. The
signal arrives before the call, or, where the call writes, after half of the bytes.
One process imports the engine and then forks a fresh child for each run, which saves the two
seconds that an interpreter takes to load it; nothing of torch runs before the fork.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

FORKING_SERVER = """
import importlib, json, os, signal, sys
import torch
import pagedctl.engine.engine
from pagedctl.cli import generate
from pagedctl.cli.main import main

answers = os.fdopen(os.dup(1), "w")


def count_calls(kill_at, number):
    calls = 0
    ours = set()

    def counted(name, call):
        def run(first, *arguments, **keywords):
            nonlocal calls
            reads = name == "open" and not arguments[0] & (os.O_RDWR | os.O_WRONLY)
            if reads or isinstance(first, int) and first not in ours:
                return call(first, *arguments, **keywords)
            calls += 1
            if calls == kill_at and name == "write":
                written = call(first, arguments[0][: len(arguments[0]) // 2])
                os.kill(os.getpid(), number)
                return written
            if calls == kill_at:
                os.kill(os.getpid(), number)
            result = call(first, *arguments, **keywords)
            if name == "open":
                ours.add(result)
            return result
        return run

    for name in ("open", "write", "fsync", "ftruncate", "link", "replace", "unlink"):
        setattr(os, name, counted(name, getattr(os, name)))
    return lambda: calls


def child(order):
    os.chdir(order["folder"])
    for descriptor, name, flags in (
        (0, order["stdin"], os.O_RDONLY),
        (1, "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        os.dup2(os.open(name, flags), descriptor)
    os.environ.update(order["environ"])
    exec(order["mutation"], {})
    calls = count_calls(order["kill_at"], order["signal"])
    code = main(order["words"])
    return code, calls()


for line in sys.stdin:
    order = json.loads(line)
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code, calls = child(order)
        os._exit(code if os.write(writer, str(calls).encode()) else 99)
    os.close(writer)
    calls = os.fdopen(reader).read()
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    print(json.dumps({"code": code, "calls": int(calls or 0)}), file=answers, flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: ``code`` is negative for a signal; ``calls`` is 0 then."""

    code: int
    calls: int
    out: str
    err: str


class CommandLine:
    """Runs ``pagedctl`` in children that are killed on demand."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKING_SERVER],
            env={**environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        folder: Path,
        *words: str,
        kill_at: int = 0,
        number: int = 9,
        stdin: str = "/dev/null",
        environ: Mapping[str, str] | None = None,
        mutation: str = "",
    ) -> Ended:
        """Run *words* in *folder*, and send the signal *number* at the call *kill_at*.

        *mutation* is Python that runs before the command. A *kill_at* of 0 kills nothing.
        """
        order = {
            "folder": str(folder),
            "words": words,
            "kill_at": kill_at,
            "signal": number,
            "stdin": stdin,
            "environ": {**(environ or {})},
            "mutation": mutation,
        }
        requests, answers = self._pipes()
        requests.write(json.dumps(order) + "\n")
        requests.flush()
        answer = json.loads(answers.readline())
        talk = {name: (folder / name).read_text() for name in ("stdout", "stderr")}
        return Ended(
            code=answer["code"], calls=answer["calls"], out=talk["stdout"], err=talk["stderr"]
        )

    def __enter__(self) -> CommandLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        requests, answers = self._pipes()
        requests.close()
        answers.close()
        self._server.wait(timeout=60)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        return self._server.stdin, self._server.stdout
