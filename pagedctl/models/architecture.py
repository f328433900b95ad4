"""Model families as data, and the exact set of tensors that a model of each family needs.

Tensor names and shapes are those of Hugging Face checkpoints: a projection's weight is
[out_features, in_features], the embedding is [input_vocab_size, hidden_size].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagedctl.models.spec import ModelSpec

Role = Literal[
    "embed_tokens",
    "input_layernorm",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_norm",
    "k_norm",
    "post_attention_layernorm",
    "gate_proj",
    "up_proj",
    "down_proj",
    "norm",
    "lm_head",
]
Shard = Literal["rows", "columns", "replicated"]
WindowRule = Literal["none", "all_layers", "late_layers"]

HEAD_NAME = "lm_head.weight"
EMBEDDING_NAME = "model.embed_tokens.weight"
RECOMPUTED_BUFFER = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", flags=re.ASCII
)
ROW_ROLES = frozenset(
    {"embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
)
COLUMN_ROLES = frozenset({"o_proj", "down_proj"})


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``: what its code does without asking config.json, and its defaults.

    ``qkv_bias`` and ``o_bias``: True or False if fixed, None if ``attention_bias`` decides.
    ``mlp_bias``: False if fixed, None if the key of that name decides. ``windows``: no
    layer, every layer that a non-null sliding_window names, or the layers from
    max_window_layers on if use_sliding_window is true.
    """

    name: str
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    windows: WindowRule = "none"
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int
    tie_word_embeddings: bool = False


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="llama",
            architecture="LlamaForCausalLM",
            qkv_bias=None,
            o_bias=None,
            mlp_bias=None,
            max_position_embeddings=2048,
        ),
        Family(
            name="mistral",
            architecture="MistralForCausalLM",
            windows="all_layers",
            max_position_embeddings=131_072,
        ),
        Family(
            name="qwen2",
            architecture="Qwen2ForCausalLM",
            qkv_bias=True,
            windows="late_layers",
            max_position_embeddings=32_768,
        ),
        Family(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            qk_norm=True,
            qkv_bias=None,
            o_bias=None,
            windows="late_layers",
            max_position_embeddings=32_768,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor that the model needs, named and shaped as the checkpoint stores it.

    ``shard`` is the tensor-parallel rule of the row layout: rows (axis 0) or columns
    (axis 1) are split over ranks, or every rank holds all of it. The bias of a
    column-split projection is replicated, because it is added once, after the sum over
    ranks. ``layer`` is None outside the layers.
    """

    name: str
    role: Role
    part: Literal["weight", "bias"]
    layer: int | None
    shape: tuple[int, ...]
    shard: Shard

    @property
    def numel(self) -> int:
        return self.shape[0] if len(self.shape) == 1 else self.shape[0] * self.shape[1]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2


def expected_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Every tensor that the model needs, exactly: embedding, layers in order, norm, head.

    A tied head is the embedding and is not listed.
    """
    tensors = [_weight("model.embed_tokens", "embed_tokens", None, spec)]
    for layer in range(spec.num_hidden_layers):
        tensors.extend(_layer_tensors(spec, layer))
    tensors.append(_weight("model.norm", "norm", None, spec))
    if not spec.tie_word_embeddings:
        tensors.append(_weight("lm_head", "lm_head", None, spec))
    return tuple(tensors)


def _layer_tensors(spec: ModelSpec, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer}"
    yield _weight(f"{prefix}.input_layernorm", "input_layernorm", layer, spec)
    attention: tuple[tuple[Role, bool], ...] = (
        ("q_proj", spec.attention_bias),
        ("k_proj", spec.attention_bias),
        ("v_proj", spec.attention_bias),
        ("o_proj", spec.o_proj_bias),
    )
    for role, has_bias in attention:
        yield from _projection(f"{prefix}.self_attn.{role}", role, layer, spec, has_bias)
    if spec.qk_norm:
        yield _weight(f"{prefix}.self_attn.q_norm", "q_norm", layer, spec)
        yield _weight(f"{prefix}.self_attn.k_norm", "k_norm", layer, spec)
    name = f"{prefix}.post_attention_layernorm"
    yield _weight(name, "post_attention_layernorm", layer, spec)
    mlp: tuple[Role, ...] = ("gate_proj", "up_proj", "down_proj")
    for role in mlp:
        yield from _projection(f"{prefix}.mlp.{role}", role, layer, spec, spec.mlp_bias)


def _projection(
    module: str, role: Role, layer: int, spec: ModelSpec, has_bias: bool
) -> Iterator[TensorSpec]:
    weight = _weight(module, role, layer, spec)
    yield weight
    if has_bias:
        yield TensorSpec(
            name=f"{module}.bias",
            role=role,
            part="bias",
            layer=layer,
            shape=weight.shape[:1],
            shard="rows" if weight.shard == "rows" else "replicated",
        )


def _weight(module: str, role: Role, layer: int | None, spec: ModelSpec) -> TensorSpec:
    return TensorSpec(
        name=f"{module}.weight",
        role=role,
        part="weight",
        layer=layer,
        shape=weight_shape(spec, role),
        shard=_shard_rule(role),
    )


def _shard_rule(role: Role) -> Shard:
    if role in ROW_ROLES:
        return "rows"
    return "columns" if role in COLUMN_ROLES else "replicated"


def weight_shape(spec: ModelSpec, role: Role) -> tuple[int, ...]:
    """The stored shape of a role's weight; matrices are [out_features, in_features]."""
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    shapes: dict[Role, tuple[int, ...]] = {
        "embed_tokens": (spec.input_vocab_size, hidden),
        "q_proj": (spec.q_size, hidden),
        "k_proj": (spec.kv_size, hidden),
        "v_proj": (spec.kv_size, hidden),
        "o_proj": (hidden, spec.q_size),
        "q_norm": (spec.head_dim,),
        "k_norm": (spec.head_dim,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
        "lm_head": (spec.output_vocab_size, hidden),
    }
    return shapes.get(role, (hidden,))


def shape_formula(spec: ModelSpec, role: Role) -> str:
    """How config.json gives the rows (o_proj, down_proj: columns) of a role, for messages."""
    heads = f"num_attention_heads {spec.num_attention_heads} x head_dim {spec.head_dim}"
    kv_heads = f"num_key_value_heads {spec.num_key_value_heads} x head_dim {spec.head_dim}"
    intermediate = f"intermediate_size {spec.intermediate_size}"
    formulas: dict[Role, str] = {
        "embed_tokens": f"vocab_size {spec.input_vocab_size}",
        "q_proj": f"{heads} = {spec.q_size} rows",
        "k_proj": f"{kv_heads} = {spec.kv_size} rows",
        "v_proj": f"{kv_heads} = {spec.kv_size} rows",
        "o_proj": f"{heads} = {spec.q_size} columns",
        "q_norm": f"head_dim {spec.head_dim}",
        "k_norm": f"head_dim {spec.head_dim}",
        "gate_proj": f"{intermediate} rows",
        "up_proj": f"{intermediate} rows",
        "down_proj": f"{intermediate} columns",
        "lm_head": f"output vocabulary {spec.output_vocab_size}",
    }
    return formulas.get(role, f"hidden_size {spec.hidden_size}")
