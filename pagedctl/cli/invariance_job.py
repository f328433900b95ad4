"""What ``pagedctl invariance`` was asked to do: options checked, nothing loaded or written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedctl.cli.parsing import BARE, STANDARD_STREAM
from pagedctl.cli.session import Session
from pagedctl.config.kinds import Boolean
from pagedctl.config.loader import FLAG
from pagedctl.config.options import Option
from pagedctl.errors import ConfigError
from pagedctl.manifest import files

NOT_REPEATED = ("cases", "json", "junit", "record", "quiet", "progress", "unverified")

STDOUT = ("go to stdout", "stdout holds the result")
STDIN = ("come from stdin", "a command that repeats a divergence reads the prompts again")


@dataclass(frozen=True, kw_only=True)
class InvarianceJob:
    """The command's own options. ``record`` None with ``records`` on: the folder of records."""

    requests: int
    max_tokens: int
    prompts: Path | None
    cases: tuple[str, ...] | None
    processes: int
    bisect: bool
    records: bool
    record: Path | None
    junit: Path | None


def invariance_job_of(session: Session) -> InvarianceJob:
    """The options of *session*; ConfigError for files that cannot be written, or a record that
    could not be earned."""
    named = session["record"]
    record = None if named in (None, BARE) else _file(session, "record")
    junit = _file(session, "junit")
    cases = session["cases"]
    if named is not None:
        _refuse_record_of_a_part(session)
    wanted = {"--json": session.json_path, "--junit": junit, "--record": record}
    paths = {option: path for option, path in wanted.items() if path is not None}
    files.refuse_clashes(paths)
    for option in ("--junit", "--record"):
        if option in paths:
            files.refuse_existing(paths[option], option)
    prompts = _file(session, "prompts", STDIN)
    return InvarianceJob(
        requests=_integer(session, "requests"),
        max_tokens=_integer(session, "max_tokens"),
        prompts=prompts,
        cases=None if cases is None else tuple(cases),  # type: ignore[arg-type]
        processes=_integer(session, "processes"),
        bisect=bool(session["bisect"]),
        records=named is not None,
        record=record,
        junit=junit,
    )


def repeat_command(session: Session, case: str) -> str:
    """The command line that runs *case* alone with the same options, quoted for a shell."""
    options = session.command.all_options()
    words = ["pagedctl", *session.command.name.split()]
    for name, origin in session.options.origins.items():
        if origin == FLAG and name not in NOT_REPEATED:
            words += _words(options[name], session[name])
    return shlex.join([*words, f"--cases={case}"])


def _words(option: Option, value: object) -> Iterator[str]:
    """An option as flags, each one word."""
    if isinstance(option.kind, Boolean):
        yield option.flag if value else f"--no-{option.flag[2:]}"
    elif option.repeatable:
        assert isinstance(value, list | tuple)
        yield from (f"{option.flag}={one}" for one in value)
    else:
        yield f"{option.flag}={value}"


def _file(session: Session, name: str, stream: tuple[str, str] = STDOUT) -> Path | None:
    """The file that an option names; never a standard *stream*."""
    named = session[name]
    if named == STANDARD_STREAM:
        what, rule = stream
        raise ConfigError(
            f"--{name} cannot {what}", where="command line", rule=rule, remedy="name a file"
        )
    return None if named is None else Path(str(named))


def _refuse_record_of_a_part(session: Session) -> None:
    """A record grants the contract to runs of all kinds, so every case has to pass."""
    parts = {
        "--cases": session["cases"] is not None,
        "--processes 1": session["processes"] == 1,
        "--no-prefix-cache": not session["prefix_cache"],
    }
    for option, given in parts.items():
        if given:
            raise ConfigError(
                f"--record does not go with {option}",
                where="command line",
                rule="a record is written on a pass of every case",
                remedy=f"leave {option} or --record out",
            )


def _integer(session: Session, name: str) -> int:
    value = session[name]
    assert isinstance(value, int)
    return value
