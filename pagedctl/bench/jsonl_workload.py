"""A workload from a JSON lines file: every line is served, or none. No torch."""

from __future__ import annotations

from pathlib import Path

from pagedctl.engine.input_lines import InputLines
from pagedctl.engine.jsonl import LineRules, RefusedLine, read_requests
from pagedctl.engine.request import Request
from pagedctl.errors import ConfigError, Fault


def read_jsonl_workload(path: Path, rules: LineRules) -> tuple[Request, ...]:
    """The requests of the file at *path*.

    Raises ConfigError with the faults of all refused lines: a bench over the rest would
    measure other work than the file states.
    """
    requests: list[Request] = []
    faults: list[Fault] = []
    with InputLines.open(path) as lines:
        for one in read_requests(lines, rules):
            if isinstance(one, RefusedLine):
                faults.extend(one.error.faults)
            else:
                requests.append(one)
    if faults:
        raise ConfigError.of(faults)
    return tuple(requests)
