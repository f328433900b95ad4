"""Verification records ``pagedctl.verification/1``: what a command proved, and for what exactly.

A record grants a contract to one combination of architecture, arithmetic, dtypes, device,
versions, layout, graphs, leaves and switches. It names no weights: an update of the weights
leaves it as it is. No torch.
"""

from __future__ import annotations

import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal

from pagedctl.errors import ConfigError
from pagedctl.manifest import files, strict_json
from pagedctl.manifest.typed_file import FileKind, decode, read_bytes
from pagedctl.numerics.combination import Command, VerifiedFacts, differences

SCHEMA: Final = "pagedctl.verification/1"

DAMAGED_RECORD = "damaged_record"
"""The code of the warning that a file among the records cannot be read."""

MAX_RECORD_BYTES = 1 << 20
"""A record has some 4,000."""

CREATED_PATTERN = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@dataclass(frozen=True, kw_only=True)
class ProvedManifest:
    """The manifest of the run that earned a record."""

    path: str
    sha256: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError("manifest.sha256 is 64 hexadecimal digits")


@dataclass(frozen=True, kw_only=True)
class VerificationRecord(VerifiedFacts):
    """A record: the combination, the command that earned it, and its evidence.

    ``cases`` are those that passed; ``manifest`` is the run's.
    """

    schema: Literal["pagedctl.verification/1"] = field(default=SCHEMA, init=False)
    command: Command
    cases: tuple[str, ...]
    manifest: ProvedManifest
    created_utc: str

    def __post_init__(self) -> None:
        if not self.cases or not all(self.cases):
            raise ValueError("a record names the cases that passed")
        if not re.fullmatch(CREATED_PATTERN, self.created_utc):
            raise ValueError("created_utc is a time like 2026-12-01T09:30:00Z")
        for name, value in self.switches.items():
            if not isinstance(value, bool | str | int | None):
                raise ValueError(f"switch {name} is no switch's value")

    def to_json_object(self) -> dict[str, object]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {"schema": values.pop("schema"), "command": values.pop("command"), **values}


RECORD = FileKind(
    schema=SCHEMA,
    type=VerificationRecord,
    name="verification record",
    absent="earn the record again; it is not written by hand",
    closed=True,
)


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """A record and the file that holds it."""

    path: Path
    record: VerificationRecord


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of a folder, by name of their files, and the refusals of damaged ones."""

    sound: tuple[StoredRecord, ...] = ()
    damaged: tuple[ConfigError, ...] = ()


def read_record(path: Path) -> VerificationRecord:
    """The record at *path*; ConfigError with every fault of the file otherwise."""
    _require_small_file(path)
    record, _ = decode(read_bytes(path, RECORD), path, RECORD)
    assert isinstance(record, VerificationRecord)
    return record


def read_records(folder: Path) -> Records:
    """Every record of *folder*, which need not exist; a damaged file spoils no other."""
    sound: list[StoredRecord] = []
    damaged: list[ConfigError] = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return Records()
    except OSError as error:
        return Records(damaged=(_unreadable(folder, error.strerror or str(error)),))
    for path in paths:
        try:
            sound.append(StoredRecord(path=path, record=read_record(path)))
        except ConfigError as error:
            damaged.append(error)
    return Records(sound=tuple(sound), damaged=tuple(damaged))


def _require_small_file(path: Path) -> None:
    """Refuse what is no record by its looks: a pipe would hold the run up, a device fill it."""
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    if not stat.S_ISREG(found.st_mode):
        raise _unreadable(path, "not a regular file")
    if found.st_size > MAX_RECORD_BYTES:
        raise _unreadable(path, f"{found.st_size} bytes are too many")


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot read it: {why}",
        where=str(path),
        rule=f"the folder of records holds files of {SCHEMA}, of at most {MAX_RECORD_BYTES} bytes",
        remedy="remove it from the folder, or earn the record again",
    )


def records_of(
    facts: Mapping[str, object], records: Records
) -> dict[Command, tuple[StoredRecord, ...]]:
    """The records that agree with as much as *facts* know, by the command that earned them."""
    found: dict[Command, tuple[StoredRecord, ...]] = {}
    for one in records.sound:
        if not differences(one.record, facts):
            command = one.record.command
            found[command] = (*found.get(command, ()), one)
    return found


def records_folder(home: Path) -> Path:
    """Where records lie in PAGEDCTL_HOME."""
    return home / "records"


def default_name(record: VerificationRecord) -> str:
    """A readable name that no other record has: contract, model, device, command, time."""
    parts = (
        record.contract,
        record.family,
        record.dtype,
        record.device.device_class,
        record.command,
        re.sub(r"[-:]", "", record.created_utc),
        secrets.token_hex(3),
    )
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(parts)) + ".json"


def write_record_file(record: VerificationRecord, path: Path, *, create_parents: bool) -> None:
    """Write the new file *path*, complete or not at all; one that exists is refused."""
    data = strict_json.dumps(record.to_json_object(), indent=True) + b"\n"
    files.write_new(path, data, create_parents=create_parents)
