"""One command's run: its options, its two output streams, and its manifest.

stdout is the result and stderr the talk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType

from pagedctl.cli.parsing import BARE, STANDARD_STREAM
from pagedctl.cli.streams import ReaderGone, ResultLost
from pagedctl.config.home import runs_folder
from pagedctl.config.loader import Resolved, environment_source, flag_source, resolve
from pagedctl.config.plan_file import PlanFile, read_plan_file
from pagedctl.config.surface import Command
from pagedctl.errors import ConfigError, PagedctlError
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
        """Whether the manifest goes to stdout: ``--json`` without a path, or with ``-``."""
        return self["json"] in (BARE, STANDARD_STREAM)

    @property
    def json_path(self) -> Path | None:
        """The file that --json names."""
        named = self["json"]
        return None if named is None or self.bare_json else Path(str(named))

    def note(self, text: str) -> None:
        """A line of talk on stderr; dropped by --quiet."""
        if not self.quiet:
            talk_console(self.environ).print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A warning on stderr; --quiet keeps it."""
        talk_console(self.environ).print(f"warning: {text}", soft_wrap=True)

    def show(self, *renderables: RenderableType) -> None:
        """The result for people, on stdout; dropped by --quiet and by bare --json."""
        if not self.quiet and not self.bare_json:
            console = result_console(self.result, self.environ)
            for one in renderables:
                console.print(one)

    def show_if_heard(self, text: str) -> None:
        """A line for people on stdout, where the result lies in a file: it may get lost."""
        with suppress(ReaderGone, ResultLost):
            self.show(text)

    def emit(self, manifest: Manifest) -> None:
        """The manifest on stdout, for bare --json."""
        if self.bare_json:
            data = strict_json.dumps(manifest.to_json_object(), indent=True)
            self.result.write(data.decode() + "\n")
            self.result.flush()

    @contextmanager
    def manifest_builder(
        self, *, reads_only: bool, output: Path | None = None
    ) -> Iterator[ManifestBuilder]:
        """The run's manifest, open for the block; an interruption is said.

        A command that only reads writes one with --json PATH alone.
        """
        builder = ManifestBuilder(
            command=self.command.name,
            argv=self.argv,
            target=self._target(reads_only=reads_only, output=output),
        )
        try:
            with builder:
                try:
                    yield builder
                except ReaderGone:
                    if builder.closed is None:
                        builder.close_interrupted()
                    raise
                except KeyboardInterrupt:
                    self.note("interrupted")
                    raise
        finally:
            if builder.unwritten is not None:
                self.warn(f"there is no manifest: {builder.unwritten.what}")

    def _target(self, *, reads_only: bool, output: Path | None) -> ManifestTarget | None:
        if reads_only and self.json_path is None:
            return None
        return choose_target(
            command=self.command.name,
            json_path=self.json_path,
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
    if plan_path == STANDARD_STREAM:
        raise _plan_on_stdin()
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


def _plan_on_stdin() -> ConfigError:
    return ConfigError(
        "a plan cannot come from stdin",
        where="plan",
        rule="a plan is a file: its relative paths start at its folder",
        remedy="write it to a file and name that",
    )


def result_console(stream: TextIO, environ: Mapping[str, str]) -> Console:
    """Tables and text on the result stream, as they are: no markup, full width in a pipe."""
    terminal = stream.isatty()
    return Console(
        file=stream,
        no_color=_no_colour(environ),
        width=None if terminal else PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def talk_console(environ: Mapping[str, str]) -> Console:
    """Notes, warnings, errors and progress on stderr, as they are: no markup."""
    return Console(
        file=sys.stderr,
        no_color=_no_colour(environ),
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_error(error: PagedctlError, environ: Mapping[str, str]) -> None:
    """The refusal, one line per part, not wrapped."""
    console = talk_console(environ)
    for line in error.lines():
        console.print(line, soft_wrap=True)


def _no_colour(environ: Mapping[str, str]) -> bool:
    return "NO_COLOR" in environ or environ.get("TERM") == "dumb"
