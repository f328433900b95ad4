"""The one resolver: a model's files to its ModelSpec, and to the index of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from pagedctl.errors import Fault, ModelError
from pagedctl.models.architecture import HEAD_NAME
from pagedctl.models.builtin import BUILTIN
from pagedctl.models.checkpoint_files import has_weights
from pagedctl.models.checkpoint_index import (
    CheckpointIndex,
    majority_dtype,
    read_checkpoint,
    stored_head_equals_embedding,
)
from pagedctl.models.checkpoint_match import match_checkpoint
from pagedctl.models.config_json import SERVED_DTYPES, ParsedConfig, eos_range_faults, parse_config
from pagedctl.models.eos import EosSources, ids_of, unite
from pagedctl.models.json_object import read_object
from pagedctl.models.locate import ModelLocation
from pagedctl.models.reader import ConfigReader, SpecWarning
from pagedctl.models.spec import ModelSpec
from pagedctl.models.tokenizer_files import (
    TOKENIZER_CONFIG,
    TokenizerFiles,
    find_tokenizer_files,
    tokenizer_eos,
)

WeightsPolicy = Literal["auto", "required", "ignore"]
GENERATION_CONFIG = "generation_config.json"
CONFIG_SOURCE = "config.json"
MAJORITY_SOURCE = "derived: most matrix tensors"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model that can be served, as its files describe it.

    ``checkpoint`` holds exactly the tensors that the spec needs; None for a model without
    weights. ``spec.warnings`` has all that was noticed, the checkpoint's part included.
    """

    location: ModelLocation
    spec: ModelSpec
    checkpoint: CheckpointIndex | None
    tokenizer: TokenizerFiles


class _Collector:
    """Runs the independent steps of one resolution and keeps the faults of all of them."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.warnings: list[SpecWarning] = []

    def run(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except ModelError as error:
            self.faults.extend(error.faults)
            return None

    def raise_faults(self) -> None:
        if self.faults:
            raise ModelError.of(self.faults)


def resolve_spec(
    location: ModelLocation, *, dtype: str = "auto", weights: WeightsPolicy = "auto"
) -> ModelSpec:
    """The spec of the model at *location*; see :func:`resolve_model`."""
    return resolve_model(location, dtype=dtype, weights=weights).spec


def resolve_model(
    location: ModelLocation, *, dtype: str = "auto", weights: WeightsPolicy = "auto"
) -> ResolvedModel:
    """Read and check everything that the files at *location* say.

    ``dtype`` is the flag: "auto", or one of float32, bfloat16, float16. ``weights``:
    "auto" checks a checkpoint where the folder has one, "required" also refuses a model
    without one, "ignore" looks at none (random weights, a plan before the download).
    Raises :class:`ModelError` with the faults of all files together.
    """
    steps = _Collector()
    config = steps.run(lambda: _parsed(location))
    stored = steps.run(lambda: _stored(location, weights))
    tokenizer = find_tokenizer_files(location.folder)
    resolved_dtype = steps.run(lambda: _known_dtype(location, dtype, config, stored))
    eos = _eos(steps, location.folder, config, tokenizer)
    if config is None or (resolved_dtype is None and steps.faults):
        raise ModelError.of(steps.faults)
    if resolved_dtype is None:
        raise _no_dtype(location)
    tie, copied = _tie(steps, config, stored)
    spec = _spec(location.name, config, tie, resolved_dtype, eos)
    checkpoint = steps.run(lambda: _matched(stored, spec, config, copied))
    steps.raise_faults()
    found = steps.warnings + list(checkpoint.warnings if checkpoint else ())
    return ResolvedModel(
        location=location,
        spec=replace(spec, warnings=(*config.warnings, *found)),
        checkpoint=checkpoint,
        tokenizer=tokenizer,
    )


def spec_from_config(
    config: Mapping[str, object], *, name: str = "model", dtype: str = "auto"
) -> ModelSpec:
    """The spec of a config object alone: config.json's, or ``to_dict()`` of transformers'."""
    parsed = parse_config(config)
    location = ModelLocation(kind="config", name=name, path=None, source=CONFIG_SOURCE)
    resolved_dtype = _known_dtype(location, dtype, parsed, None)
    if resolved_dtype is None:
        raise _no_dtype(location)
    eos = unite([(CONFIG_SOURCE, parsed.eos_token_ids)])
    spec = _spec(name, parsed, parsed.tie_word_embeddings, resolved_dtype, eos)
    return replace(spec, warnings=parsed.warnings)


def _parsed(location: ModelLocation) -> ParsedConfig:
    if location.config_path is None:
        return parse_config(BUILTIN[location.name], where=location.source)
    return parse_config(read_object(location.config_path), where=str(location.config_path))


def _stored(location: ModelLocation, weights: WeightsPolicy) -> CheckpointIndex | None:
    if weights == "ignore":
        return None
    folder = None if location.kind == "config" else location.folder
    if folder is not None and (weights == "required" or has_weights(folder)):
        return read_checkpoint(folder)
    if weights == "required":
        raise ModelError(
            f"{location.source} has no weights",
            where=f"model {location.name}",
            rule="sampling needs weights: a snapshot folder",
            remedy="name a snapshot folder, or give --random-weights SEED",
        )
    return None


def _matched(
    stored: CheckpointIndex | None, spec: ModelSpec, config: ParsedConfig, head_is_copy: bool
) -> CheckpointIndex | None:
    if stored is None:
        return None
    return match_checkpoint(
        stored, spec, tie_is_stated=config.tie_is_stated, head_is_copy=head_is_copy
    )


def _known_dtype(
    location: ModelLocation,
    flag: str,
    config: ParsedConfig | None,
    stored: CheckpointIndex | None,
) -> tuple[str, str] | None:
    """(dtype, origin): the flag, else config.json's, else that of most matrix tensors."""
    if flag != "auto":
        return _served(flag, "--dtype"), "flag"
    if config is not None and config.dtype is not None:
        where = f"{location.config_path or location.source}, key dtype"
        return _served(config.dtype, where), CONFIG_SOURCE
    most = majority_dtype(stored) if stored is not None else None
    if most is None:
        return None
    return _served(most, f"{location.source}, most matrix tensors"), MAJORITY_SOURCE


