"""What a run of ``pagedctl generate`` leaves behind, and the input files of its tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL = ("--kv-cache-memory-bytes", "16MiB")


@dataclass(frozen=True, kw_only=True)
class Done:
    """One run: its exit code, its streams, and the folder with its files."""

    code: int
    out: str
    err: str
    folder: Path

    def lines(self, name: str = "out.jsonl") -> list[dict[str, Any]]:
        return parsed((self.folder / name).read_text())

    def manifest(self, name: str = "out.jsonl.manifest.json") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_bytes())
        return found

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir() if path.is_file()}


Generate = Callable[..., Done]


def parsed(text: str) -> list[dict[str, Any]]:
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path
