"""One command's run: its options, its two output streams, and its manifest.

stdout is the result and stderr the talk. At entry descriptor 1 is duplicated for the result
and pointed at stderr, so no library can write into the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType

from pagedctl.cli.parsing import BARE
from pagedctl.config.home import runs_folder
from pagedctl.config.loader import Resolved, environment_source, flag_source, resolve
from pagedctl.config.plan_file import PlanFile, read_plan_file
from pagedctl.config.surface import Command
from pagedctl.errors import PagedctlError
from pagedctl.manifest import strict_json
from pagedctl.manifest.schema import Manifest
from pagedctl.manifest.writer import ManifestBuilder, ManifestTarget, choose_target

PIPE_WIDTH = 1000
"""Columns of a table in a pipe: wide enough that no number is ever wrapped or cut."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a command's body works with.

    ``arguments`` are the positional ones; ``options`` every option of the command with its
    origin; ``plan`` the plan file, checked as a whole, if one was given.
    """

    command: Command
    argv: tuple[str, ...]
    arguments: Mapping[str, object]
    options: Resolved
    plan: PlanFile | None
    environ: Mapping[str, str]
    result: TextIO

    def __getitem__(self, option: str) -> object:
        return self.options.values[option]

    @property
    def quiet(self) -> bool:
        return bool(self["quiet"])

    @property
    def bare_json(self) -> bool:
        return self["json"] == BARE

    def note(self, text: str) -> None:
        """A line of talk on stderr; dropped by --quiet."""
        if not self.quiet:
            talk_console(self.environ).print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A warning on stderr; --quiet keeps it."""
        talk_console(self.environ).print(f"warning: {text}", markup=False, soft_wrap=True)

    def show(self, *renderables: RenderableType) -> None:
        """The result for people, on stdout; dropped by --quiet and by bare --json."""
        if not self.quiet and not self.bare_json:
            console = result_console(self.result, self.environ)
            for one in renderables:
                console.print(one)

    def emit(self, manifest: Manifest) -> None:
        """The manifest on stdout, for bare --json."""
        if self.bare_json:
            data = strict_json.dumps(manifest.to_json_object(), indent=True)
            self.result.write(data.decode() + "\n")
            self.result.flush()

    def manifest_builder(self, *, reads_only: bool, output: Path | None = None) -> ManifestBuilder:
        """The builder of this run's manifest; a command that only reads writes with --json PATH."""
        return ManifestBuilder(
            command=self.command.name,
            argv=self.argv,
            target=self._target(reads_only=reads_only, output=output),
        )

    def _target(self, *, reads_only: bool, output: Path | None) -> ManifestTarget | None:
        named = self["json"]
        json_path = Path(str(named)) if named is not None and not self.bare_json else None
        if reads_only and json_path is None:
            return None
        return choose_target(
            command=self.command.name,
            json_path=json_path,
            output=output,
            runs_dir=runs_folder(self.environ),
            now=datetime.now(UTC),
        )


def open_session(
    command: Command,
    argv: Sequence[str],
    *,
    arguments: Mapping[str, object],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    result: TextIO,
) -> Session:
    """Resolve a command's options over flags, environment, plan file and defaults."""
    options = command.all_options()
    plan_path = flags.get("plan") or environ.get("PAGEDCTL_PLAN")
    plan = read_plan_file(str(plan_path)) if plan_path else None
    sources = [flag_source(flags), environment_source(options, environ)]
    if plan is not None:
        sources.append(plan.source(options))
    return Session(
        command=command,
        argv=tuple(argv),
        arguments=arguments,
        options=resolve(options, sources),
        plan=plan,
        environ=environ,
        result=result,
    )


@contextmanager
def protected_stdout() -> Iterator[TextIO]:
    """Yield a stream on the real stdout while descriptor 1 points at stderr."""
    sys.stdout.flush()
    duplicate = os.dup(1)
    os.dup2(2, 1)
    stream = os.fdopen(duplicate, "w", encoding="utf-8", newline="\n")
    try:
        yield stream
        stream.flush()
    finally:
        sys.stdout.flush()
        os.dup2(stream.fileno(), 1)
        with _ignore_broken_pipe():
            stream.close()


@contextmanager
def _ignore_broken_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        return


def result_console(stream: TextIO, environ: Mapping[str, str]) -> Console:
    """Tables and text on the result stream; full width in a pipe, no colour outside a terminal."""
    terminal = stream.isatty()
    return Console(
        file=stream,
        no_color=_no_colour(environ),
        width=None if terminal else PIPE_WIDTH,
        highlight=False,
    )


def talk_console(environ: Mapping[str, str]) -> Console:
    """Notes, warnings, errors and progress on stderr."""
    return Console(file=sys.stderr, no_color=_no_colour(environ), highlight=False)


def print_error(error: PagedctlError, environ: Mapping[str, str]) -> None:
    """The refusal, one line per part, as it is: no markup, no wrapping."""
    console = talk_console(environ)
    for line in error.lines():
        console.print(line, markup=False, soft_wrap=True)


def _no_colour(environ: Mapping[str, str]) -> bool:
    return "NO_COLOR" in environ or environ.get("TERM") == "dumb"
