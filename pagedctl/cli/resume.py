"""``generate --resume``: what an earlier run left of an output, and whether it can be finished.

A run makes its files in this order: the empty output; its header ``<output>.partial.json``
before the first line; lines; the manifest; and the header goes last. So whatever moment a run
was killed at, the files tell how far it came:

====== ====== ======== =============================================================
output header manifest
====== ====== ======== =============================================================
none   none   none     nothing began, or it failed before the first line: begin
empty  none   none     killed before the header: begin in the empty file
lines  there  none     killed, or ended by a signal or a failure: finish it
lines  there  complete killed before the header was removed: remove it
lines  none   complete nothing to do: answer as that run did
lines  none   none     not an output that can be told from another file: refused
none   there  any      the output was moved away: refused
none   none   complete the output was moved away: refused
====== ====== ======== =============================================================

The manifest of a part that failed or was interrupted counts as none. It is moved aside, and so
is the empty name that a kill leaves on a file system without hard links.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pagedctl import __version__
from pagedctl.cli.completion_output import FileOutput
from pagedctl.cli.exit_codes import ExitCode
from pagedctl.cli.generate_job import Asked, Job, partial_beside, read_all
from pagedctl.cli.resume_check import (
    RunFacts,
    facts_of_manifest,
    other_facts,
    require_same_run,
)
from pagedctl.cli.session import Session
from pagedctl.config.home import home_folder
from pagedctl.config.loader import DEFAULT
from pagedctl.config.surface import GROUPS
from pagedctl.engine.completed_lines import CompletedLines, read_completed_lines
from pagedctl.errors import ConfigError
from pagedctl.manifest import files
from pagedctl.manifest.reader import read_manifest
from pagedctl.manifest.schema import Manifest
from pagedctl.manifest.writer import ManifestBuilder, path_beside
from pagedctl.models.model_digest import model_digest


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What earlier runs left: the input as they saw it, the lines they wrote, their header.

    ``header`` None: no line was written, and the run begins. ``complete`` is the manifest of a
    run that left nothing to do.
    """

    asked: Asked
    completed: CompletedLines
    header: Manifest | None = None
    complete: Manifest | None = None


def earlier_runs(session: Session, job: Job, output: FileOutput) -> Earlier:
    """What stands in *output*, which is locked, after all checks that need no engine.

    Nothing was changed when this raises ConfigError, ModelError or RequestError; afterwards the
    names that this run's manifest and header need are free.
    """
    assert job.output is not None
    partial, target = partial_beside(job.output), manifest_path(session, job.output)
    header, complete = _header_and_complete(session, job.output, output)
    asked = read_all(job)
    if complete is not None:
        _require_same_run(session, job, asked, complete, str(target))
        with suppress(FileNotFoundError):
            partial.unlink()
        return Earlier(asked=asked, completed=CompletedLines(), complete=complete)
    completed = CompletedLines()
    if header is not None:
        _require_same_run(session, job, asked, header, str(partial))
        with output.reader() as stream:
            completed = read_completed_lines(
                stream, str(job.output), requests=asked.requests, refused=asked.refused
            )
    _free_names(session, partial, target, header)
    return Earlier(asked=asked, completed=completed, header=header)


def _header_and_complete(
    session: Session, path: Path, output: FileOutput
) -> tuple[Manifest | None, Manifest | None]:
    """The header of an unfinished run, and the manifest of a complete one, as the table has it."""
    partial, target = partial_beside(path), manifest_path(session, path)
    header = None if _is_absent_or_empty(partial) else _read_header(partial)
    manifest = None if _is_absent_or_empty(target) else _read_manifest(session, target)
    if manifest is not None and _is_complete(manifest, output):
        return None, manifest
    if header is None and output.size_bytes:
        raise _no_header(path, partial, target)
    if header is not None and output.created:
        raise _no_output(path, partial)
    if manifest is not None and not _is_of_a_part(manifest):
        files.refuse_existing(target, _option(session))
    return header, None


def manifest_path(session: Session, output: Path) -> Path:
    """Where the run's manifest will lie."""
    return session.json_path or path_beside(output)


def require_same_engine(job: Job, header: Manifest, now: Manifest) -> None:
    """Compare what only the built engine tells: derived values, and the ``arithmetic_id``."""
    require_same_run(
        facts_of_manifest(header),
        facts_of_manifest(now),
        bitwise=job.config.contract.contract.bitwise,
        where=str(job.partial),
    )


