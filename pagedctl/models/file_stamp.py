"""What the file system says about a file's content: enough to see that it was changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedctl.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class FileStamp:
    """Size, time of the last write and file number, of the file itself behind any link."""

    size_bytes: int
    mtime_ns: int
    inode: int


def stamp_of(path: Path) -> FileStamp:
    """The stamp of the file at *path* now; :class:`ModelError` if there is none."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(
            f"{path.name} cannot be read: {error.strerror or error}",
            where=str(path),
            rule="a model's files exist and are readable",
            remedy="check the path and its permissions",
        ) from None
    return FileStamp(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def require_unchanged(path: Path, checked: FileStamp) -> None:
    """Raise :class:`ModelError` unless the file at *path* is still as it was *checked*."""
    now = stamp_of(path)
    if now.size_bytes != checked.size_bytes:
        raise changed(path, f"it had {checked.size_bytes:,} bytes and has {now.size_bytes:,}")
    if now != checked:
        raise changed(path, "it was written or replaced")


def changed(path: Path, how: str) -> ModelError:
    """The refusal of a file that is no longer what was checked."""
    return ModelError(
        f"{path.name} changed after it was checked: {how}",
        where=str(path),
        rule="a model's files stay as they are from the check until they have been read",
        remedy="wait until the download or copy has ended, then run again",
    )