def _no_dtype(location: ModelLocation) -> ModelError:
    return ModelError(
        "the dtype is not stated anywhere",
        where=location.source,
        rule="the flag, else config.json's dtype, else that of most matrix tensors",
        remedy="give --dtype",
    )


def _served(dtype: str, where: str) -> str:
    if dtype not in SERVED_DTYPES:
        raise ModelError(
            f'dtype "{dtype}" is not supported',
            where=where,
            rule=f"dtype is one of {', '.join(SERVED_DTYPES)}",
            remedy="give --dtype",
        )
    return dtype


def _eos(
    steps: _Collector,
    folder: Path | None,
    config: ParsedConfig | None,
    tokenizer: TokenizerFiles,
) -> EosSources:
    """The united end tokens; an empty union is worth a warning, because nothing stops."""
    vocabulary = config.sizes.input_vocab_size if config is not None else None
    generation = steps.run(lambda: _generation_eos(folder, vocabulary)) or ()
    named: tuple[int, ...] = ()
    if vocabulary is not None:
        found = steps.run(lambda: tokenizer_eos(tokenizer, vocabulary))
        named, notes = found or ((), ())
        steps.warnings.extend(notes)
    own = config.eos_token_ids if config is not None else ()
    united = unite(
        [(CONFIG_SOURCE, own), (GENERATION_CONFIG, generation), (TOKENIZER_CONFIG, named)]
    )
    if not united:
        text = "no file names an end token; completions end only by length or stop"
        where = str(folder) if folder else CONFIG_SOURCE
        steps.warnings.append(SpecWarning(code="no_eos", where=where, text=text))
    return united


def _generation_eos(folder: Path | None, input_vocab: int | None) -> tuple[int, ...]:
    path = folder / GENERATION_CONFIG if folder is not None else None
    if path is None or not path.is_file():
        return ()
    reader = ConfigReader(read_object(path), where=str(path))
    ids = ids_of(reader)
    if input_vocab is not None:
        where = reader.place("eos_token_id")
        reader.faults.extend(eos_range_faults(ids, input_vocab, where=where))
    if reader.faults:
        raise ModelError.of(reader.faults)
    return ids


def _tie(
    steps: _Collector, config: ParsedConfig, stored: CheckpointIndex | None
) -> tuple[bool, bool]:
    """(tied, a copy of the embedding is stored as head), after looking at a stored head."""
    if not config.tie_word_embeddings or stored is None:
        return config.tie_word_embeddings, False
    equal = stored_head_equals_embedding(stored)
    if equal is None:
        return True, False
    where = str(stored.folder)
    if equal:
        text = f"{HEAD_NAME} is stored although the head is tied; its bytes are the embedding's"
        steps.warnings.append(SpecWarning(code="tied_head_stored", where=where, text=text))
        return True, True
    text = f"tie_word_embeddings is true but {HEAD_NAME} differs from the embedding; "
    text += f"the head is untied and {HEAD_NAME} is used"
    steps.warnings.append(SpecWarning(code="head_untied", where=where, text=text))
    return False, False


def _spec(
    name: str,
    config: ParsedConfig,
    tie: bool,
    dtype: tuple[str, str],
    eos: EosSources,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        family=config.family.name,
        architecture=config.family.architecture,
        **asdict(config.sizes),
        rms_norm_eps=config.rms_norm_eps,
        rope=config.rope,
        windows=config.windows,
        qk_norm=config.family.qk_norm,
        attention_bias=config.attention_bias,
        o_proj_bias=config.o_proj_bias,
        mlp_bias=config.mlp_bias,
        tie_word_embeddings=tie,
        hidden_act="silu",
        dtype=dtype[0],
        dtype_origin=dtype[1],
        eos_sources=eos,
        bos_token_id=config.bos_token_id,
    )
