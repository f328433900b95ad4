"""The house orders: the table of ``docs/arithmetic.md`` as data, one column per device class.

Leaves take their order from here; nothing else in the package spells one out. A term is
changed only together with that page, with a measurement, since it changes ``arithmetic_id``
and with it every record, dump and cached prefix.

Placeholders are facts of the call site (``k``, ``x_dtype``, ``internal``, ...) or, in the CPU
column, of the machine (``library``, ``isa``, ``threads``).
"""

from __future__ import annotations

from pagedctl_kernels.order import OrderTemplate

CPU = "cpu"
HOPPER = "sm_90"

SPLIT_TOKENS = 256
"""Keys per attention split; splits are aligned to position 0."""

TILE_KEYS = 64
"""Keys per attention tile; a split holds four."""

GROUP_VALUES = 8
"""Neighbours that a GPU's sum of squares adds first: those that one thread holds."""

CPU_ROW_BLOCK = 16
"""Rows of every matrix product on the CPU: the one block shape that a BLAS ever sees."""

LOGPROB_BLOCK = 32768
"""Default width of a sum-exp block, in vocabulary columns."""

SUMEXP_CHUNK = 8192
"""Columns of a sum-exp block that one program of a GPU sums."""

_CPU_PRODUCT = (
    ("library", "{library}"),
    ("isa", "{isa}"),
    ("threads", "{threads}"),
)
_CPU_TRANSCENDENTAL = (("transcendental", "exp and log of {library}, {isa}"),)


def _template(op: str, device_class: str, *terms: tuple[str, str]) -> OrderTemplate:
    return OrderTemplate(op=op, device_class=device_class, terms=terms)


EMBEDDING_CPU = _template("embedding", CPU, ("copy", "{w_dtype} rows, no arithmetic"))
EMBEDDING_HOPPER = _template("embedding", HOPPER, ("copy", "{w_dtype} rows, no arithmetic"))

GEMM_CPU = _template(
    "gemm",
    CPU,
    ("inputs", "{x_dtype} widened to {internal}"),
    ("chain", "library product of [16, {k}] x [{k}, N], rows zero-padded"),
    ("segments", "1"),
    ("bias", "added to the {internal} sum"),
    ("output", "rounded once to {y_dtype}"),
    *_CPU_PRODUCT,
)
GEMM_CPU_PACKED = _template(
    "gemm",
    CPU,
    ("inputs", "{x_dtype} widened to {internal}"),
    ("chain", "oneDNN product of [16, {k}] x [{k}, N], packed weights, rows zero-padded"),
    ("heights", "16, and those proved equal on this machine"),
    ("segments", "1"),
    ("bias", "added to the {internal} sum"),
    ("output", "rounded once to {y_dtype}"),
    *_CPU_PRODUCT,
)
GEMM_CPU_BFLOAT16 = _template(
    "gemm",
    CPU,
    ("inputs", "bfloat16"),
    ("chain", "oneDNN product of [16, {k}] x [{k}, N], packed weights, rows zero-padded"),
    ("heights", "16, and those proved equal on this machine"),
    ("subnormals", "as the library's bfloat16 instructions treat them"),
    ("segments", "1"),
    ("output", "rounded once to bfloat16"),
    *_CPU_PRODUCT,
)
GEMM_CPU_PER_ROW = _template(
    "gemm",
    CPU,
    ("inputs", "{x_dtype} widened to {internal}"),
    ("chain", "library product of [1, {k}] x [{k}, N], operands on cache lines"),
    ("segments", "1"),
    ("bias", "added to the {internal} sum"),
    ("output", "rounded once to {y_dtype}"),
    *_CPU_PRODUCT,
)
GEMM_CPU_LIBRARY = _template(
    "gemm",
    CPU,
    ("inputs", "{x_dtype}"),
    ("chain", "the library's, over K = {k}, which follows the batch"),
    ("output", "{y_dtype}"),
    *_CPU_PRODUCT,
)
GEMM_HOPPER = _template(
    "gemm",
    HOPPER,
    ("inputs", "{x_dtype}"),
    ("chain", "k = 0..{k} ascending, one fp32 accumulator, tensor-core products"),
    ("segments", "1"),
    ("bias", "added to the fp32 sum"),
    ("output", "rounded once to {y_dtype}"),
)
_FMA_CHAIN = (
    ("inputs", "{x_dtype} widened to float32"),
    ("chain", "k = 0..{k} ascending in steps of 32, zero-padded; one float32 accumulator, fma"),
    ("segments", "1"),
)
GEMM_HOPPER_FLOAT32 = _template(
    "gemm",
    HOPPER,
    *_FMA_CHAIN,
    ("bias", "added to the float32 sum"),
    ("output", "rounded once to {y_dtype}"),
)
GEMM_HOPPER_LIBRARY = _template(
    "gemm",
    HOPPER,
    ("inputs", "{x_dtype}"),
    ("chain", "cuBLAS's, over K = {k}, which follows the batch"),
    ("output", "{y_dtype}"),
)

