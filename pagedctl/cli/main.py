"""The entry point: builds the command tree from the surface table and maps ends to exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from types import FrameType
from typing import Any

import typer

from pagedctl import __version__
from pagedctl.cli.exit_codes import ExitCode, Terminated
from pagedctl.cli.flags import signature_of, split_arguments
from pagedctl.cli.parsing import Command, Group
from pagedctl.cli.session import Session, open_session, print_error, protected_stdout
from pagedctl.config import surface
from pagedctl.errors import ConfigError, Fault, PagedctlError

BODIES = {
    "generate": "pagedctl.cli.generate:run",
    "bench": "pagedctl.cli.bench:run",
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


def build_app(argv: Sequence[str] = ()) -> typer.Typer:
    """The command tree; *argv* is what manifests record as the command line."""
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
            groups[parent] = typer.Typer(cls=Group, help=GROUP_HELP[parent], no_args_is_help=True)
            app.add_typer(groups[parent], name=parent)
        target = groups[parent] if parent else app
        _add_command(target, name, surface.COMMANDS[path], argv)
    return app


def run(argv: list[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(main(sys.argv[1:] if argv is None else argv))


def main(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    _wait_politely(os.environ)
    try:
        return int(_dispatch(argv))
    except PagedctlError as error:
        print_error(error, os.environ)
        return ExitCode.NO_ANSWER
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Terminated:
        return ExitCode.TERMINATED
    except BrokenPipeError:
        _silence_stdout()
        return ExitCode.NO_ANSWER
    except Exception:
        traceback.print_exc()
        return ExitCode.FAULT_OF_OURS


def _dispatch(argv: list[str]) -> int:
    command = typer.main.get_command(build_app(argv))
    try:
        code = command.main(args=argv, prog_name="pagedctl", standalone_mode=False)
    except typer.Exit as ended:
        return ended.exit_code
    except Exception as problem:
        if not hasattr(problem, "format_message"):
            raise
        raise ConfigError.of([_usage_fault(problem)]) from None
    return int(code) if isinstance(code, int) else ExitCode.YES


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
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.YES)


def _add_command(
    target: typer.Typer, name: str, command: surface.Command, argv: Sequence[str]
) -> None:
    entry = BODIES[command.name]

    def invoke(**values: Any) -> int:
        arguments, flags = split_arguments(command, values)
        given = {key: value for key, value in flags.items() if value not in (None, [])}
        with protected_stdout() as result:
            session = open_session(
                command,
                argv,
                arguments=arguments,
                flags=given,
                environ=os.environ,
                result=result,
            )
            return _body(entry)(session)

    invoke.__signature__ = signature_of(command)  # type: ignore[attr-defined]
    invoke.__annotations__ = {
        parameter.name: parameter.annotation
        for parameter in signature_of(command).parameters.values()
    }
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


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
