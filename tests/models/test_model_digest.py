"""The digest of a model's files: where they lie does not matter, each file is hashed once."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

import pytest

from pagedctl.errors import ModelError
from pagedctl.models import model_digest as module
from pagedctl.models.builtin import BUILTIN
from pagedctl.models.locate import embedded_location, locate_model
from pagedctl.models.model_digest import described_files, model_digest
from pagedctl.models.resolve import ResolvedModel, resolve_model

DAY_S = 86_400.0


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A copy of the embedded model, written yesterday."""
    folder = tmp_path / "snapshot"
    source = embedded_location().path
    assert source is not None
    shutil.copytree(source, folder)
    for path in folder.iterdir():
        age(path)
    return folder


def age(path: Path) -> None:
    yesterday = time.time() - DAY_S
    os.utime(path, (yesterday, yesterday))


def resolved(folder: Path) -> ResolvedModel:
    return resolve_model(locate_model(str(folder)))


def test_the_digest_does_not_depend_on_the_place(snapshot: Path) -> None:
    here = model_digest(resolve_model(embedded_location()))
    assert here == model_digest(resolved(snapshot))
    assert here.startswith("sha256:")
    assert len(here) == len("sha256:") + 64


def test_every_file_that_is_read_enters_the_digest_and_no_other(snapshot: Path) -> None:
    before = model_digest(resolved(snapshot))
    (snapshot / "MODEL_CARD.md").write_text("another card")
    assert model_digest(resolved(snapshot)) == before
    names = [name for name, _ in described_files(resolved(snapshot))]
    assert names == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ]
    seen = {before}
    for name in names:
        path = snapshot / name
        content = path.read_bytes()
        text = name != "model.safetensors"
        path.write_bytes(content + b"\n" if text else flipped(content))
        seen.add(model_digest(resolved(snapshot)))
    assert len(seen) == len(names) + 1


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_model_without_weights_has_a_digest_of_what_it_has(snapshot: Path) -> None:
    location = locate_model(str(snapshot))
    with_weights = model_digest(resolve_model(location))
    without = model_digest(resolve_model(location, weights="ignore"))
    assert with_weights != without
    builtin = {name: model_digest(resolve_model(locate_model(name))) for name in BUILTIN}
    assert len(set(builtin.values())) == len(builtin)


# -- the cache -----------------------------------------------------------------------------


def test_a_file_is_hashed_once(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    original = module.hashlib.file_digest

    def counted(stream: IO[bytes], algorithm: str) -> Any:
        hashed.append(Path(stream.name).name)
        return original(stream, algorithm)

    monkeypatch.setattr(module.hashlib, "file_digest", counted)
    home = tmp_path / "home"
    first = model_digest(resolved(snapshot), home=home)
    assert len(hashed) == 6
    assert model_digest(resolved(snapshot), home=home) == first
    assert len(hashed) == 6
    assert model_digest(resolved(snapshot)) == first
    assert len(hashed) == 12


def test_a_change_of_size_or_time_is_seen(snapshot: Path, tmp_path: Path) -> None:
    home, path = tmp_path / "home", snapshot / "model.safetensors"
    before = model_digest(resolved(snapshot), home=home)
    path.write_bytes(flipped(path.read_bytes()))
    assert model_digest(resolved(snapshot), home=home) != before


def test_a_file_written_just_now_is_not_kept(snapshot: Path, tmp_path: Path) -> None:
    """It could be written again within the grain of the clock."""
    home = tmp_path / "home"
    (snapshot / "config.json").touch()
    model_digest(resolved(snapshot), home=home)
    assert len(list((home / "digests").iterdir())) == 5


def test_a_damaged_entry_counts_as_none(snapshot: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    before = model_digest(resolved(snapshot), home=home)
    for entry in (home / "digests").iterdir():
        entry.write_bytes(b"damaged")
    assert model_digest(resolved(snapshot), home=home) == before


def test_a_home_that_cannot_be_written_costs_only_time(snapshot: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file, not a folder")
    assert model_digest(resolved(snapshot), home=home) == model_digest(resolved(snapshot))


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.hashlib.file_digest

    def changing(stream: IO[bytes], algorithm: str) -> Any:
        Path(stream.name).touch()
        return original(stream, algorithm)

    found = resolved(snapshot)
    monkeypatch.setattr(module.hashlib, "file_digest", changing)
    with pytest.raises(ModelError, match="changed after it was checked"):
        model_digest(found)
