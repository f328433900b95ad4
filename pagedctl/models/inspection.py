"""What can be said about models without loading weights: a list of them, and one in full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from pagedctl.errors import Fault, ModelError
from pagedctl.manifest.schema import ModelInfo
from pagedctl.models.architecture import TensorSpec
from pagedctl.models.builtin import BUILTIN
from pagedctl.models.checkpoint_index import DTYPE_NAMES
from pagedctl.models.locate import (
    ModelLocation,
    builtin_location,
    cached_models,
    embedded_location,
    locate_model,
)
from pagedctl.models.resolve import ResolvedModel, resolve_model
from pagedctl.models.spec import DTYPE_BYTES, ModelSpec
from pagedctl.models.tensor_parallel import local_shape, require_tp


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """One model that a name finds. ``faults`` say why it cannot be served, if so."""

    location: ModelLocation
    spec: ModelSpec | None
    faults: tuple[Fault, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """The model's object in the metrics of ``models list``."""
        return {
            "name": self.location.name,
            "kind": self.location.kind,
            "parameters": self.spec.parameters if self.spec else None,
            "dtype": self.spec.dtype if self.spec else None,
            "source": self.location.source,
            "faults": [fault.as_dict() for fault in self.faults],
        }


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """The ``count`` tensors of one role; ``name`` has ``*`` for the layer.

    ``rank_shape`` is what each rank allocates of one of them and ``rank_bytes`` of all;
    ``stored`` are their dtypes in the checkpoint.
    """

    name: str
    count: int
    rank_shape: tuple[int, ...]
    rank_bytes: int
    stored: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A model that can be served over ``tp`` ranks."""

    resolved: ResolvedModel
    tp: int

    @property
    def spec(self) -> ModelSpec:
        return self.resolved.spec

    def tensor_groups(self) -> tuple[TensorGroup, ...]:
        """The tensors by role, in the model's order."""
        groups: dict[tuple[str, str], list[TensorSpec]] = {}
        for tensor in self.spec.tensors:
            groups.setdefault((tensor.role, tensor.part), []).append(tensor)
        return tuple(self._group(members) for members in groups.values())

    def _group(self, members: list[TensorSpec]) -> TensorGroup:
        first = members[0]
        rank_shape = local_shape(self.spec, first, self.tp)
        layer = "" if first.layer is None else f"layers.{first.layer}."
        return TensorGroup(
            name=first.name.replace(layer, "layers.*.") if layer else first.name,
            count=len(members),
            rank_shape=rank_shape,
            rank_bytes=len(members) * prod(rank_shape) * DTYPE_BYTES[self.spec.dtype],
            stored=tuple(dict.fromkeys(self._stored(members))),
        )

    def _stored(self, members: Iterable[TensorSpec]) -> Iterator[str]:
        if self.resolved.checkpoint is not None:
            by_name = self.resolved.checkpoint.by_name
            yield from (DTYPE_NAMES[by_name[one.name].dtype] for one in members)

    def metrics(self) -> dict[str, object]:
        """The metrics of ``models inspect``, but for the contracts; bytes are a rank's."""
        spec = self.spec
        return {
            "head_dim": spec.head_dim,
            "num_key_value_heads": spec.num_key_value_heads,
            "rope": {
                "type": spec.rope.type,
                "theta": spec.rope.theta,
                "factor": spec.rope.factor,
            },
            "windows": spec.windows,
            "tensors": len(spec.tensors),
            "parameters": spec.parameters,
            "weight_bytes": spec.weight_bytes(tp=self.tp),
            "kv_bytes_per_token": spec.kv_bytes_per_token(tp=self.tp),
            "eos_token_ids": model_info(self.resolved).eos_token_ids,
        }


def model_info(resolved: ResolvedModel, *, digest: str | None = None) -> ModelInfo:
    """The manifest's ``model`` section."""
    spec = resolved.spec
    return ModelInfo(
        name=spec.name,
        source=resolved.location.source,
        digest=digest,
        dtype=spec.dtype,
        parameters=spec.parameters,
        eos_token_ids={str(token): files for token, files in spec.eos_sources},
    )


def inspect_model(text: str, *, tp: int = 1, environ: Mapping[str, str]) -> Inspection:
    """Resolve the model that *text* names and check that it splits over *tp* ranks.

    Raises :class:`ModelError` with every reason why it cannot be served.
    """
    resolved = resolve_model(locate_model(text, environ=environ))
    require_tp(resolved.spec, tp)
    return Inspection(resolved=resolved, tp=tp)


def list_models(environ: Mapping[str, str]) -> tuple[ListedModel, ...]:
    """The embedded model, the built-in architectures, and every snapshot of the local cache."""
    builtin = map(builtin_location, BUILTIN)
    return tuple(map(_listed, (embedded_location(), *builtin, *cached_models(environ))))


def _listed(location: ModelLocation) -> ListedModel:
    try:
        return ListedModel(location=location, spec=resolve_model(location).spec)
    except ModelError as error:
        return ListedModel(location=location, spec=None, faults=error.faults)
