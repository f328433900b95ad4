"""The process's standard streams: what is lost on stdout is an error, on stderr it is not.

Neither stream has a buffer of its own, so a write that fails does so where it is made and
nothing is left over for the interpreter's last flush.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from pagedctl.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ReaderGone(Exception):
    """Whoever read stdout went away. No OSError: the parser would make an exit code of that."""


class ResultLost(ConfigError):
    """stdout does not take the result."""


def open_closed_descriptors() -> None:
    """Occupy descriptors 0 to 2 where the caller closed them, before a file gets their number.

    Each is opened the wrong way round, so that using it still fails as a closed one would.
    """
    for descriptor, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            os.open(os.devnull, mode)


@contextmanager
def standard_streams() -> Iterator[None]:
    """For the block, ``sys.stdout`` and ``sys.stderr`` are ours, on descriptors 1 and 2.

    Streams that a caller in this process has redirected are left to it.
    """
    kept = sys.stdout, sys.stderr
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_ResultBytes(1))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_TalkBytes(2))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept


@contextmanager
def protected_stdout() -> Iterator[TextIO]:
    """Yield a stream on the real stdout while descriptor 1 and ``sys.stdout`` are stderr."""
    duplicate = os.dup(1)
    os.dup2(2, 1)
    kept, sys.stdout = sys.stdout, sys.stderr
    try:
        yield _text(_ResultBytes(duplicate))
    finally:
        sys.stdout = kept
        os.dup2(duplicate, 1)
        os.close(duplicate)


def _text(raw: _DescriptorBytes) -> TextIO:
    return io.TextIOWrapper(
        raw,  # type: ignore[type-var]  # unbuffered, as python -u has it
        encoding="utf-8",
        errors="backslashreplace",
        newline="\n",
        write_through=True,
    )


class _DescriptorBytes(io.RawIOBase):
    """Bytes to a descriptor, which is not closed with this; each write is whole or fails."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data).cast("B")
        size_bytes = len(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # somebody made this pipe non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._fail(error)
                break
        return size_bytes

    def _fail(self, error: OSError) -> None:
        """Raise, or return to drop the rest."""
        raise NotImplementedError


class _ResultBytes(_DescriptorBytes):
    def _fail(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from None
        raise ResultLost(
            f"cannot write stdout: {error.strerror or error}",
            where="standard output",
            rule="the result goes to an open stream with room",
            remedy="send stdout to a file on a disk with room, or through a pipe",
        ) from None


class _TalkBytes(_DescriptorBytes):
    def _fail(self, error: OSError) -> None:
        """Talk that nobody can hear changes nothing."""
