"""The header of a run beside its output: what ``--resume`` knows of the run that was killed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pagedctl.manifest import files
from pagedctl.manifest.writer import ManifestBuilder, to_bytes


class PartialHeader:
    """``<output>.partial.json``, from before the first line until the run is complete.

    As a context manager it removes the header once the manifest of a complete run has replaced
    it. A run that ends otherwise leaves it, and so does a kill.
    """

    def __init__(self, path: Path | None, *, exists: bool) -> None:
        """*path* None: nothing is kept. *exists*: an earlier run wrote it, and it stays as is."""
        self._path = path
        self._exists = exists
        self._builder: ManifestBuilder | None = None

    def write(self, builder: ManifestBuilder) -> None:
        """Publish what *builder* knows by now, unless an earlier run did."""
        self._builder = builder
        if self._path is not None and not self._exists:
            files.write_new(self._path, to_bytes(builder.snapshot("interrupted")))

    def __enter__(self) -> PartialHeader:
        return self

    def __exit__(self, *raised: object) -> None:
        closed = None if self._builder is None else self._builder.closed
        if self._path is not None and closed is not None and closed.status == "complete":
            with suppress(OSError):
                self._path.unlink()
