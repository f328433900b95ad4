"""Where completions go: lines of a new file, lines on stdout, or text on a terminal."""

from __future__ import annotations

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

    def completion(self, completion: Completion, text: str | None) -> None:
        """One sample; *text* is None without a tokenizer."""

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        """A request that was not served."""

    def close(self) -> None:
        """Nothing follows; what was written is durable where that is possible."""


class FileOutput:
    """JSON lines appended to a new file, each by one write, so that a reader sees whole lines.

    As a context manager it claims the file: an end before :meth:`close` takes an empty one away.
    """

    def __init__(self, path: Path) -> None:
        """Create *path*; ConfigError if it exists or cannot be created."""
        self._path = path
        self._size_bytes = 0
        self._closed = False
        self._descriptor = files.claim_new(path, "--output")

    def __enter__(self) -> FileOutput:
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._closed:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                    os.unlink(self._path)
            os.close(self._descriptor)

    def completion(self, completion: Completion, text: str | None) -> None:
        self._append(completion_line(completion, text))

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        self._append(refusal_line(request_id, error))

    def close(self) -> None:
        self._closed = True
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._refusal(error) from None
        finally:
            os.close(self._descriptor)

    def _append(self, line: bytes) -> None:
        """Write *line* whole; if the disk fills up, what stood before stays whole."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size_bytes)
            raise self._refusal(error) from None
        self._size_bytes += len(line)

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

    def completion(self, completion: Completion, text: str | None) -> None:
        self._write(completion_line(completion, text))

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        self._write(refusal_line(request_id, error))

    def close(self) -> None:
        self._stream.flush()

    def _write(self, line: bytes) -> None:
        self._stream.write(line.decode())
        self._stream.flush()


class TextOutput:
    """The texts for a person to read; with several samples, a head line names each."""

    def __init__(self, stream: TextIO, *, num_samples: int) -> None:
        self._stream = stream
        self._with_heads = num_samples > 1

    def completion(self, completion: Completion, text: str | None) -> None:
        if self._with_heads:
            reason = completion.finish_reason or "failed"
            count = count_of(len(completion.token_ids), "token")
            head = f"--- {completion.id}, sample {completion.sample} · {count} · {reason}"
            self._stream.write(f"{head}\n")
        ids = " ".join(map(str, completion.token_ids.tolist()))
        self._stream.write(f"{ids if text is None else text}\n")
        self._stream.flush()

    def refusal(self, request_id: RequestId | None, error: RequestError) -> None:
        """Refusals stand on stderr already."""

    def close(self) -> None:
        self._stream.flush()
