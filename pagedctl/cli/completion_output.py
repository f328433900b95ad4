"""Where completions go: lines of a new file, lines on stdout, or text on a terminal."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TextIO

from pagedctl.cli.words import count_of
from pagedctl.engine.completion_lines import completion_line, refusal_line
from pagedctl.engine.request import Completion, RequestId
from pagedctl.errors import ConfigError, RequestError
from pagedctl.manifest import files


class CompletionOutput(Protocol):
    """Takes completions in the order they finish; each is out when the call returns."""

    def completion(self, completion: Completion) -> None:
        """One sample."""

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        """A request that was not served."""

    def close(self) -> None:
        """Nothing follows; what was written is durable where that is possible."""


class FileOutput:
    """JSON lines appended to a file, each by one write, so that a reader sees whole lines.

    As a context manager it holds the file against other runs, to the end of the block; an end
    before :meth:`begin` takes away a file that it made. ``created`` is false for a file that was
    there, ``locked`` where the file system keeps no locks.
    """

    def __init__(self, path: Path, *, existing: bool = False) -> None:
        """Create *path*, or with *existing* take up the file that is there, if there is one.

        ConfigError if it exists otherwise, cannot be created, or another run is writing it.
        """
        self._path = path
        self._begun = False
        claim = files.claim(path, "--output", existing=existing)
        self._descriptor = claim.descriptor
        self.created = claim.created
        self.locked = claim.locked
        self._size_bytes = os.fstat(claim.descriptor).st_size

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.created and not self._begun:
            self._take_away()
        os.close(self._descriptor)

    def reader(self) -> io.BufferedReader:
        """A stream of what the file holds, from its start."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return os.fdopen(os.dup(self._descriptor), "rb")

    def begin(self, size_bytes: int = 0) -> None:
        """From now on the file stays, whatever happens; lines follow its first *size_bytes* bytes.

        What stood behind them is a line whose writing was cut short.
        """
        self._begun = True
        try:
            os.ftruncate(self._descriptor, size_bytes)
        except OSError as error:
            raise self._refusal(error) from None
        self._size_bytes = size_bytes

    def completion(self, completion: Completion) -> None:
        self.append_line(completion_line(completion))

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        self.append_line(refusal_line(request_id, error))

    def close(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._refusal(error) from None

    def append_line(self, line: bytes) -> None:
        """Write *line* whole; if the disk fills up or a signal ends it, it was not begun."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._size_bytes += len(line)
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size_bytes)
            if isinstance(error, OSError):
                raise self._refusal(error) from None
            raise

    def _take_away(self) -> None:
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                os.unlink(self._path)

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"cannot write {self._path}: {error.strerror or error}",
            where="--output",
            rule="the output is a new file on a disk with room",
            remedy="name another path, or free space or permissions here",
        )


class LinesOutput:
    """JSON lines on a stream, flushed one by one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def completion(self, completion: Completion) -> None:
        self.write_line(completion_line(completion))

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        self.write_line(refusal_line(request_id, error))

    def close(self) -> None:
        self._stream.flush()

    def write_line(self, line: bytes) -> None:
        self._stream.write(line.decode())
        self._stream.flush()


class TextOutput:
    """The texts for a person to read; with several samples, a head line names each."""

    def __init__(self, stream: TextIO, *, num_samples: int) -> None:
        self._stream = stream
        self._with_heads = num_samples > 1

    def completion(self, completion: Completion) -> None:
        if self._with_heads:
            reason = completion.finish_reason or "failed"
            count = count_of(len(completion.token_ids), "token")
            head = f"--- {completion.id}, sample {completion.sample} · {count} · {reason}"
            self._stream.write(f"{head}\n")
        ids = " ".join(map(str, completion.token_ids.tolist()))
        self._stream.write(f"{ids if completion.text is None else completion.text}\n")
        self._stream.flush()

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        """Refusals stand on stderr already."""

    def close(self) -> None:
        self._stream.flush()
