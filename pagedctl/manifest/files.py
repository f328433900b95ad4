"""Files that are complete or absent, and never overwrite another.

A file is written under a temporary name beside its final one, flushed to the disk, and then
published under the final name in one step that fails if the name is taken. A process killed
at any moment leaves at most ``<name>.<12 hex>.tmp`` behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pagedctl.errors import ConfigError

CHUNK_BYTES = 1 << 20

_NAME_KEPT_BYTES = 200  # of the final name, in the temporary one: names end at 255 bytes
_NO_HARD_LINKS = frozenset(
    {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
)
_NO_FOLDER_FSYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
_NOT_OVERWRITTEN = "no file is overwritten"


def refuse_existing(path: Path, option: str) -> None:
    """Refuse *path* before any work starts if it exists or cannot be made.

    *option* is what the user wrote to name it, e.g. ``--json``. A dangling symbolic link
    counts as existing. A file made between this check and the end is refused by
    :func:`write_new`.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        _refuse_missing_folder(path, option)
        with _refused_as_config_error(path, option):
            _try_a_file_beside(path)
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    else:
        raise _exists(path, option)


def make_writable_folder(folder: Path, option: str) -> None:
    """Make *folder* if it is missing, and refuse one that takes no files."""
    with _refused_as_config_error(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        _try_a_file_beside(folder / "any")


def refuse_clashes(paths: Mapping[str, Path]) -> None:
    """Refuse two files of one run at one path; *paths* are by what names each."""
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        first = seen.setdefault(path.parent.resolve() / path.name, name)
        if first != name:
            raise ConfigError(
                f"{path} would be written twice",
                where=f"{first} and {name}",
                rule="each file of a run has a path of its own",
                remedy="name another path for one of them",
            )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An open file that no other run writes: ``descriptor`` reads, and appends at the end.

    ``created``: it was made by this claim. ``locked`` is false where the file system keeps no
    locks, so that nothing stops a second claim of an existing file.
    """

    descriptor: int
    created: bool
    locked: bool


def claim(path: Path, option: str, *, existing: bool = False) -> Claim:
    """Make the empty file *path*, or with *existing* take the one that is there if there is.

    Of several processes that claim one path, one gets it and the others are refused, until it
    closes the descriptor or ends in any way.
    """
    while True:
        created = not (existing and os.path.lexists(path))
        try:
            descriptor = _opened(path, option, created=created)
        except _Changed:  # made or taken away by another run since we looked
            if existing:
                continue
            raise _exists(path, option) from None
        try:
            locked = _locked(descriptor, path, option)
            if _is_at(descriptor, path):
                return Claim(descriptor=descriptor, created=created, locked=locked)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner took it away


def move_aside(path: Path) -> Path:
    """Give *path* the first free name of ``<stem>.1<suffix>``, ``.2`` and so on; that name."""
    number = 1
    while True:
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            _publish(path, free)
            return free
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _cannot_write(free, str(path), error) from error


def write_new(path: Path, data: bytes, *, create_parents: bool = False) -> None:
    """Write *data* to the new file *path*: completely, durably, never over another file.

    The folder must exist unless *create_parents*: a mistyped explicit path should be said,
    not made. If the name is taken, the error names it and the file that keeps *data*: a result
    that took hours is not thrown away because of its name.
    """
    if create_parents:
        with _refused_as_config_error(path, str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
    else:
        _refuse_missing_folder(path, str(path))
    with _refused_as_config_error(path, str(path)):
        temporary = _write_temporary(path, data)
    try:
        _publish(temporary, path)
    except OSError as error:
        raise _kept_elsewhere(path, temporary, error) from None
    with _refused_as_config_error(path, str(path)):
        _sync_folder(path.parent)


class _Changed(Exception):
    """A path is there that was not, or the other way round."""


def _opened(path: Path, option: str, *, created: bool) -> int:
    """A descriptor of *path*, a new file or the one that is there."""
    try:
        new = os.O_CREAT | os.O_EXCL if created else 0
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | new, 0o666)
    except OSError as error:
        if os.path.lexists(path) == created:
            raise _Changed from None
        raise _cannot_write(path, option, error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(
            f"{path} is not a file of lines",
            where=option,
            rule="an output that is taken up again is a regular file",
            remedy="name another path",
        )
    return descriptor


def _locked(descriptor: int, path: Path, option: str) -> bool:
    """Lock the open file against other processes; False where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another run is writing {path}",
            where=option,
            rule="one run at a time writes a file",
            remedy="wait until it has ended, or name another path",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise _cannot_write(path, option, error) from error
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether *path* still is the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _refuse_missing_folder(path: Path, where: str) -> None:
    if not path.parent.is_dir():
        raise ConfigError(
            f"folder {path.parent} does not exist",
            where=where,
            rule="a file is written into an existing folder",
            remedy=f"create it (mkdir -p {path.parent}) or name another path",
        )


def _try_a_file_beside(path: Path) -> None:
    """Make a file and remove it: permissions say nothing of read-only mounts and quotas."""
    probe = _temporary_path(path)
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    os.unlink(probe)


@contextmanager
def _refused_as_config_error(path: Path, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, where, error) from error


def _exists(path: Path, where: str) -> ConfigError:
    return ConfigError(
        f"{path} exists",
        where=where,
        rule=_NOT_OVERWRITTEN,
        remedy="name another path, or move or remove this one",
    )


def _cannot_write(path: Path, where: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror or error}",
        where=where,
        rule="the folder is writable and the disk has room",
        remedy="name a path on another disk, or free space or permissions here",
    )


def _kept_elsewhere(path: Path, temporary: Path, error: OSError) -> ConfigError:
    taken = isinstance(error, FileExistsError)
    return ConfigError(
        f"{path} exists" if taken else f"cannot write {path}: {error.strerror or error}",
        where=str(path),
        rule=_NOT_OVERWRITTEN if taken else "a finished file gets its name in one step",
        remedy=f"nothing is lost: the complete result is {temporary}; move it to a free name",
    )


def _write_temporary(path: Path, data: bytes) -> Path:
    """*data*, flushed to the disk, in a new file beside *path*; no file if that fails."""
    temporary = _temporary_path(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            _write_all(descriptor, data)
        finally:
            os.close(descriptor)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _temporary_path(path: Path) -> Path:
    kept = os.fsencode(path.name)[:_NAME_KEPT_BYTES].decode("utf-8", "ignore")
    return path.with_name(f"{kept}.{secrets.token_hex(6)}.tmp")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:CHUNK_BYTES]) :]
    os.fsync(descriptor)


def _publish(temporary: Path, path: Path) -> None:
    """Give *temporary* the name *path*; FileExistsError if that is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost: then our own link is what exists.
        if not _same_file(temporary, path):
            raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _publish_without_links(temporary, path)
        return
    os.unlink(temporary)


def _same_file(first: Path, second: Path) -> bool:
    return os.path.samestat(os.lstat(first), os.lstat(second))


def _publish_without_links(temporary: Path, path: Path) -> None:
    """The same on a file system without hard links (FAT, some network mounts).

    An empty file reserves the name, so two writers cannot both win; the rename then replaces
    the reservation in one step. A kill between the two leaves the empty reservation, which no
    reader takes for a result.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(path)
        raise


def _sync_folder(folder: Path) -> None:
    """Make a new name durable; a file system that cannot sync a folder is left to itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_FSYNC:
            raise
    finally:
        os.close(descriptor)
