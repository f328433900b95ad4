"""The digest of a model's files, each file hashed once per machine."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pagedctl.errors import ConfigError
from pagedctl.manifest.files import write_new
from pagedctl.models.builtin import BUILTIN
from pagedctl.models.checkpoint_files import INDEX_NAME
from pagedctl.models.file_stamp import FileStamp, require_unchanged, stamp_of
from pagedctl.models.locate import CONFIG_NAME
from pagedctl.models.resolve import GENERATION_CONFIG, ResolvedModel

DIGESTS_FOLDER = "digests"
HEX_DIGEST = re.compile(rb"[0-9a-f]{64}")
FRESH_S = 2.0
"""A file written this recently may be written again within the clock's grain: not cached."""


def model_digest(resolved: ResolvedModel, *, home: Path | None = None) -> str:
    """``sha256:...`` over the names and contents of the files that describe the model.

    Config, generation config, tokenizer and chat template, index and shards, under their
    names in the snapshot: where the folder lies does not matter, nor do files that are never
    read. A model resolved without weights has a digest without shards; a built-in
    architecture one over its config. *home* keeps each file's hash under its path, size and
    time of the last write; None keeps nothing.
    """
    if resolved.location.path is None:
        hashes = {CONFIG_NAME: _hash_of_builtin(resolved.location.name)}
    else:
        hashes = {name: _file_hash(path, home) for name, path in described_files(resolved)}
    lines = (f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def described_files(resolved: ResolvedModel) -> Iterator[tuple[str, Path]]:
    """(name in the snapshot, path) of each file that the model was resolved from."""
    config = resolved.location.config_path
    if config is not None:
        yield CONFIG_NAME, config
    folder, tokenizer = resolved.location.folder, resolved.tokenizer
    generation = None if folder is None else folder / GENERATION_CONFIG
    if generation is not None and generation.is_file():
        yield GENERATION_CONFIG, generation
    for path in (tokenizer.tokenizer_json, tokenizer.tokenizer_config, tokenizer.chat_template):
        if path is not None:
            yield path.name, path
    checkpoint = resolved.checkpoint
    if checkpoint is not None:
        index = checkpoint.folder / INDEX_NAME
        if index.is_file():
            yield INDEX_NAME, index
        yield from ((file, checkpoint.folder / file) for file in checkpoint.files)


def _hash_of_builtin(name: str) -> str:
    text = json.dumps(BUILTIN[name], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _file_hash(path: Path, home: Path | None) -> str:
    stamp = stamp_of(path)
    entry = None if home is None else home / DIGESTS_FOLDER / _entry_name(path, stamp)
    known = _known_hash(entry)
    if known is not None:
        return known
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    require_unchanged(path, stamp)
    if entry is not None and time.time() - stamp.mtime_ns / 1e9 > FRESH_S:
        with suppress(ConfigError):  # another process was first, or the folder is read-only
            write_new(entry, digest.encode(), create_parents=True)
    return digest


def _entry_name(path: Path, stamp: FileStamp) -> str:
    key = f"{path.resolve()}\n{stamp.size_bytes}\n{stamp.mtime_ns}"
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _known_hash(entry: Path | None) -> str | None:
    """The hash that an earlier run left; a damaged entry counts as none."""
    if entry is None:
        return None
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    return content.decode() if HEX_DIGEST.fullmatch(content) else None