def fill_from_header(builder: ManifestBuilder, header: Manifest) -> None:
    """The model, contract and derived values of the lines, where no engine is needed any more."""
    builder.model = header.model
    builder.numerics = header.numerics
    for name, origin in header.config_origin.items():
        if origin.startswith("derived: ") and builder.config_origin.get(name) == DEFAULT:
            builder.config[name] = header.config[name]
            builder.config_origin[name] = origin


def answer_of_complete(session: Session, job: Job, manifest: Manifest) -> ExitCode:
    """Say that nothing is left to do; the exit code is that of the run that did it."""
    assert job.output is not None
    session.note(f"{job.output} is complete: nothing is left to do")
    session.note(f"manifest: {manifest_path(session, job.output)}")
    session.emit(manifest)
    errors = ("requests_failed", "requests_refused", "error_lines_kept")
    failed = any(manifest.metrics.get(name) for name in errors)
    return ExitCode.NO_ANSWER if failed else ExitCode.YES


def _is_absent_or_empty(path: Path) -> bool:
    """Empty: a kill between a name's reservation and its file, without hard links."""
    return not path.exists() or path.stat().st_size == 0


def _read_header(partial: Path) -> Manifest:
    header = read_manifest(partial).manifest
    if header.command != "generate" or header.status != "interrupted":
        raise ConfigError(
            f"{partial} is no header of an interrupted generate",
            where="--resume",
            rule="the header beside an output is what its run wrote before the first line",
            remedy="put the header back, or write a new output",
        )
    return header


def _read_manifest(session: Session, target: Path) -> Manifest:
    """The manifest that has the name of this run's; any other file is refused as existing."""
    try:
        return read_manifest(target).manifest
    except ConfigError:
        files.refuse_existing(target, _option(session))
        raise


def _option(session: Session) -> str:
    return "--output" if session.json_path is None else "--json"


def _is_complete(manifest: Manifest, output: FileOutput) -> bool:
    """Whether *manifest* is that of a complete run that wrote just these bytes."""
    if manifest.command != "generate" or manifest.status != "complete" or output.created:
        return False
    written = {one.sha256 for one in manifest.files if one.role == "output"}
    with output.reader() as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() in written


def _is_of_a_part(manifest: Manifest) -> bool:
    """Whether *manifest* is that of a generate that did not come to its end."""
    return manifest.command == "generate" and manifest.status != "complete"


def _require_same_run(
    session: Session, job: Job, asked: Asked, before: Manifest, where: str
) -> None:
    """Compare what is known before the engine is built."""
    names = [name for name in session.options.values if name not in GROUPS["files"].options]
    settings = job.config.contract.on_device(job.config.device, tp=job.config.tp).settings
    digest = None
    if before.model is not None:
        digest = model_digest(job.resolved, home=home_folder(session.environ))
    now = RunFacts(
        config={name: session[name] for name in names},
        origins={name: session.options.origins[name] for name in names},
        others=other_facts(
            version=__version__,
            input_sha256=None if asked.input is None else asked.input.sha256,
            model_digest=digest,
            switches={name: one.value for name, one in settings.items()},
        ),
    )
    bitwise = job.config.contract.contract.bitwise
    require_same_run(facts_of_manifest(before), now, bitwise=bitwise, where=where)


def _free_names(session: Session, partial: Path, target: Path, header: Manifest | None) -> None:
    """Move aside what has the manifest's name; an empty reservation of the header goes."""
    if os.path.lexists(target):
        aside = files.move_aside(target)
        session.note(f"{target}, the manifest of an earlier part, is now {aside}")
    if header is None:
        with suppress(FileNotFoundError):
            partial.unlink()


def _no_header(output: Path, partial: Path, target: Path) -> ConfigError:
    return ConfigError(
        f"{output} holds lines, and there is neither {partial} nor a manifest {target} of them",
        where="--resume",
        rule="an output is resumed by the header that its run left, which tells how it was begun",
        remedy="put the header back beside it, or write a new output",
    )


def _no_output(output: Path, partial: Path) -> ConfigError:
    return ConfigError(
        f"{output} does not exist, and its header {partial} does",
        where="--resume",
        rule="the header stands for lines that an earlier run wrote",
        remedy=f"put the output back, or remove {partial} to begin anew",
    )
