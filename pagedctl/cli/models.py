"""``pagedctl models``."""

from __future__ import annotations

from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.session import Session


def run_list(session: Session) -> ExitCode:
    raise NotImplementedError


def run_inspect(session: Session) -> ExitCode:
    raise NotImplementedError
