"""Lines of a file or of stdin: plain or gzip, one at a time, with the digest of what was read.

No torch.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from pagedctl.errors import ConfigError

GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
BUFFER_BYTES = 1 << 18
_JSON_WHITESPACE = b" \t\r"


class InputLines:
    """The lines of one input, as ``(line number from 1, bytes without the line end)``.

    Lines end at ``\\n``; one ``\\r`` before it is dropped. Blank lines are counted and not
    yielded. Memory is that of the longest line. ``sha256`` and ``size_bytes`` are of the bytes
    as they lie in the file, complete once all lines were read.

    Example::

        with InputLines.open("prompts.jsonl.gz") as lines:
            for number, line in lines: ...
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        """Read from *stream*, which is closed at the end; *name* is how errors call it."""
        self.name = name
        self._metered = _MeteredReader(stream)

    @classmethod
    def open(cls, path: Path) -> InputLines:
        """The lines of the file at *path*; ConfigError if it cannot be opened."""
        try:
            return cls(path.open("rb", buffering=0), str(path))
        except OSError as error:
            raise _unreadable(str(path), error) from None

    @classmethod
    def of_stdin(cls) -> InputLines:
        """The lines of descriptor 0."""
        try:
            return cls(open(os.dup(0), "rb", buffering=0), "stdin")
        except OSError as error:
            raise _unreadable("stdin", error) from None

    @property
    def sha256(self) -> str:
        return self._metered.digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        return self._metered.size_bytes

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        try:
            for number, raw in enumerate(self._decompressed(), start=1):
                line = raw.removesuffix(b"\n").removesuffix(b"\r")
                content = line.removeprefix(BOM) if number == 1 else line
                if content.strip(_JSON_WHITESPACE):
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(self.name, error) from None
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def _decompressed(self) -> IO[bytes]:
        compressed = self._metered.look_ahead(len(GZIP_MAGIC)) == GZIP_MAGIC
        buffered = io.BufferedReader(self._metered, BUFFER_BYTES)
        return gzip.GzipFile(fileobj=buffered) if compressed else buffered  # type: ignore[return-value]

    def __enter__(self) -> InputLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._metered.close()


class _MeteredReader(io.RawIOBase):
    """A byte stream that hashes and counts what passes, and can look ahead in a pipe."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._ahead = b""
        self.digest = hashlib.sha256()
        self.size_bytes = 0

    def look_ahead(self, count: int) -> bytes:
        """The next *count* bytes (fewer at the end of the input), which stay unread."""
        while len(self._ahead) < count and (piece := self._take(count - len(self._ahead))):
            self._ahead += piece
        return self._ahead

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._ahead[: len(buffer)] or self._take(len(buffer))
        self._ahead = self._ahead[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _take(self, count: int) -> bytes:
        piece: bytes | None = self._stream.read(count)
        if piece is None:  # somebody made this pipe non-blocking: that is not its end
            raise BlockingIOError(errno.EAGAIN, "the stream is non-blocking and has no data yet")
        self.digest.update(piece)
        self.size_bytes += len(piece)
        return piece


def _unreadable(name: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"the input cannot be read: {error.strerror or error}",
        where=name,
        rule="the input is a readable file",
        remedy="check the path and its permissions",
    )


def _damaged(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the gzip data is damaged: {error}",
        where=name,
        rule="a file that starts with gzip's magic bytes is whole gzip data",
        remedy="copy or compress the file again",
    )
