"""What the code of a plug-in raises, as a refusal: its fault is no fault of ours. No torch."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from pagedctl.errors import Fault

Result = TypeVar("Result")


def faults_of_code(what: str, run: Callable[[], Result]) -> Result | Fault:
    """The result of *run*, or the fault that says what the code of *what* raised, and where."""
    try:
        return run()
    except (Exception, SystemExit) as problem:
        return Fault(
            what=f"{what} failed: {raised(problem)}",
            where=_innermost_line(problem),
            rule="the code of a contract returns, and refuses with a Fault",
            remedy="mend the package that offers the contract, or use another one",
        )


def raised(problem: BaseException) -> str:
    """An exception in one line: its type, and what it says."""
    detail = problem.args[0] if isinstance(problem, KeyError) and problem.args else problem
    return " ".join(f"{type(problem).__name__}: {detail}".split())


def _innermost_line(problem: BaseException) -> str:
    last = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}"
