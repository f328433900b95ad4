"""The frame of every command that runs an engine: its manifest from start to end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedctl.cli.session import Session
from pagedctl.config.surface import GROUPS
from pagedctl.engine.manifest_sections import fill_header
from pagedctl.manifest.writer import ManifestBuilder


@contextmanager
def recorded_run(session: Session, *, output: Path | None = None) -> Iterator[ManifestBuilder]:
    """The manifest of a command that runs an engine: header and options filled in.

    However the block ends, a manifest lies there, and the last note on stderr names it.
    """
    builder = None
    try:
        with session.manifest_builder(reads_only=False, output=output) as builder:
            fill_header(builder, session.environ)
            _fill_options(builder, session)
            yield builder
    finally:
        if builder is not None and builder.closed is not None and builder.target is not None:
            session.note(f"manifest: {builder.target.path}")


def print_warnings(session: Session, builder: ManifestBuilder) -> None:
    """The manifest's warnings so far, on stderr."""
    for one in builder.warnings:
        session.warn(f"{one.text} ({one.where})")


def _fill_options(builder: ManifestBuilder, session: Session) -> None:
    """Every option that says what is computed; those of the group Files do not."""
    files = GROUPS["files"].options
    names = [name for name in session.options.values if name not in files]
    builder.config = {name: session.options.values[name] for name in names}
    builder.config_origin = {name: session.options.origins[name] for name in names}
    if session.plan is not None:
        builder.add_file("plan", Path(session.plan.path))
