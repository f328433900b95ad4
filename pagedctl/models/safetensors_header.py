"""The header of one safetensors file: read and checked without touching the tensors.

Format: 8 bytes little-endian length N, N bytes of JSON {name: {dtype, shape,
data_offsets}}, then the data; offsets are relative to the data's start and the tensors
fill it without holes or overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pagedctl.errors import Fault, ModelError, PagedctlError
from pagedctl.models.json_object import parse_object
from pagedctl.models.reader import shown

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
BITS: Mapping[str, int] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "I32": 32,
    "U32": 32,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor on disk: bytes [start_bytes, end_bytes) of *file*, row-major, little-endian.

    ``file`` is relative to the checkpoint's folder; ``dtype`` is the format's own name,
    such as "BF16".
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    end_bytes: int

    @property
    def nbytes(self) -> int:
        return self.end_bytes - self.start_bytes


def read_header(path: Path, *, file: str) -> tuple[StoredTensor, ...]:
    """The tensors of the file at *path*, in the order of their bytes.

    Raises :class:`ModelError` naming the file, and the tensor where there is one, with
    every fault found.
    """
    try:
        size = path.stat().st_size
        header, data_start = _header_bytes(path, size)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror or error}") from None
    entries = parse_object(header, where=f"{path}, header")
    entries.pop("__metadata__", None)
    tensors: list[StoredTensor] = []
    faults: list[Fault] = []
    for name, entry in entries.items():
        tensor = _tensor(name, entry, file, data_start)
        if isinstance(tensor, StoredTensor):
            tensors.append(tensor)
        else:
            faults.append(_fault(path, f"{name}: {tensor}"))
    tensors.sort(key=lambda tensor: (tensor.start_bytes, tensor.end_bytes))
    if not faults:
        faults = _layout_faults(path, tensors, data_start, size)
    if faults:
        raise ModelError.of(faults)
    return tuple(tensors)


def _header_bytes(path: Path, size: int) -> tuple[bytes, int]:
    """The header's JSON and the offset at which the data starts."""
    if size < LENGTH_BYTES:
        raise _refusal(path, f"is truncated: {size} bytes, the length field alone has 8")
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise _refusal(path, f"declares a header of {length} bytes (not safetensors?)")
        if LENGTH_BYTES + length > size:
            raise _refusal(path, f"is truncated: its header ends at byte {8 + length} of {size}")
        return stream.read(length), LENGTH_BYTES + length


def _tensor(name: str, entry: object, file: str, data_start: int) -> StoredTensor | str:
    """The tensor of one header entry, or what is wrong with it."""
    if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
        return "an entry has exactly dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"unknown dtype {shown(dtype)}"
    if shape is None:
        return f"shape {shown(entry['shape'])} is not a list of sizes"
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {shown(entry['data_offsets'])} are not [start, end)"
    if (offsets[1] - offsets[0]) * 8 != prod(shape) * BITS[dtype]:
        return f"{dtype} {list(shape)} does not fill its {offsets[1] - offsets[0]} bytes"
    return StoredTensor(
        name=name,
        file=file,
        dtype=dtype,
        shape=shape,
        start_bytes=data_start + offsets[0],
        end_bytes=data_start + offsets[1],
    )


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in value):
        return None
    return tuple(value)


def _layout_faults(
    path: Path, tensors: list[StoredTensor], data_start: int, size: int
) -> list[Fault]:
    """Truncation by tensor; else holes, overlaps and trailing bytes."""
    cut = [tensor for tensor in tensors if tensor.end_bytes > size]
    if cut:
        return [
            _fault(path, f"is truncated: {tensor.name} ends at byte {tensor.end_bytes} of {size}")
            for tensor in cut
        ]
    end = data_start
    for tensor in tensors:
        if tensor.start_bytes != end:
            problem = f"{tensor.name} starts at byte {tensor.start_bytes}, expected {end}"
            return [_fault(path, f"has a hole or an overlap: {problem}")]
        end = tensor.end_bytes
    if end != size:
        return [_fault(path, f"holds {size - end} bytes after its last tensor")]
    return []


def _fault(path: Path, problem: str) -> Fault:
    return Fault(
        what=f"{path.name} {problem}",
        where=str(path),
        rule="a complete safetensors file: header, then tensors without holes or overlaps",
        remedy="fetch the file again",
    )


def _refusal(path: Path, problem: str) -> PagedctlError:
    return ModelError.of([_fault(path, problem)])
