"""What the exit code of every command means."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """0 yes, 1 no, 2 no answer; the rest say that the command did not get that far."""

    YES = 0
    NO = 1
    NO_ANSWER = 2
    FAULT_OF_OURS = 70
    INTERRUPTED = 130
    TERMINATED = 143


class Terminated(SystemExit):
    """SIGTERM arrived; raised in the main thread so that manifests close as interrupted."""
