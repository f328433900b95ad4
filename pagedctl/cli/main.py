"""The entry point: builds the command tree from the surface table and maps ends to exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import typer

from pagedctl import __version__
from pagedctl.cli.exit_codes import ExitCode, Terminated
from pagedctl.cli.flags import signature_of, split_arguments
from pagedctl.cli.parsing import Command, Group
from pagedctl.cli.session import Session, open_session, print_error
from pagedctl.cli.streams import (
    ReaderGone,
    open_closed_descriptors,
    protected_stdout,
    standard_streams,
)
from pagedctl.config import surface
from pagedctl.errors import ConfigError, Fault, PagedctlError

BODIES = {
    "generate": "pagedctl.cli.generate:run",
    "score": "pagedctl.cli.score:run",
    "bench": "pagedctl.cli.bench:run",
    "invariance": "pagedctl.cli.invariance:run",
    "env": "pagedctl.cli.env:run",
    "models list": "pagedctl.cli.models:run_list",
    "models inspect": "pagedctl.cli.models:run_inspect",
}
"""The body of each command, imported when it runs: ``module:function(session) -> ExitCode``."""

GROUP_HELP = {"models": "Look at models."}
PROGRAM_HELP = (
    "A paged-KV, continuous-batching LLM sampler for RL rollouts that states its numerical "
    "contract and proves it."
)


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A command line that the parser understood; the command has not run.

    Commands run outside the parser, which makes exit codes of its own of what they raise.
    """

    command: surface.Command
    values: Mapping[str, Any]


def build_app() -> typer.Typer:
    """The command tree; calling a command gives its :class:`Invocation`."""
    app = typer.Typer(
        name="pagedctl",
        cls=Group,
        help=PROGRAM_HELP,
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help"], "max_content_width": 100},
    )
    app.callback(invoke_without_command=True)(_root)
    groups: dict[str, typer.Typer] = {}
    for path in BODIES:
        parent, _, name = path.rpartition(" ")
        if parent and parent not in groups:
            groups[parent] = typer.Typer(cls=Group, help=GROUP_HELP[parent])
            groups[parent].callback(invoke_without_command=True)(_help_if_bare)
            app.add_typer(groups[parent], name=parent)
        target = groups[parent] if parent else app
        _add_command(target, name, surface.COMMANDS[path])
    return app


def run(argv: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(main(sys.argv[1:] if argv is None else argv))


def main(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    open_closed_descriptors()
    signal.signal(signal.SIGTERM, _terminate)
    environ = dict(os.environ)
    _wait_politely(os.environ)
    with standard_streams():
        return _exit_code(argv, environ)


def _exit_code(argv: list[str], environ: Mapping[str, str]) -> int:
    try:
        found = _parse(argv)
        return found if isinstance(found, int) else _run(found, argv, environ)
    except PagedctlError as error:
        print_error(error, environ)
        return ExitCode.NO_ANSWER
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Terminated:
        return ExitCode.TERMINATED
    except ReaderGone:
        return ExitCode.NO_ANSWER
    except Exception:
        traceback.print_exc()
        return ExitCode.FAULT_OF_OURS


def _parse(argv: list[str]) -> Invocation | int:
    """What to run, or the exit code where the parser did it all: help, the version."""
    command = typer.main.get_command(build_app())
    try:
        found = command.main(args=argv, prog_name="pagedctl", standalone_mode=False)
    except Exception as problem:
        if not hasattr(problem, "format_message"):
            raise
        raise ConfigError.of([_usage_fault(problem)]) from None
    assert isinstance(found, Invocation | int)
    return found


def _run(found: Invocation, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    arguments, flags = split_arguments(found.command, found.values)
    with protected_stdout() as result:
        session = open_session(
            found.command,
            argv,
            arguments=arguments,
            flags={key: value for key, value in flags.items() if value not in (None, [])},
            environ=environ,
            result=result,
        )
        return int(_body(BODIES[found.command.name])(session))


def _usage_fault(problem: Any) -> Fault:
    """A parser's complaint (a missing value, a surplus word) in our own form."""
    context = getattr(problem, "ctx", None)
    path = context.command_path if context is not None else "pagedctl"
    return Fault(
        what=str(problem.format_message()).rstrip(".") or "the command line is incomplete",
        where="command line",
        rule=f"usage of {path}",
        remedy=f"see {path} --help",
    )


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(f"pagedctl {__version__}")
        raise typer.Exit(ExitCode.YES)
    _help_if_bare(context)


def _help_if_bare(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.YES)


def _add_command(target: typer.Typer, name: str, command: surface.Command) -> None:
    def invoke(**values: Any) -> Invocation:
        return Invocation(command=command, values=values)

    signature = signature_of(command)
    invoke.__signature__ = signature  # type: ignore[attr-defined]
    invoke.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    target.command(name, cls=Command, help=command.help)(invoke)


def _body(entry: str) -> Callable[[Session], int]:
    module, _, function = entry.partition(":")
    body: Callable[[Session], int] = getattr(importlib.import_module(module), function)
    return body


def _wait_politely(environ: MutableMapping[str, str]) -> None:
    """Keep OpenMP's barriers from spinning long; it reads this when torch is loaded.

    Measured with the embedded model on two cores: two runs at once made 101 tokens/s each with
    libgomp's default and 1,300 with this; a run alone made 2,930 and 2,940. A policy that the
    user chose is kept.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "1000")


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
