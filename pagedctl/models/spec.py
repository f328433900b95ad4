"""ModelSpec: what a dense decoder is, resolved from its files once and read by every command."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod

from pagedctl.models.architecture import TensorSpec, expected_tensors
from pagedctl.models.reader import SpecWarning
from pagedctl.models.rope import RopeSpec
from pagedctl.models.tensor_parallel import local_kv_heads, local_shape, require_tp

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NOT_ARCHITECTURE = frozenset(
    {"name", "dtype", "dtype_origin", "eos_sources", "bos_token_id", "warnings"}
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A dense decoder: sizes, switches of its arithmetic, vocabulary, dtype, end tokens.

    ``input_vocab_size`` bounds token ids and is the embedding's height;
    ``output_vocab_size`` (at most that) is the head's. ``windows`` has one entry per layer:
    None, or the number of keys visible to a token, itself included. ``attention_bias`` is
    about the q, k and v projections. ``dtype`` is the resolved dtype and ``dtype_origin``
    says who set it: "flag", "config.json", or "derived: ...". ``eos_sources`` is the union
    of end tokens, in the order found, each with the files that name it.
    """

    name: str
    family: str
    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    input_vocab_size: int
    output_vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    qk_norm: bool
    attention_bias: bool
    o_proj_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    hidden_act: str
    dtype: str
    dtype_origin: str
    eos_sources: tuple[tuple[int, tuple[str, ...]], ...] = ()
    bos_token_id: int | None = None
    warnings: tuple[SpecWarning, ...] = ()

    @property
    def q_size(self) -> int:
        """Width of the query projection: heads x head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (and of the value) projection: kv heads x head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    @property
    def eos_token_ids(self) -> dict[int, tuple[str, ...]]:
        """End token id -> names of the files that list it, in the order found."""
        return dict(self.eos_sources)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor the model needs, exactly; a tied head is not listed."""
        return expected_tensors(self)

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(tensor.numel for tensor in self.tensors)

    def weight_bytes(self, *, dtype: str | None = None, tp: int = 1) -> int:
        """Bytes of weights that each rank allocates, in *dtype* (default: the model's)."""
        require_tp(self, tp)
        elements = sum(prod(local_shape(self, tensor, tp)) for tensor in self.tensors)
        return elements * DTYPE_BYTES[dtype or self.dtype]

    def kv_bytes_per_token(self, *, dtype: str | None = None, tp: int = 1) -> int:
        """Bytes of keys and values of one token on each rank, all layers."""
        require_tp(self, tp)
        width = local_kv_heads(self, tp) * self.head_dim
        return 2 * self.num_hidden_layers * width * DTYPE_BYTES[dtype or self.dtype]

    @property
    def spec_digest(self) -> str:
        """sha256 over the architecture: not over weights, dtype, end tokens or the name."""
        fields = {key: value for key, value in asdict(self).items() if key not in NOT_ARCHITECTURE}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
