"""Other tools' result files in tests: written as the tools do, read, imported, compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedctl.manifest.peer_files import read_peer_file
from pagedctl.manifest.peer_result import PeerResult
from pagedctl.manifest.reader import read_manifest
from pagedctl.manifest.writer import ManifestBuilder, ManifestTarget


def write(folder: Path, *objects: object) -> Path:
    """The objects as the tools write them: json.dump, one after another."""
    path = folder / "peer.json"
    path.write_text("\n".join(map(json.dumps, objects)), encoding="utf-8")
    return path


def read(folder: Path, value: Mapping[str, object]) -> PeerResult:
    (result,) = read_peer_file(write(folder, value))
    return result


def written_and_read(folder: Path, result: PeerResult) -> dict[str, Any]:
    """The manifest of an import, through our writer and our reader."""
    path = folder / "import.json"
    path.unlink(missing_ok=True)
    builder = ManifestBuilder(command="import", argv=[], target=ManifestTarget(path=path))
    for section, value in result.manifest_sections().items():
        setattr(builder, section, value)
    builder.close_complete()
    return dict(read_manifest(path).raw)


def same(first: object, second: object) -> bool:
    """Equal, with NaN equal to NaN and ints apart from floats and bools."""
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return type(first) is type(second) and first == second