HEAD_CPU = _template(
    "head",
    CPU,
    ("inputs", "{x_dtype} widened to {internal}"),
    ("chain", "library product of [16, {k}] x [{k}, N], rows zero-padded"),
    ("segments", "1"),
    ("output", "{internal}, never rounded to the model's dtype"),
    ("head_dtype", "{head_dtype}"),
    *_CPU_PRODUCT,
)
HEAD_CPU_PACKED = _template(
    "head",
    CPU,
    ("inputs", "{x_dtype} widened to {internal}"),
    ("chain", "oneDNN product of [16, {k}] x [{k}, N], packed weights, rows zero-padded"),
    ("heights", "16, and those proved equal on this machine"),
    ("segments", "1"),
    ("output", "{internal}, never rounded to the model's dtype"),
    ("head_dtype", "{head_dtype}"),
    *_CPU_PRODUCT,
)
HEAD_CPU_PER_ROW = _template(
    "head",
    CPU,
    ("inputs", "{x_dtype} widened to {internal}"),
    ("chain", "library product of [1, {k}] x [{k}, N], operands on cache lines"),
    ("segments", "1"),
    ("output", "{internal}, never rounded to the model's dtype"),
    ("head_dtype", "{head_dtype}"),
    *_CPU_PRODUCT,
)
HEAD_CPU_LIBRARY = _template(
    "head",
    CPU,
    ("inputs", "{x_dtype} widened to {internal}"),
    ("chain", "the library's, over K = {k}, which follows the batch"),
    ("output", "{internal}, never rounded to the model's dtype"),
    ("head_dtype", "{head_dtype}"),
    *_CPU_PRODUCT,
)
HEAD_HOPPER = _template(
    "head",
    HOPPER,
    ("inputs", "{x_dtype}"),
    ("chain", "k = 0..{k} ascending, one fp32 accumulator, tensor-core products"),
    ("segments", "1"),
    ("output", "float32, never rounded to the model's dtype"),
    ("head_dtype", "{head_dtype}"),
)
HEAD_HOPPER_FLOAT32 = _template(
    "head",
    HOPPER,
    *_FMA_CHAIN,
    ("output", "float32, never rounded to the model's dtype"),
    ("head_dtype", "{head_dtype}"),
)
HEAD_HOPPER_LIBRARY = _template(
    "head",
    HOPPER,
    ("inputs", "{x_dtype}"),
    ("chain", "cuBLAS's, over K = {k}, which follows the batch"),
    ("output", "float32, never rounded to the model's dtype"),
    ("head_dtype", "{head_dtype}"),
)

_GROUPED_TREE = f"halving trees over {GROUP_VALUES} neighbours of {{}} squares, then over the sums"

