"""JSON lines of a command: where they come from, and how their output is closed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from pagedctl.cli.parsing import STANDARD_STREAM
from pagedctl.cli.session import Session
from pagedctl.engine.input_lines import InputLines
from pagedctl.errors import ConfigError, PagedctlError
from pagedctl.manifest.writer import ManifestBuilder


class Closable(Protocol):
    """An output whose end is said."""

    def close(self) -> None: ...


def input_of(session: Session, nothing: ConfigError) -> InputLines:
    """The lines of --input, else of stdin; raises *nothing* where that is a terminal."""
    named = session["input"]
    if named is not None and named != STANDARD_STREAM:
        return InputLines.open(Path(str(named)))
    if named is None and (sys.stdin is None or os.isatty(0)):
        raise nothing
    return InputLines.of_stdin()


@contextmanager
def completed_file(builder: ManifestBuilder, path: Path | None, output: Closable) -> Iterator[None]:
    """Close *output* and record the digest of its *path*; what went wrong before that wins."""

    def complete() -> None:
        output.close()
        if path is not None:
            builder.add_file("output", path)

    try:
        yield
    except BaseException:
        with suppress(PagedctlError):
            complete()
        raise
    complete()
