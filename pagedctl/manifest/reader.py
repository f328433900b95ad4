"""Reading a manifest back: our own major version, every key checked, nothing thrown away."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pagedctl.manifest.schema import SCHEMA, Manifest
from pagedctl.manifest.typed_file import FileKind, decode, read_bytes

MANIFEST = FileKind(
    schema=SCHEMA,
    type=Manifest,
    name="manifest",
    absent="write it; null means not measured",
)


@dataclass(frozen=True, kw_only=True)
class ManifestView:
    """A manifest as read. ``manifest`` has the known keys; ``raw`` is the whole object.

    ``extra`` are the top-level keys that this version does not know; unknown keys of inner
    objects are in ``raw``, where they stood. ``sha256`` is of the file's bytes, so that what
    was compared can be named.
    """

    path: Path
    sha256: str
    raw: Mapping[str, object]
    manifest: Manifest
    extra: Mapping[str, object]


def read_manifest(path: Path) -> ManifestView:
    """The manifest at *path*; ConfigError with every missing or ill-typed key otherwise."""
    data = read_bytes(path, MANIFEST)
    manifest, raw = decode(data, path, MANIFEST)
    assert isinstance(manifest, Manifest)
    known = {each.name for each in fields(Manifest)}
    return ManifestView(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        raw=raw,
        manifest=manifest,
        extra={key: value for key, value in raw.items() if key not in known},
    )