_NORM_TERMS = (
    ("residual", "sum rounded to {x_dtype} before the norm reads it"),
    ("mean", "sum of squares / {width}, one division"),
    ("rstd", "1 / sqrt(mean + eps), both correctly rounded"),
    ("norm_cast", "{norm_cast} the weight"),
    ("output", "rounded to {x_dtype}"),
)
RMS_NORM_CPU = _template(
    "rms_norm",
    CPU,
    ("internal", "{internal}"),
    ("sum", "halving tree over {width} squares"),
    *_NORM_TERMS,
)
RMS_NORM_HOPPER = _template(
    "rms_norm",
    HOPPER,
    ("internal", "float32"),
    ("sum", _GROUPED_TREE.format("{width}")),
    *_NORM_TERMS,
)

_ROPE_TERMS = (
    ("qk_norm", "{qk_norm}"),
    ("rope_table", "{rope_table_form}, rounded once to {rope_table_dtype}"),
    ("rope", "four products and two sums, each rounded to {internal}, half-split pairs"),
    ("output", "rounded once to {x_dtype}; the cache holds {kv_dtype}"),
)
QK_ROPE_CPU = _template(
    "qk_norm_rope_write",
    CPU,
    ("internal", "{internal}"),
    ("sum", "halving tree over {head_dim} squares"),
    ("norm_cast", "{norm_cast} the weight"),
    *_ROPE_TERMS,
)
QK_ROPE_HOPPER = _template(
    "qk_norm_rope_write",
    HOPPER,
    ("internal", "{internal}"),
    ("sum", _GROUPED_TREE.format("{head_dim}")),
    ("norm_cast", "{norm_cast} the weight"),
    *_ROPE_TERMS,
)

_ATTENTION_TERMS = (
    ("cache", "{kv_dtype} keys and values, widened exactly"),
    ("splits", "256 keys, aligned to position 0, merged left to right"),
    ("tiles", "64 keys, running maximum, sum and accumulator within a split"),
    ("scores", "product times fl(scale * log2 e), one rounding to {internal}"),
    ("exponential", "exp2 of the difference to the running maximum"),
    ("p_dtype", "{softmax_p_dtype}"),
    ("merge", "both sides scaled by exp2, products rounded, then one sum"),
    ("output", "accumulator / sum, rounded once to {x_dtype}"),
)
ATTENTION_CPU = _template(
    "attention",
    CPU,
    ("internal", "{internal}"),
    ("products", "library products of 16 query rows with 64-key tiles, head_dim {head_dim}"),
    ("row_sum", "halving tree over the 64 rounded probabilities"),
    *_ATTENTION_TERMS,
    ("transcendental", "exp2(x) as exp(fl(x * ln 2)) of {library}, {isa}"),
    *_CPU_PRODUCT,
)
ATTENTION_HOPPER = _template(
    "attention",
    HOPPER,
    ("internal", "float32"),
    (
        "products",
        "chains over head_dim {head_dim} and the 64 keys of a tile: tensor cores, fma in float32",
    ),
    ("row_sum", "dot of the rounded probabilities with ones"),
    ("accumulation", "products of a tile are added to the rescaled sum and accumulator"),
    *_ATTENTION_TERMS,
    ("transcendental", "ex2.approx.ftz"),
)

_SILU_TERMS = (
    ("silu", "g / (1 + exp(-g)) in {internal}"),
    ("activation_rounding", "{activation_rounding}"),
    ("product", "times up, rounded once to {x_dtype}"),
)
SILU_MUL_CPU = _template("silu_mul", CPU, *_SILU_TERMS, *_CPU_TRANSCENDENTAL)
SILU_MUL_HOPPER = _template(
    "silu_mul", HOPPER, *_SILU_TERMS, ("transcendental", "ex2.approx of fl(x * log2 e)")
)

