"""Which files make up a checkpoint: those of its index, or else exactly one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pagedctl.errors import Fault, ModelError
from pagedctl.models.json_object import read_object
from pagedctl.models.reader import SpecWarning, shown

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".npz")
MAX_NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """The files to read, relative to *folder*, in order of their names.

    ``weight_map`` is the index's tensor name -> file, or None for a checkpoint of one file.
    """

    folder: Path
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    warnings: tuple[SpecWarning, ...]


def has_weights(folder: Path) -> bool:
    """Whether *folder* has anything that claims to be a safetensors checkpoint."""
    return (folder / INDEX_NAME).is_file() or bool(_safetensors_in(folder))


def find_checkpoint_files(folder: Path) -> CheckpointFiles:
    """The files of the checkpoint in *folder*; :class:`ModelError` if they are not all there."""
    present = _safetensors_in(folder)
    if (folder / INDEX_NAME).is_file():
        return _from_index(folder, present)
    if len(present) == 1:
        return CheckpointFiles(folder=folder, files=present, weight_map=None, warnings=())
    raise ModelError(
        _no_single_file(folder, present),
        where=str(folder),
        rule=f"weights are one {SUFFIX} file, or the files that {INDEX_NAME} names",
        remedy=f"keep exactly one {SUFFIX} file, or add {INDEX_NAME}",
    )


def _safetensors_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob(f"*{SUFFIX}")))


def _no_single_file(folder: Path, present: tuple[str, ...]) -> str:
    if present:
        return f"{len(present)} {SUFFIX} files and no {INDEX_NAME}: {_names(present)}"
    others = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_FORMATS)
    if others:
        return f"no {SUFFIX} file; other weight formats are not read: {_names(others)}"
    return f"no {SUFFIX} file"


def _from_index(folder: Path, present: tuple[str, ...]) -> CheckpointFiles:
    where = folder / INDEX_NAME
    weight_map = _weight_map(where)
    files = tuple(sorted(set(weight_map.values())))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(files)} files are missing: {_names(missing)}; "
            f"found: {_names(present) or 'none'}",
            where=str(where),
            rule="every file that the index names is in the folder, under that name",
            remedy="fetch the missing files; files are never matched by order",
        )
    stray = [name for name in present if name not in files]
    return CheckpointFiles(
        folder=folder, files=files, weight_map=weight_map, warnings=_stray(folder, stray)
    )


def _stray(folder: Path, stray: list[str]) -> tuple[SpecWarning, ...]:
    if not stray:
        return ()
    text = f"not named by {INDEX_NAME}, and not read: {_names(stray)}"
    return (SpecWarning(code="stray_file", where=str(folder), text=text),)


def _weight_map(where: Path) -> dict[str, str]:
    """The index's ``weight_map``, every file name checked to stay inside the folder."""
    block = read_object(where).get("weight_map")
    if not isinstance(block, dict) or not block:
        raise ModelError(
            f"weight_map is {shown(block) if block is not None else 'missing'}",
            where=str(where),
            rule="weight_map is an object: tensor name to file name",
            remedy="fetch the index again",
        )
    faults = [
        Fault(
            what=f"{tensor} is mapped to {shown(file)}",
            where=f"{where}, key weight_map",
            rule=f"a file is named by a relative path to a {SUFFIX} file inside the folder",
            remedy="do not use this checkpoint unless you know why it names that file",
        )
        for tensor, file in block.items()
        if not _stays_inside(file)
    ]
    if faults:
        raise ModelError.of(faults)
    return {tensor: str(file) for tensor, file in block.items()}


def _stays_inside(file: object) -> bool:
    """The name alone decides: a snapshot's files are legal links into the cache's blobs."""
    if not isinstance(file, str) or not file.endswith(SUFFIX):
        return False
    path = PurePosixPath(file)
    strange = any(character in file for character in "\\:\0")
    return not (strange or path.is_absolute() or ".." in path.parts)


def _names(names: tuple[str, ...] | list[str]) -> str:
    shown_names = ", ".join(names[:MAX_NAMES_SHOWN])
    hidden = len(names) - MAX_NAMES_SHOWN
    return f"{shown_names} and {hidden} more" if hidden > 0 else shown_names
