"""Where a command's manifest lies, and the builder that the command fills and closes."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from pagedctl import __version__
from pagedctl.errors import ConfigError, PagedctlError
from pagedctl.manifest import files, strict_json
from pagedctl.manifest.schema import (
    DeviceInfo,
    FileEntry,
    Imported,
    Manifest,
    ManifestWarning,
    MemoryTerm,
    ModelInfo,
    NumericsInfo,
    Status,
    ToolInfo,
    Verdict,
    WorkloadInfo,
)


@dataclass(frozen=True, kw_only=True)
class ManifestTarget:
    """The file of a manifest; ``create_parents`` only for the runs folder, which is ours."""

    path: Path
    create_parents: bool = False


def choose_target(
    *, command: str, json_path: Path | None, output: Path | None, runs_dir: Path, now: datetime
) -> ManifestTarget:
    """``--json PATH``, else beside the output, else a new name in *runs_dir*.

    An explicit or derived path that exists or cannot be written is refused here, before any
    work. The runs folder is made. *now* is UTC; *output* None also stands for stdout.
    """
    if json_path is not None:
        files.refuse_existing(json_path, "--json")
        return ManifestTarget(path=json_path)
    if output is not None:
        beside = path_beside(output)
        files.refuse_existing(beside, "--output")
        return ManifestTarget(path=beside)
    files.make_writable_folder(runs_dir, "PAGEDCTL_RUNS_DIR")
    return ManifestTarget(path=path_in_runs_dir(runs_dir, command, now), create_parents=True)


def path_beside(output: Path) -> Path:
    """``out.jsonl`` -> ``out.jsonl.manifest.json``."""
    return output.with_name(f"{output.name}.manifest.json")


def path_in_runs_dir(runs_dir: Path, command: str, now: datetime) -> Path:
    """``<runs dir>/20261201T093000Z-bench-1f2e3d.json``: sorts by time, never collides."""
    words = command.replace(" ", "-")
    return runs_dir / f"{now:%Y%m%dT%H%M%SZ}-{words}-{secrets.token_hex(3)}.json"


def describe_file(role: str, path: Path) -> FileEntry:
    """*path* as it is now, hashed in pieces; ConfigError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            size_bytes = stream.tell()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            where=role,
            rule="the files of a run stay readable until it ends",
            remedy="check the path and its permissions",
        ) from error
    return FileEntry(role=role, path=str(path), sha256=digest, bytes=size_bytes)


def to_bytes(manifest: Manifest) -> bytes:
    """The file's bytes: strict JSON, indented, one newline at the end."""
    return strict_json.dumps(manifest.to_json_object(), indent=True) + b"\n"


def internal_error(error: BaseException) -> dict[str, object]:
    """The manifest's ``error`` for a fault of ours, whose traceback goes to stderr."""
    return {
        "what": f"{type(error).__name__}: {error}",
        "where": "inside pagedctl",
        "rule": "this is a fault of pagedctl, not of its input",
        "remedy": "report it with the traceback and this manifest",
    }


def _utc_now() -> datetime:
    return datetime.now(UTC)


class ManifestBuilder:
    """Collects one command's manifest from start to end and writes it exactly once.

    Opened when the command starts; sections are assigned as they become known. As a context
    manager it closes by itself: ``complete`` at the end of the block, ``interrupted`` on
    KeyboardInterrupt or SystemExit, ``failed`` on any other exception, which travels on.
    With *target* None (a command that only reads, without ``--json``) nothing is written.
    Where an exception travels and the manifest cannot be written either, the exception wins
    and ``unwritten`` holds the other.
    """

    def __init__(
        self,
        *,
        command: str,
        argv: Sequence[str],
        target: ManifestTarget | None,
        now: Callable[[], datetime] = _utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.command = command
        self.argv = tuple(argv)
        self.target = target
        self.created = now()
        self.verdict: Verdict | None = None
        self.tool = ToolInfo(version=__version__, commit_reason="not looked up")
        self.versions: dict[str, str | None] = {}
        self.devices: tuple[DeviceInfo, ...] = ()
        self.env: dict[str, str] = {}
        self.model: ModelInfo | None = None
        self.config: dict[str, object] = {}
        self.config_origin: dict[str, str] = {}
        self.numerics: NumericsInfo | None = None
        self.workload: WorkloadInfo | None = None
        self.memory: tuple[MemoryTerm, ...] = ()
        self.metrics: dict[str, object] = {}
        self.samples: dict[str, object] = {}
        self.files: list[FileEntry] = []
        self.warnings: list[ManifestWarning] = []
        self.imported: Imported | None = None
        self._monotonic = monotonic
        self._started_s = monotonic()
        self._closed: Manifest | None = None
        self.unwritten: PagedctlError | None = None

    def warn(self, code: str, *, where: str, text: str) -> None:
        self.warnings.append(ManifestWarning(code=code, where=where, text=text))

    def add_file(self, role: str, path: Path) -> None:
        """Record *path* with its digest; call it once the file has its final bytes."""
        self.files.append(describe_file(role, path))

    def snapshot(self, status: Status, error: dict[str, object] | None = None) -> Manifest:
        """The manifest as it stands now; as ``interrupted`` it is what a killed run leaves."""
        return Manifest(
            command=self.command,
            argv=self.argv,
            status=status,
            verdict=self.verdict,
            error=error,
            created_utc=f"{self.created:%Y-%m-%dT%H:%M:%SZ}",
            wall_s=round(self._monotonic() - self._started_s, 6),
            tool=self.tool,
            versions=dict(self.versions),
            devices=self.devices,
            env=dict(self.env),
            model=self.model,
            config=dict(self.config),
            config_origin=dict(self.config_origin),
            numerics=self.numerics,
            workload=self.workload,
            memory=self.memory,
            metrics=dict(self.metrics),
            samples=dict(self.samples),
            files=tuple(self.files),
            warnings=tuple(self.warnings),
            imported=self.imported,
        )

    def close_complete(self, verdict: Verdict | None = None) -> Manifest:
        """Done; *verdict* (or the one assigned before) may be negative."""
        if verdict is not None:
            self.verdict = verdict
        return self._close(self.snapshot("complete"))

    def close_interrupted(self) -> Manifest:
        return self._close(self.snapshot("interrupted"))

    def close_failed(self, error: BaseException) -> Manifest:
        if isinstance(error, PagedctlError):
            return self._close(self.snapshot("failed", error.as_dict()))
        return self._close(self.snapshot("failed", internal_error(error)))

    @property
    def closed(self) -> Manifest | None:
        """The manifest once written, else None."""
        return self._closed

    def _close(self, manifest: Manifest) -> Manifest:
        if self._closed is not None:
            raise RuntimeError(f"this manifest was closed as {self._closed.status}")
        if self.target is not None:
            data = to_bytes(manifest)
            files.write_new(self.target.path, data, create_parents=self.target.create_parents)
        self._closed = manifest
        return manifest

    def __enter__(self) -> ManifestBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._closed is not None:
            return
        if error is None:
            self.close_complete()
            return
        try:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                self.close_interrupted()
            else:
                self.close_failed(error)
        except PagedctlError as second:
            self.unwritten = second