BLOCK_SUMEXP_CPU = _template(
    "block_sumexp",
    CPU,
    ("block", "{block_size} columns, missing columns add exact zeros"),
    ("sum", "halving tree over the block, {internal}"),
    *_CPU_TRANSCENDENTAL,
)
BLOCK_SUMEXP_HOPPER = _template(
    "block_sumexp",
    HOPPER,
    ("block", "{block_size} columns, missing columns add exact zeros"),
    ("sum", f"halving tree over chunks of {SUMEXP_CHUNK} columns, then left to right, float32"),
    ("transcendental", "ex2.approx of fl(x * log2 e)"),
)

_LOGPROB_TERMS = (
    ("temperature", "{temperature_form} in {internal}"),
    ("form", "{form}"),
    ("fold", "sums of {block_size}-column blocks, left to right in {internal}"),
)
LOGPROB_CPU = _template("logprob", CPU, *_LOGPROB_TERMS, *_CPU_TRANSCENDENTAL)
LOGPROB_HOPPER = _template(
    "logprob", HOPPER, *_LOGPROB_TERMS, ("transcendental", "LN, the written polynomial")
)

_EDIT_TERMS = (
    ("order", "allowed ids and bias, repetition, frequency, presence, barred ids; in {internal}"),
    ("removal", "-infinity is added"),
    ("bias", "one sum"),
    ("repetition", "one quotient above zero, one product elsewhere, tokens of prompt and output"),
    ("penalties", "count * frequency rounded, subtracted; presence subtracted, tokens of output"),
)
LOGIT_EDITS_CPU = _template("logit_edits", CPU, *_EDIT_TERMS)
LOGIT_EDITS_HOPPER = _template("logit_edits", HOPPER, *_EDIT_TERMS)

_SAMPLE_TERMS = (
    ("temperature", "{temperature_form} in {internal}"),
    ("order", "temperature, top_k, top_p, min_p; ties to the lowest id"),
    ("mass", "int64 fixed point, 2^40 of the largest"),
    ("noise", "philox4x32-10, Gumbel by the written float32 polynomial"),
)
SAMPLE_CPU = _template("sample", CPU, *_SAMPLE_TERMS, *_CPU_TRANSCENDENTAL)
SAMPLE_HOPPER = _template(
    "sample", HOPPER, *_SAMPLE_TERMS, ("transcendental", "ex2.approx of fl(x * log2 e)")
)

TABLE: tuple[OrderTemplate, ...] = (
    EMBEDDING_CPU,
    EMBEDDING_HOPPER,
    RMS_NORM_CPU,
    RMS_NORM_HOPPER,
    GEMM_CPU,
    GEMM_HOPPER,
    QK_ROPE_CPU,
    QK_ROPE_HOPPER,
    ATTENTION_CPU,
    ATTENTION_HOPPER,
    SILU_MUL_CPU,
    SILU_MUL_HOPPER,
    HEAD_CPU,
    HEAD_HOPPER,
    BLOCK_SUMEXP_CPU,
    BLOCK_SUMEXP_HOPPER,
    LOGPROB_CPU,
    LOGPROB_HOPPER,
    LOGIT_EDITS_CPU,
    LOGIT_EDITS_HOPPER,
    SAMPLE_CPU,
    SAMPLE_HOPPER,
)

OTHER_ORDERS: tuple[OrderTemplate, ...] = (
    GEMM_CPU_PACKED,
    GEMM_CPU_BFLOAT16,
    GEMM_CPU_PER_ROW,
    GEMM_CPU_LIBRARY,
    HEAD_CPU_PACKED,
    HEAD_CPU_PER_ROW,
    HEAD_CPU_LIBRARY,
    GEMM_HOPPER_FLOAT32,
    GEMM_HOPPER_LIBRARY,
    HEAD_HOPPER_FLOAT32,
    HEAD_HOPPER_LIBRARY,
)
"""Orders of leaves beside the house's: for other operands, for an unfit library, and ``fast``."""
