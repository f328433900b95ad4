"""A checkpoint against a ModelSpec: the same tensors exactly, each of the right shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pagedctl.errors import Fault, ModelError
from pagedctl.models.architecture import HEAD_NAME, RECOMPUTED_BUFFER, TensorSpec, shape_formula
from pagedctl.models.checkpoint_index import DTYPE_NAMES, CheckpointIndex
from pagedctl.models.reader import SpecWarning
from pagedctl.models.safetensors_header import StoredTensor
from pagedctl.models.spec import ModelSpec

MAX_NAMES_SHOWN = 4
BIAS_KEYS = {
    "self_attn": "attention_bias",
    "mlp": "mlp_bias",
}


def match_checkpoint(
    index: CheckpointIndex,
    spec: ModelSpec,
    *,
    tie_is_stated: bool = True,
    head_is_copy: bool = False,
) -> CheckpointIndex:
    """*index* reduced to exactly what *spec* needs, in the model's order, casts reported.

    ``tie_is_stated``: tie_word_embeddings stands in config.json. ``head_is_copy``: a tied
    model stores its head too, with the embedding's bytes, so the head is not read. The
    only other tensors that may be left over are rotary frequency buffers, which are
    recomputed. Raises :class:`ModelError` with every difference.
    """
    stored = index.by_name
    needed = {tensor.name: tensor for tensor in spec.tensors}
    faults = [
        _missing(index, spec, tensor, tie_is_stated)
        for name, tensor in needed.items()
        if name not in stored
    ]
    faults.extend(
        _unexpected(index, tensor)
        for name, tensor in stored.items()
        if name not in needed
        and not RECOMPUTED_BUFFER.fullmatch(name)
        and not (head_is_copy and name == HEAD_NAME)
    )
    both = [(tensor, stored[name]) for name, tensor in needed.items() if name in stored]
    faults.extend(_shape_faults(index, spec, both))
    faults.extend(_dtype_faults(index, both))
    if faults:
        raise ModelError.of(faults)
    kept = tuple(tensor for _, tensor in both)
    return replace(index, tensors=kept, warnings=index.warnings + _casts(index, spec, kept))


def _missing(
    index: CheckpointIndex, spec: ModelSpec, tensor: TensorSpec, tie_is_stated: bool
) -> Fault:
    if tensor.name == HEAD_NAME:
        stated = "false" if tie_is_stated else f"absent, and false is the {spec.family} default"
        return Fault(
            what=f"{HEAD_NAME} is missing and tie_word_embeddings is {stated}",
            where=str(index.folder),
            rule=f"an untied model stores {HEAD_NAME}",
            remedy="fetch the checkpoint again, or set tie_word_embeddings to true in "
            "config.json if the head is the embedding",
        )
    return Fault(
        what=f"{tensor.name} {list(tensor.shape)} is missing",
        where=str(index.folder),
        rule="the checkpoint holds every tensor that config.json asks for",
        remedy="fetch the checkpoint again, or correct config.json",
    )


def _unexpected(index: CheckpointIndex, tensor: StoredTensor) -> Fault:
    key = _bias_key(tensor.name)
    remedy = f"correct {key} in config.json" if key else "use a checkpoint of this architecture"
    return Fault(
        what=f"{tensor.name} {tensor.dtype} {list(tensor.shape)} is stored but not used",
        where=str(index.folder / tensor.file),
        rule="every stored tensor is part of the model that config.json describes",
        remedy=remedy,
    )


def _bias_key(name: str) -> str | None:
    module, _, part = name.rpartition(".")
    block = module.split(".")[-2] if module.count(".") else ""
    return BIAS_KEYS.get(block) if part == "bias" else None


def _shape_faults(
    index: CheckpointIndex, spec: ModelSpec, both: Iterable[tuple[TensorSpec, StoredTensor]]
) -> Iterator[Fault]:
    """One fault per role and pair of shapes; its layers are counted, not repeated."""
    groups: dict[tuple[object, ...], list[tuple[TensorSpec, StoredTensor]]] = {}
    for tensor, stored in both:
        if tensor.shape != stored.shape:
            key = (tensor.role, tensor.part, tensor.shape, stored.shape)
            groups.setdefault(key, []).append((tensor, stored))
    for members in groups.values():
        tensor, stored = members[0]
        more = f" (and {len(members) - 1} more layers)" if len(members) > 1 else ""
        yield Fault(
            what=f"{tensor.name} is stored as {list(stored.shape)} but config.json gives "
            f"{list(tensor.shape)}: {shape_formula(spec, tensor.role)}{more}",
            where=str(index.folder / stored.file),
            rule="stored shapes are those that config.json gives",
            remedy=_shape_remedy(spec, tensor, stored),
        )


def _shape_remedy(spec: ModelSpec, tensor: TensorSpec, stored: StoredTensor) -> str:
    rows = stored.shape[0] if stored.shape else 0
    if tensor.role == "q_proj" and rows and rows % spec.num_attention_heads == 0:
        head_dim = rows // spec.num_attention_heads
        return f"correct config.json: {rows} rows mean head_dim {head_dim}"
    return "correct config.json, or use the checkpoint that goes with it"


def _dtype_faults(
    index: CheckpointIndex, both: Iterable[tuple[TensorSpec, StoredTensor]]
) -> Iterator[Fault]:
    by_dtype: dict[str, list[StoredTensor]] = {}
    for _, stored in both:
        if stored.dtype not in DTYPE_NAMES:
            by_dtype.setdefault(stored.dtype, []).append(stored)
    for dtype, tensors in by_dtype.items():
        yield Fault(
            what=f"{len(tensors)} tensors are stored as {dtype}: {_some(tensors)}",
            where=str(index.folder / tensors[0].file),
            rule=f"weights are stored as {', '.join(DTYPE_NAMES)}",
            remedy="use the unquantised checkpoint of this model",
        )


def _casts(
    index: CheckpointIndex, spec: ModelSpec, kept: Iterable[StoredTensor]
) -> tuple[SpecWarning, ...]:
    by_dtype: dict[str, list[StoredTensor]] = {}
    for tensor in kept:
        if DTYPE_NAMES[tensor.dtype] != spec.dtype:
            by_dtype.setdefault(DTYPE_NAMES[tensor.dtype], []).append(tensor)
    return tuple(
        SpecWarning(
            code="cast",
            where=str(index.folder),
            text=f"{len(tensors)} tensors stored as {stored} are cast to {spec.dtype}: "
            f"{_some(tensors)}",
        )
        for stored, tensors in by_dtype.items()
    )


def _some(tensors: list[StoredTensor]) -> str:
    names = ", ".join(tensor.name for tensor in tensors[:MAX_NAMES_SHOWN])
    return f"{names}, ..." if len(tensors) > MAX_NAMES_SHOWN else names
