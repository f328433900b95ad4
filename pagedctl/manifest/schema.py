"""The manifest ``pagedctl.manifest/1``: one frozen data type per object, in file order.

None is written as null and means "not measured" (or "not applicable": a probe has no model).
Keys carry their unit and scope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Final, Literal

SCHEMA: Final = "pagedctl.manifest/1"

Status = Literal["complete", "interrupted", "failed"]
Source = Literal["derived", "measured", "assumed"]


class _JsonObject:
    """A dataclass whose JSON object has its fields as keys, in order."""

    # Fields that are left out of the file while they are None.
    _omitted_if_none: ClassVar[frozenset[str]] = frozenset()

    def to_json_object(self) -> dict[str, object]:
        result: dict[str, object] = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if value is not None or each.name not in self._omitted_if_none:
                result[each.name] = _json_value(value)
        return result


def _json_value(value: object) -> object:
    if isinstance(value, _JsonObject):
        return value.to_json_object()
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return value


@dataclass(frozen=True, kw_only=True)
class ToolInfo(_JsonObject):
    """pagedctl itself. ``commit`` and ``dirty`` only where it runs from its git checkout."""

    _omitted_if_none: ClassVar[frozenset[str]] = frozenset({"commit_reason"})

    version: str
    commit: str | None = None
    dirty: bool | None = None
    commit_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceInfo(_JsonObject):
    """One device of one rank; ``capability`` is ``8.6`` or, on a CPU, ``AVX512``."""

    rank: int
    name: str
    capability: str | None
    memory_total_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ModelInfo(_JsonObject):
    """The model run. ``eos_token_ids``: decimal token id -> files that name it."""

    name: str
    source: str
    digest: str | None
    dtype: str
    parameters: int | None
    eos_token_ids: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class SwitchInfo(_JsonObject):
    """One numerics switch as it holds, and who set it; ``note`` where that is not as chosen."""

    _omitted_if_none: ClassVar[frozenset[str]] = frozenset({"note"})

    value: object
    set_by: str
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class NumericsInfo(_JsonObject):
    """The contract that held. ``eligible_by``: a shipped profile, a record's path, or null."""

    _omitted_if_none: ClassVar[frozenset[str]] = frozenset({"arithmetic_id"})

    contract: str
    bitwise: bool
    eligible_by: str | None
    verified: bool
    switches: Mapping[str, SwitchInfo]
    leaves: Mapping[str, str]
    routes: Mapping[str, str] | None
    pins: Mapping[str, str | None]
    arithmetic_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorkloadInfo(_JsonObject):
    spec: str
    seed: int | None
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class MemoryTerm(_JsonObject):
    """One named share of a rank's memory; ``source`` tells how the planned figure arose."""

    term: str
    rank: int
    planned_bytes: int | None
    measured_bytes: int | None
    source: Source


@dataclass(frozen=True, kw_only=True)
class FileEntry(_JsonObject):
    """A file read or written: ``role`` is ``input``, ``output``, ``plan``, ..."""

    role: str
    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ManifestWarning(_JsonObject):
    code: str
    where: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Verdict(_JsonObject):
    """``holds`` None: no answer."""

    holds: bool | None
    text: str


@dataclass(frozen=True, kw_only=True)
class Imported(_JsonObject):
    """A peer's result file, kept whole in ``object``."""

    tool: str
    version: str | None
    path: str
    sha256: str
    object: object


@dataclass(frozen=True, kw_only=True)
class Manifest(_JsonObject):
    """What one command did, with what, where, and what came out.

    ``error`` has the keys what, where, rule, remedy (and ``faults`` if there are several).
    ``wall_s`` is the whole command in seconds. ``metrics`` are medians over repeats,
    ``samples`` the raw values behind them.
    """

    _omitted_if_none: ClassVar[frozenset[str]] = frozenset({"error"})

    schema: Literal["pagedctl.manifest/1"] = field(default=SCHEMA, init=False)
    command: str
    argv: tuple[str, ...]
    status: Status
    verdict: Verdict | None = None
    error: Mapping[str, object] | None = None
    created_utc: str
    wall_s: float | None
    tool: ToolInfo
    versions: Mapping[str, str | None]
    devices: tuple[DeviceInfo, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: ModelInfo | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    config_origin: Mapping[str, str] = field(default_factory=dict)
    numerics: NumericsInfo | None = None
    workload: WorkloadInfo | None = None
    memory: tuple[MemoryTerm, ...] = ()
    metrics: Mapping[str, object] = field(default_factory=dict)
    samples: Mapping[str, object] = field(default_factory=dict)
    files: tuple[FileEntry, ...] = ()
    warnings: tuple[ManifestWarning, ...] = ()
    imported: Imported | None = None

    def __post_init__(self) -> None:
        if self.status not in ("complete", "interrupted", "failed"):
            raise ValueError(f"unknown status {self.status!r}")
        if (self.error is not None) != (self.status == "failed"):
            raise ValueError("a manifest has an error exactly when its status is failed")
