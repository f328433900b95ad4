"""A checkpoint's tensors by name, from headers alone, and what can be said before a spec.

The index file is the authority: a tensor is read from the file that it names, whatever
else other files hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

from pagedctl.errors import Fault, ModelError
from pagedctl.models.architecture import EMBEDDING_NAME, HEAD_NAME, RECOMPUTED_BUFFER
from pagedctl.models.checkpoint_files import INDEX_NAME, CheckpointFiles, find_checkpoint_files
from pagedctl.models.file_stamp import FileStamp, stamp_of
from pagedctl.models.reader import SpecWarning
from pagedctl.models.safetensors_header import StoredTensor, read_header

DTYPE_NAMES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}
COMPARE_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """Where each tensor of a checkpoint lies: file (relative to *folder*), dtype, shape, bytes.

    As read, it holds every stored tensor; after ``match_checkpoint`` exactly those that
    the model needs, in the model's order. ``stamps`` has one entry per file: a file that no
    longer has its stamp is not what was checked.
    """

    folder: Path
    files: tuple[str, ...]
    stamps: tuple[FileStamp, ...]
    tensors: tuple[StoredTensor, ...]
    warnings: tuple[SpecWarning, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors)


def read_checkpoint(folder: Path) -> CheckpointIndex:
    """All tensors of the checkpoint in *folder*, from headers only.

    Raises :class:`ModelError` with every fault: missing or truncated files, names leaving
    the folder, a tensor that is not in the file to which the index maps it, or that the
    index does not know.
    """
    found = find_checkpoint_files(folder)
    headers: dict[str, tuple[StoredTensor, ...]] = {}
    stamps: list[FileStamp] = []
    faults: list[Fault] = []
    for file in found.files:
        try:
            stamps.append(stamp_of(folder / file))  # before the header, so that no change escapes
            headers[file] = read_header(folder / file, file=file)
        except ModelError as error:
            faults.extend(error.faults)
    if faults:
        raise ModelError.of(faults)
    stored = [tensor for file in found.files for tensor in headers[file]]
    index = CheckpointIndex(
        folder=folder, files=found.files, stamps=tuple(stamps), tensors=tuple(stored)
    )
    return index if found.weight_map is None else _by_authority(index, found, found.weight_map)


def _by_authority(
    index: CheckpointIndex, found: CheckpointFiles, weight_map: Mapping[str, str]
) -> CheckpointIndex:
    """*index* without the copies that its files hold of tensors mapped to other files."""
    tensors: dict[str, StoredTensor] = {}
    copies: dict[str, list[str]] = {}
    faults: list[Fault] = []
    for tensor in index.tensors:
        assigned = weight_map.get(tensor.name)
        if assigned == tensor.file:
            tensors[tensor.name] = tensor
        elif assigned is not None:
            copies.setdefault(tensor.name, []).append(tensor.file)
        elif not RECOMPUTED_BUFFER.fullmatch(tensor.name):
            faults.append(_unknown_to_index(found.folder, tensor))
    for name, file in weight_map.items():
        if name not in tensors:
            faults.append(_not_where_mapped(found.folder, name, file, copies.get(name, [])))
    if faults:
        raise ModelError.of(faults)
    warnings = tuple(
        SpecWarning(
            code="copy_ignored",
            where=str(found.folder / file),
            text=f"{name} is ignored: {INDEX_NAME} assigns it to {weight_map[name]}",
        )
        for name, files in copies.items()
        for file in files
    )
    return replace(index, tensors=tuple(tensors.values()), warnings=found.warnings + warnings)


def _unknown_to_index(folder: Path, tensor: StoredTensor) -> Fault:
    return Fault(
        what=f"{tensor.name} is stored in {tensor.file} but absent from the index",
        where=str(folder / tensor.file),
        rule=f"{INDEX_NAME} names every tensor of its files",
        remedy="fetch the index and its files again, from one revision",
    )


def _not_where_mapped(folder: Path, name: str, file: str, elsewhere: list[str]) -> Fault:
    found = f"it is in {', '.join(elsewhere)}" if elsewhere else "no file of the index has it"
    return Fault(
        what=f"{name} is not in {file}, to which the index maps it; {found}",
        where=str(folder / INDEX_NAME),
        rule="a tensor is stored in the file to which the index maps it",
        remedy="fetch the index and its files again, from one revision",
    )


def majority_dtype(index: CheckpointIndex) -> str | None:
    """The dtype of most matrix tensors, as "bfloat16"; None if there are no matrices.

    Equal counts: the dtype with more elements, then the first by name.
    """
    matrices = [tensor for tensor in index.tensors if len(tensor.shape) == 2]
    count = Counter(tensor.dtype for tensor in matrices)
    elements: Counter[str] = Counter()
    for tensor in matrices:
        elements[tensor.dtype] += prod(tensor.shape)
    if not count:
        return None
    best = min(count, key=lambda dtype: (-count[dtype], -elements[dtype], dtype))
    return DTYPE_NAMES.get(best, best)


def stored_head_equals_embedding(index: CheckpointIndex) -> bool | None:
    """Whether a stored head has the embedding's bytes; None if either is not stored."""
    head, embedding = index.by_name.get(HEAD_NAME), index.by_name.get(EMBEDDING_NAME)
    if head is None or embedding is None:
        return None
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    return _equal_bytes(index.folder, head, embedding)


def _equal_bytes(folder: Path, left: StoredTensor, right: StoredTensor) -> bool:
    """Compare two tensors of equal size on disk, a few MiB at a time."""
    with (folder / left.file).open("rb") as first, (folder / right.file).open("rb") as second:
        first.seek(left.start_bytes)
        second.seek(right.start_bytes)
        remaining = left.nbytes
        while remaining > 0:
            chunk = min(remaining, COMPARE_CHUNK_BYTES)
            if first.read(chunk) != second.read(chunk):
                return False
            remaining -= chunk
    return True
