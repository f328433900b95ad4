"""Weights from a checkpoint: each tensor from the file its index names, into its own memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagedctl.errors import ModelError
from pagedctl.models.architecture import TensorSpec
from pagedctl.models.checkpoint_index import DTYPE_NAMES, CheckpointIndex
from pagedctl.models.file_stamp import FileStamp, changed, require_unchanged
from pagedctl.models.random_weights import random_weights
from pagedctl.models.resolve import ResolvedModel
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tensor_parallel import local_shape, require_tp, shard_bounds

__all__ = ["LoadedWeights", "load_weights", "random_weights"]


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """``tensors``: exactly those that the model needs, by Hugging Face name, in its order.

    ``casts``: stored dtype, as "float32", of each tensor that was stored in another dtype
    than the model's. ``read_bytes``: what was asked of the files, in stored dtypes.
    """

    tensors: dict[str, torch.Tensor]
    casts: Mapping[str, str]
    read_bytes: int


def load_weights(
    resolved: ResolvedModel, *, device: torch.device | str, tp: int = 1, rank: int = 0
) -> LoadedWeights:
    """Read the checkpoint onto *device*, cast to the model's dtype: the rank's part of each.

    Every tensor owns compact memory of its own, of ``local_shape``; vocabulary rows that pad
    the last ranks are zero. Files are read one after another and hold one tensor beyond the
    result. Raises :class:`ModelError` for a model without weights, for a file that is no
    longer what was checked, and for a value that the model's dtype cannot hold.
    """
    spec, index = resolved.spec, resolved.checkpoint
    if index is None:
        raise _no_weights(resolved)
    require_tp(spec, tp)
    reader = _Reader(spec, torch.device(device), tp, rank)
    read: dict[str, torch.Tensor] = {}
    for file, stamp in zip(index.files, index.stamps, strict=True):
        needed = [one for one in spec.tensors if index.by_name[one.name].file == file]
        if needed:
            read.update(reader.read_file(index.folder / file, stamp, needed))
    return LoadedWeights(
        tensors={one.name: read[one.name] for one in spec.tensors},
        casts=_casts(index, spec),
        read_bytes=reader.read_bytes,
    )


class _Reader:
    """Reads one rank's parts of tensors and counts the bytes it asks for."""

    def __init__(self, spec: ModelSpec, device: torch.device, tp: int, rank: int) -> None:
        self.spec = spec
        self.device = device
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.tp = tp
        self.rank = rank
        self.read_bytes = 0

    def read_file(
        self, path: Path, stamp: FileStamp, needed: list[TensorSpec]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of each needed tensor; the file is looked at again after each."""
        with _opened(path, stamp) as file:
            for tensor in needed:
                yield tensor.name, self._read(file, tensor, path)
                require_unchanged(path, stamp)

    def _read(self, file: Any, tensor: TensorSpec, path: Path) -> torch.Tensor:
        part = self._part(file, tensor)
        self.read_bytes += part.nbytes
        shape = local_shape(self.spec, tensor, self.tp)
        owned = torch.empty(shape, dtype=self.dtype, device=self.device)
        moved = part.to(self.device)
        real = owned[: part.shape[0]]
        real.copy_(moved)
        owned[part.shape[0] :] = 0
        _refuse_overflow(tensor.name, path, stored=moved, cast=real)
        return owned

    def _part(self, file: Any, tensor: TensorSpec) -> torch.Tensor:
        """The rank's part as stored: a view into the mapped file, which must not outlive it."""
        if self.tp == 1 or tensor.shard == "replicated":
            whole: torch.Tensor = file.get_tensor(tensor.name)
            return whole
        start, stop = shard_bounds(self.spec, tensor, tp=self.tp, rank=self.rank)
        stored = file.get_slice(tensor.name)
        part: torch.Tensor = (
            stored[:, start:stop] if tensor.shard == "columns" else stored[start:stop]
        )
        return part


@contextmanager
def _opened(path: Path, stamp: FileStamp) -> Iterator[Any]:
    """The file, mapped, after making sure that what is mapped is what was checked."""
    require_unchanged(path, stamp)
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise changed(path, f"it cannot be opened: {error}") from None
    with file:
        require_unchanged(path, stamp)
        yield file


def _refuse_overflow(name: str, path: Path, *, stored: torch.Tensor, cast: torch.Tensor) -> None:
    """Refuse finite values that became infinite in a narrower dtype."""
    if torch.finfo(cast.dtype).max >= torch.finfo(stored.dtype).max:
        return
    lost = int((stored.isfinite() & ~cast.isfinite()).sum())
    if lost:
        dtype = str(cast.dtype).removeprefix("torch.")
        raise ModelError(
            f"{lost} values of {name} are too large for {dtype}",
            where=str(path),
            rule=f"a finite value stays finite: {dtype} ends at {torch.finfo(cast.dtype).max:g}",
            remedy="give --dtype float32, or bfloat16",
        )


def _casts(index: CheckpointIndex, spec: ModelSpec) -> dict[str, str]:
    stored = {one.name: DTYPE_NAMES[one.dtype] for one in index.tensors}
    return {name: dtype for name, dtype in stored.items() if dtype != spec.dtype}


def _no_weights(resolved: ResolvedModel) -> ModelError:
    return ModelError(
        f"{resolved.location.source} was resolved without weights",
        where=f"model {resolved.spec.name}",
        rule="weights are read from the checkpoint that was checked",
        remedy="name a snapshot folder, or give --random-weights SEED",
    )
