"""config.json, in the spellings of transformers 4 and 5, to the fields of a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagedctl.errors import Fault, ModelError, nearest
from pagedctl.models.architecture import FAMILIES, Family
from pagedctl.models.config_keys import check_keys
from pagedctl.models.eos import ids_of
from pagedctl.models.reader import ConfigReader, SpecWarning, shown
from pagedctl.models.rope import RopeSpec
from pagedctl.models.rope_config import resolve_rope
from pagedctl.models.windows import resolve_windows

MAX_LAYERS = 10_000
SERVED_DTYPES = ("float32", "bfloat16", "float16")
SERVED_ACTIVATIONS = frozenset({"silu", "swish"})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The integers of the architecture; see ModelSpec for their meaning."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    input_vocab_size: int
    output_vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ParsedConfig:
    """All that config.json alone says. ``dtype`` is None where it says nothing.

    ``tie_is_stated``: tie_word_embeddings stands in the file, rather than being the
    family's default. ``eos_token_ids`` are its own, not yet united with other files.
    """

    family: Family
    sizes: Sizes
    rope: RopeSpec
    windows: tuple[int | None, ...]
    attention_bias: bool
    o_proj_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    tie_is_stated: bool
    rms_norm_eps: float
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    warnings: tuple[SpecWarning, ...]


def parse_config(config: Mapping[str, object], *, where: str = "config.json") -> ParsedConfig:
    """Resolve *config* (config.json's object, or ``to_dict()`` of a transformers config).

    Raises :class:`ModelError` with every fault found.
    """
    reader = ConfigReader(config, where=where)
    family = _family(reader)
    check_keys(reader)
    _check_activation(reader)
    dtype = _dtype(reader)
    eos = ids_of(reader)
    sizes = _sizes(reader, family)
    if family is None or sizes is None:
        raise ModelError.of(reader.faults)
    rope = resolve_rope(
        reader,
        family=family,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.max_position_embeddings,
    )
    windows = resolve_windows(reader, family=family, layers=sizes.num_hidden_layers)
    tie = _flag(reader, "tie_word_embeddings", family.tie_word_embeddings)
    attention_bias = _bias(reader, "attention_bias", family.qkv_bias, family)
    o_proj_bias = attention_bias if family.o_bias is None else family.o_bias
    mlp_bias = _bias(reader, "mlp_bias", family.mlp_bias, family)
    eps = _epsilon(reader, family)
    _check_tie(reader, tie, sizes)
    bos = _bos(reader, sizes.input_vocab_size)
    _check_eos(reader, eos, sizes.input_vocab_size)
    if reader.faults or rope is None or windows is None:
        raise ModelError.of(reader.faults)
    return ParsedConfig(
        family=family,
        sizes=sizes,
        rope=rope,
        windows=windows,
        attention_bias=attention_bias,
        o_proj_bias=o_proj_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=tie,
        tie_is_stated=reader.has("tie_word_embeddings"),
        rms_norm_eps=eps,
        dtype=dtype,
        eos_token_ids=eos,
        bos_token_id=bos,
        warnings=tuple(reader.warnings),
    )


def _family(reader: ConfigReader) -> Family | None:
    """The family of model_type; ``architectures``, where given, must name its class."""
    model_type = reader.text("model_type")
    classes = reader.texts("architectures") or ()
    by_class = {family.architecture: family for family in FAMILIES.values()}
    if model_type is None:
        if reader.has("model_type"):
            return None
        known = [by_class[name] for name in classes if name in by_class]
        if len(known) == 1:
            return known[0]
        reader.fault(
            "model_type",
            "model_type is missing",
            f"model_type is one of {', '.join(FAMILIES)}",
            "add model_type",
        )
        return None
    family = FAMILIES.get(model_type)
    if family is None:
        close = nearest(model_type, FAMILIES)
        reader.fault(
            "model_type",
            f'model_type "{model_type}" is not supported',
            f"model_type is one of {', '.join(FAMILIES)}",
            f"use a model of one of these families{f' (nearest: {close})' if close else ''}",
        )
        return None
    if classes and family.architecture not in classes:
        reader.fault(
            "architectures",
            f'architectures {", ".join(classes)} do not go with model_type "{model_type}"',
            f"a {model_type} model is a {family.architecture}",
            "use the causal language model checkpoint of this family",
        )
    return family


def _check_activation(reader: ConfigReader) -> None:
    if not reader.has("hidden_act") and not reader.has("hidden_activation"):
        reader.warn("default_applied", "hidden_act", "hidden_act is absent; silu is used")
    for key in ("hidden_act", "hidden_activation"):
        name = reader.text(key)
        if name is not None and name not in SERVED_ACTIVATIONS:
            reader.fault(
                key,
                f'{key} "{name}" is not supported',
                f"{key} is silu (also spelled swish)",
                "use a model with this activation",
            )


def _dtype(reader: ConfigReader) -> str | None:
    """The dtype that the file states under either key, without a "torch." prefix."""
    stated = {
        key: value.removeprefix("torch.")
        for key in ("dtype", "torch_dtype")
        if (value := reader.text(key)) is not None
    }
    if len(set(stated.values())) > 1:
        reader.fault(
            "dtype",
            f"dtype is {stated['dtype']} but torch_dtype is {stated['torch_dtype']}",
            "the two keys are one setting",
            "remove the wrong one",
        )
        return None
    return next(iter(stated.values()), None)


def _sizes(reader: ConfigReader, family: Family | None) -> Sizes | None:
    hidden = reader.required("hidden_size")
    layers = reader.required("num_hidden_layers", high=MAX_LAYERS)
    heads = reader.required("num_attention_heads")
    intermediate = reader.required("intermediate_size")
    kv_heads = _kv_heads(reader, heads, family)
    head_dim = _head_dim(reader, hidden, heads, family)
    input_vocab, output_vocab = _vocabularies(reader)
    positions = _positions(reader, family)
    if (
        hidden is None
        or layers is None
        or heads is None
        or intermediate is None
        or kv_heads is None
        or head_dim is None
        or input_vocab is None
        or output_vocab is None
        or positions is None
    ):
        return None
    return Sizes(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        input_vocab_size=input_vocab,
        output_vocab_size=output_vocab,
        max_position_embeddings=positions,
    )


def _kv_heads(reader: ConfigReader, heads: int | None, family: Family | None) -> int | None:
    """Absent: one kv head per head, which only the oldest llama files leave unsaid."""
    key = "num_key_value_heads"
    if not reader.has(key):
        if heads is not None and family is not None and family.name != "llama":
            reader.warn(
                "default_applied",
                key,
                f"{key} is absent; num_attention_heads {heads} is used",
            )
        return heads
    kv_heads = reader.integer(key)
    if kv_heads is not None and heads is not None and heads % kv_heads:
        reader.fault(
            key,
            f"num_attention_heads {heads} is not a multiple of {key} {kv_heads}",
            "every kv head serves the same number of heads",
            "correct the two values",
        )
    return kv_heads


def _head_dim(
    reader: ConfigReader, hidden: int | None, heads: int | None, family: Family | None
) -> int | None:
    """An explicit head_dim wins; else hidden_size / num_attention_heads, which must divide."""
    if reader.has("head_dim"):
        return reader.integer("head_dim")
    if hidden is None or heads is None:
        return None
    if hidden % heads:
        reader.fault(
            "head_dim",
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
            "without head_dim the heads share hidden_size evenly",
            "add head_dim, or correct the two values",
        )
        return None
    if family is not None and family.qk_norm:
        reader.warn(
            "default_applied",
            "head_dim",
            f"head_dim is absent; hidden_size / num_attention_heads = {hidden // heads} is used",
        )
    return hidden // heads


def _vocabularies(reader: ConfigReader) -> tuple[int | None, int | None]:
    """(input, output): vocab_size is the embedding's height, output_vocab_size the head's."""
    input_vocab = reader.required("vocab_size")
    if not reader.has("output_vocab_size"):
        return input_vocab, input_vocab
    output_vocab = reader.integer("output_vocab_size")
    if input_vocab is not None and output_vocab is not None and output_vocab > input_vocab:
        reader.fault(
            "output_vocab_size",
            f"input_vocab_size is {input_vocab} and output_vocab_size is {output_vocab}",
            "output_vocab_size <= input_vocab_size (the key vocab_size), "
            "because a sampled token is the next input",
            "correct vocab_size or output_vocab_size",
        )
    return input_vocab, output_vocab


def _positions(reader: ConfigReader, family: Family | None) -> int | None:
    key = "max_position_embeddings"
    if reader.has(key) or family is None:
        return reader.integer(key)
    default = family.max_position_embeddings
    reader.warn(
        "default_applied", key, f"{key} is absent; the {family.name} default {default} is used"
    )
    return default


def _epsilon(reader: ConfigReader, family: Family) -> float:
    value = reader.number("rms_norm_eps", low=0.0, low_is_legal=False)
    if value is not None:
        return value
    if not reader.has("rms_norm_eps"):
        reader.warn(
            "default_applied",
            "rms_norm_eps",
            f"rms_norm_eps is absent; the {family.name} default {family.rms_norm_eps:g} is used",
        )
    return family.rms_norm_eps


def _flag(reader: ConfigReader, key: str, default: bool) -> bool:
    """A bool of config.json; the family's default, stated in a warning, if it is absent."""
    value = reader.boolean(key)
    if value is not None:
        return value
    if not reader.has(key):
        reader.warn(
            "default_applied", key, f"{key} is absent; the family default {shown(default)} is used"
        )
    return default


def _bias(reader: ConfigReader, key: str, fixed: bool | None, family: Family) -> bool:
    """Whether the biases exist: what the family fixes, else what the key says (false)."""
    stated = reader.boolean(key)
    if fixed is None:
        return stated is True
    if stated is not None and stated is not fixed:
        reader.fault(
            key,
            f"{key} is {shown(stated)} for {family.name}",
            f"{family.architecture} always has {key} {shown(fixed)}",
            f"remove {key}, or correct model_type",
        )
    return fixed


def _check_tie(reader: ConfigReader, tie: bool, sizes: Sizes) -> None:
    if tie and sizes.input_vocab_size != sizes.output_vocab_size:
        reader.fault(
            "tie_word_embeddings",
            f"the head is tied but input_vocab_size is {sizes.input_vocab_size} and "
            f"output_vocab_size is {sizes.output_vocab_size}",
            "a tied head has as many rows as the embedding",
            "untie the head, or remove output_vocab_size",
        )


def _bos(reader: ConfigReader, input_vocab: int) -> int | None:
    bos = reader.integer("bos_token_id", low=0)
    if bos is None or bos < input_vocab:
        return bos
    reader.warn(
        "bos_outside_vocabulary",
        "bos_token_id",
        f"bos_token_id {bos} is outside the vocabulary of {input_vocab}; it is ignored",
    )
    return None


def _check_eos(reader: ConfigReader, ids: tuple[int, ...], input_vocab: int) -> None:
    reader.faults.extend(eos_range_faults(ids, input_vocab, where=reader.place("eos_token_id")))


def eos_range_faults(ids: tuple[int, ...], input_vocab: int, *, where: str) -> list[Fault]:
    """One fault for each end token that no prompt or output could ever hold."""
    return [
        Fault(
            what=f"eos_token_id {token} is outside the vocabulary of {input_vocab}",
            where=where,
            rule="0 <= eos_token_id < vocab_size",
            remedy="correct eos_token_id or vocab_size",
        )
        for token in ids
        if token >= input_vocab
    ]
