"""--model to a place: paths first, then names, then the local cache; never the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedctl.errors import ModelError
from pagedctl.models import locate
from pagedctl.models.locate import cache_folder, cached_models, locate_model
from pagedctl.models.resolve import resolve_spec

Make = Callable[..., Any]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture
def hub(tmp_path: Path, config_of: Make, write_model: Make) -> dict[str, str]:
    """A cache with Qwen/Qwen3-Tiny: main at COMMIT, refs/pr/1 at OTHER, which is incomplete."""
    repository = tmp_path / "home" / "hub" / "models--Qwen--Qwen3-Tiny"
    write_model(repository / "snapshots" / COMMIT, config_of("qwen3"))
    (repository / "snapshots" / OTHER).mkdir()
    for name, commit in (("main", COMMIT), ("refs/pr/1", OTHER)):
        path = repository / "refs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{commit}\n")
    return {"HF_HOME": str(tmp_path / "home")}


def refused(text: str, environ: dict[str, str] | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        locate_model(text, environ=environ or {"HF_HOME": "/nonexistent"})
    return caught.value


def test_an_existing_path_wins_over_every_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_of: Make, write_model: Make
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3-8b", "embedded", "Qwen/Qwen3-8B"):
        write_model(tmp_path / name, config_of())
        location = locate_model(name)
        assert (location.kind, location.path) == ("folder", tmp_path / name)
        assert location.source == str(tmp_path / name)
    (tmp_path / "llama-3.1-8b").mkdir()
    assert "has no config.json" in refused("llama-3.1-8b").what


def test_a_config_file_is_a_location(tmp_path: Path, config_of: Make, write_model: Make) -> None:
    folder = write_model(tmp_path / "mini", config_of())
    location = locate_model(str(folder / "config.json"))
    assert (location.kind, location.name, location.folder) == ("config", "mini", folder)
    assert location.config_path == folder / "config.json"
    weights = refused(str(folder / "model.safetensors"))
    assert "model.safetensors is not a config.json" in weights.what


def test_a_built_in_architecture_has_no_path() -> None:
    location = locate_model("qwen3-8b")
    assert (location.kind, location.name, location.path) == ("builtin", "qwen3-8b", None)
    assert (location.folder, location.config_path) == (None, None)
    assert resolve_spec(location).hidden_size == 4096


def test_the_embedded_model_is_package_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_of: Make, write_model: Make
) -> None:
    assert Path(locate.__file__).parent / "embedded" == locate.EMBEDDED_FOLDER
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locate, "EMBEDDED_FOLDER", tmp_path / "data")
    assert "no embedded model" in refused("embedded").what
    write_model(tmp_path / "data", config_of("qwen3"))
    location = locate_model("embedded")
    assert (location.kind, location.path) == ("embedded", tmp_path / "data")
    assert resolve_spec(location).family == "qwen3"


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_a_cached_repository_is_found_at_its_revision(revision: str, hub: dict[str, str]) -> None:
    location = locate_model(f"Qwen/Qwen3-Tiny{revision}", environ=hub)
    assert (location.kind, location.name) == ("cache", "qwen3-tiny")
    assert location.source == f"Qwen/Qwen3-Tiny@{COMMIT}"
    assert location.path is not None
    assert location.path.name == COMMIT
    assert resolve_spec(location).family == "qwen3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Qwen/Qwen3-Tiny@refs/pr/1", "has no config.json in the local cache"),
        (f"Qwen/Qwen3-Tiny@{'a' * 40}", "has no config.json in the local cache"),
        ("Qwen/Qwen3-Tiny@v9", 'revision "v9" is not in the local cache'),
        ("Qwen/Qwen3-Tiny@../../../etc", "is not in the local cache"),
        ("Qwen/Qwen3-Huge", "is not in the local cache"),
        ("../escape", "no such path"),
        ("a/b/c", "no such path"),
        ("nothing-like-it", "no such path"),
        (" ", "the name is empty"),
        ("x\0y", "no such path"),
        ("x" * 5000, "no such path"),
    ],
)
def test_what_is_not_there_is_refused_and_never_downloaded(
    text: str, says: str, hub: dict[str, str]
) -> None:
    assert says in refused(text, hub).what


def test_known_revisions_are_listed(hub: dict[str, str]) -> None:
    assert "main, refs/pr/1" in refused("Qwen/Qwen3-Tiny@v9", hub).remedy


@pytest.mark.parametrize(
    ("text", "close"),
    [
        ("qwen3-8", "qwen3-8b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("embeded", "embedded"),
    ],
)
def test_the_nearest_built_in_name_is_offered(text: str, close: str) -> None:
    assert f"nearest built-in name: {close}" in refused(text).what


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_folder({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")
    assert cache_folder({"HF_HOME": "/h"}) == Path("/h/hub")
    assert cache_folder({"HF_HOME": ""}) == Path.home() / ".cache/huggingface/hub"


def test_cached_snapshots_are_listed_if_they_have_a_config(hub: dict[str, str]) -> None:
    assert [location.source for location in cached_models(hub)] == [f"Qwen/Qwen3-Tiny@{COMMIT}"]
    assert cached_models({"HF_HOME": "/nonexistent"}) == ()
