"""From the text of --model to the place that holds the model; nothing is ever downloaded.

Order: an existing path, ``embedded``, a built-in architecture, ``org/name[@revision]`` in
the local Hugging Face cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagedctl.errors import ModelError, nearest
from pagedctl.models.builtin import BUILTIN

LocationKind = Literal["folder", "config", "embedded", "builtin", "cache"]

CONFIG_NAME = "config.json"
EMBEDDED_NAME = "embedded"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
REPOSITORY = re.compile(r"(?P<org>\w[\w.-]*)/(?P<name>\w[\w.-]*)(@(?P<revision>.+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class ModelLocation:
    """Where a model was found.

    ``path`` is the snapshot folder, or the config file for kind "config", or None for a
    built-in architecture. ``source`` is how a manifest names the place.
    """

    kind: LocationKind
    name: str
    path: Path | None
    source: str

    @property
    def folder(self) -> Path | None:
        """The folder with the model's other files.

        A lone config file has one only if it is called config.json: then the files beside
        it belong to it.
        """
        if self.kind != "config" or self.path is None:
            return self.path
        return self.path.parent if self.path.name == CONFIG_NAME else None

    @property
    def config_path(self) -> Path | None:
        if self.path is None or self.kind == "config":
            return self.path
        return self.path / CONFIG_NAME


def locate_model(text: str, *, environ: Mapping[str, str] | None = None) -> ModelLocation:
    """The place that *text* names; :class:`ModelError` if there is none."""
    if not text.strip():
        raise _unknown(text, "the name is empty")
    expanded = os.path.expanduser(text)
    if os.path.exists(expanded):
        return _from_path(Path(expanded))
    if text == EMBEDDED_NAME:
        return embedded_location()
    if text in BUILTIN:
        return builtin_location(text)
    match = REPOSITORY.fullmatch(text)
    if match is None:
        raise _unknown(text, "no such path, built-in architecture or org/name")
    cache = cache_folder(os.environ if environ is None else environ)
    return _from_cache(cache, match["org"], match["name"], match["revision"])


def embedded_location() -> ModelLocation:
    """The model that comes with the package."""
    if not (EMBEDDED_FOLDER / CONFIG_NAME).is_file():
        raise ModelError(
            "this installation has no embedded model",
            where=str(EMBEDDED_FOLDER),
            rule="the package data holds the embedded model",
            remedy="install pagedctl again, or name another model",
        )
    return ModelLocation(
        kind="embedded", name=EMBEDDED_NAME, path=EMBEDDED_FOLDER, source="embedded in pagedctl"
    )


def builtin_location(name: str) -> ModelLocation:
    """The built-in architecture *name*, which has no folder."""
    source = f"built-in architecture {name}"
    return ModelLocation(kind="builtin", name=name, path=None, source=source)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The Hugging Face hub cache: HF_HUB_CACHE, else HF_HOME/hub, else the usual place."""
    if environ.get("HF_HUB_CACHE"):
        return Path(os.path.expanduser(environ["HF_HUB_CACHE"]))
    home = environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.path.expanduser(home)) / "hub"


def cached_models(environ: Mapping[str, str] | None = None) -> tuple[ModelLocation, ...]:
    """Every snapshot in the local cache that has a config.json, by name."""
    cache = cache_folder(os.environ if environ is None else environ)
    found = []
    for folder in sorted(cache.glob("models--*--*/snapshots/*")):
        org, _, name = folder.parent.parent.name.removeprefix("models--").partition("--")
        if (folder / CONFIG_NAME).is_file():
            found.append(_cache_location(folder, org, name))
    return tuple(found)


def _from_path(path: Path) -> ModelLocation:
    place = path.resolve()
    if place.is_dir():
        if not (place / CONFIG_NAME).is_file():
            raise ModelError(
                f"the folder has no {CONFIG_NAME}",
                where=str(place),
                rule=f"a model folder holds {CONFIG_NAME}",
                remedy="name the snapshot folder itself",
            )
        return ModelLocation(kind="folder", name=place.name, path=place, source=str(place))
    if place.suffix != ".json":
        raise ModelError(
            f"{place.name} is not a config.json",
            where=str(place),
            rule="a model file is a config.json; weights are found through their folder",
            remedy="name the folder, or its config.json",
        )
    name = place.parent.name if path.name == CONFIG_NAME else path.stem
    # The path as given, made absolute: a cache snapshot's config.json is a link to a blob.
    return ModelLocation(
        kind="config", name=name, path=path.absolute(), source=str(path.absolute())
    )


def _from_cache(cache: Path, org: str, name: str, revision: str | None) -> ModelLocation:
    repository = cache / f"models--{org}--{name}"
    if not repository.is_dir():
        raise _unknown(f"{org}/{name}", f"it is not in the local cache {cache}")
    wanted = revision or "main"
    snapshot = repository / "snapshots" / _commit_of(repository, wanted)
    if not (snapshot / CONFIG_NAME).is_file():
        raise ModelError(
            f"{org}/{name}@{wanted} has no {CONFIG_NAME} in the local cache",
            where=str(snapshot),
            rule="the snapshot must be complete; nothing is downloaded",
            remedy=f"fetch it with: hf download {org}/{name} --revision {wanted}",
        )
    return _cache_location(snapshot, org, name)


def _cache_location(snapshot: Path, org: str, name: str) -> ModelLocation:
    source = f"{org}/{name}@{snapshot.name}"
    return ModelLocation(kind="cache", name=name.lower(), path=snapshot, source=source)


def _commit_of(repository: Path, revision: str) -> str:
    """A full commit is itself; a branch, tag or ``refs/pr/N`` is read from refs/."""
    if COMMIT.fullmatch(revision):
        return revision
    refs = repository / "refs"
    known = dict(_refs(refs))
    if revision not in known:
        raise ModelError(
            f'revision "{revision}" is not in the local cache',
            where=str(refs),
            rule="a revision is a full commit, or a ref that was downloaded",
            remedy=f"use one of: {', '.join(known) or 'none was downloaded'}",
        )
    return known[revision]


def _refs(refs: Path) -> Iterator[tuple[str, str]]:
    """(name, commit) of each ref file whose content is a commit."""
    for path in sorted(refs.rglob("*")):
        if path.is_file():
            commit = path.read_text(encoding="utf-8", errors="replace").strip()
            if COMMIT.fullmatch(commit):
                yield path.relative_to(refs).as_posix(), commit


def _unknown(text: str, problem: str) -> ModelError:
    close = nearest(text.rpartition("/")[2].lower(), [EMBEDDED_NAME, *BUILTIN])
    hint = f" (nearest built-in name: {close})" if close else ""
    return ModelError(
        f'model "{text}" was not found: {problem}{hint}',
        where="the model's name",
        rule="an existing path, embedded, a built-in architecture, or org/name[@revision] "
        "in the local Hugging Face cache; nothing is downloaded",
        remedy="check the name, or fetch the model with: hf download org/name",
    )
