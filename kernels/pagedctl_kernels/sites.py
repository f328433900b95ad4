"""Call-site builders: every fact that an op's orders and leaves read, in one place.

``dtype`` is always the model's dtype D, ``kv_dtype`` that of cached keys and values (None: D).
A switch that names a rounding point (``model`` or ``float32``) is resolved here to the dtype
that is meant, so two settings that are the same arithmetic (``float32`` in a float32 model)
give the same order.
"""

from __future__ import annotations

from pagedctl_kernels.house import LOGPROB_BLOCK
from pagedctl_kernels.leaf import CallSite

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The model dtypes that have an order."""

NORM_CASTS = ("before", "after")
TEMPERATURE_FORMS = ("divide", "multiply")
LOGPROB_FORMS = ("torch", "blockwise", "blockwise-direct")
YARN_DEVICES = ("host", "cpu", "cuda")


def internal_dtype(dtype: str) -> str:
    """A, the dtype that the formulas run in, for a model of dtype D."""
    _one_of("dtype", dtype, DTYPES)
    return "float64" if dtype == "float64" else "float32"


def embedding_site(name: str, *, vocab_size: int, width: int, dtype: str) -> CallSite:
    return CallSite(
        op="embedding",
        name=name,
        dtypes={"w": dtype},
        facts={"vocab_size": vocab_size, "width": width},
    )


def rms_norm_site(
    name: str, *, width: int, eps: float, dtype: str, norm_cast: str = "before"
) -> CallSite:
    return CallSite(
        op="rms_norm",
        name=name,
        dtypes={"x": dtype, "w": dtype},
        facts={
            "width": width,
            "eps": eps,
            "norm_cast": _one_of("norm_cast", norm_cast, NORM_CASTS),
            "internal": internal_dtype(dtype),
        },
    )


def gemm_site(name: str, *, k: int, n: int, dtype: str, bias: bool) -> CallSite:
    return CallSite(
        op="gemm",
        name=name,
        dtypes={"x": dtype, "w": dtype, "y": dtype},
        facts={"k": k, "n": n, "bias": bias, "internal": internal_dtype(dtype)},
    )


def head_site(name: str, *, k: int, n: int, dtype: str, head_dtype: str = "model") -> CallSite:
    internal = internal_dtype(dtype)
    return CallSite(
        op="head",
        name=name,
        dtypes={"x": dtype, "w": dtype, "y": internal},
        facts={
            "k": k,
            "n": n,
            "bias": False,
            "internal": internal,
            "head_dtype": _rounding("head_dtype", head_dtype, dtype),
        },
    )


def qk_norm_rope_write_site(
    name: str,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    dtype: str,
    kv_dtype: str | None = None,
    qk_norm: bool,
    eps: float,
    norm_cast: str = "before",
    rope_table_dtype: str = "float32",
    yarn_ramp_mask_device: str = "host",
    yarn_frequency_device: str = "host",
) -> CallSite:
    """The YaRN devices stay at their defaults for any other rope type."""
    return CallSite(
        op="qk_norm_rope_write",
        name=name,
        dtypes={"x": dtype, "kv": kv_dtype or dtype},
        facts={
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "block_size": block_size,
            "qk_norm": qk_norm,
            "eps": eps,
            "norm_cast": _one_of("norm_cast", norm_cast, NORM_CASTS),
            "rope_table_dtype": _rounding("rope_table_dtype", rope_table_dtype, dtype),
            "rope_table_form": _rope_table_form(yarn_ramp_mask_device, yarn_frequency_device),
            "yarn_ramp_mask_device": yarn_ramp_mask_device,
            "yarn_frequency_device": yarn_frequency_device,
            "internal": internal_dtype(dtype),
        },
    )


def attention_site(
    name: str,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    kv_dtype: str | None = None,
    window: int | None = None,
    softmax_p_dtype: str = "model",
) -> CallSite:
    if q_heads % kv_heads:
        raise ValueError(f"q_heads {q_heads} is not a multiple of kv_heads {kv_heads}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is below 1: a query sees at least its own key")
    return CallSite(
        op="attention",
        name=name,
        dtypes={"x": dtype, "kv": kv_dtype or dtype},
        facts={
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "block_size": block_size,
            "window": window,
            "softmax_p_dtype": _rounding("softmax_p_dtype", softmax_p_dtype, dtype),
            "internal": internal_dtype(dtype),
        },
    )


def silu_mul_site(
    name: str, *, width: int, dtype: str, activation_rounding: str = "model"
) -> CallSite:
    return CallSite(
        op="silu_mul",
        name=name,
        dtypes={"x": dtype},
        facts={
            "width": width,
            "activation_rounding": _rounding("activation_rounding", activation_rounding, dtype),
            "internal": internal_dtype(dtype),
        },
    )


def block_sumexp_site(name: str, *, dtype: str, block_size: int = LOGPROB_BLOCK) -> CallSite:
    if block_size < 1:
        raise ValueError(f"block_size {block_size} is below 1")
    internal = internal_dtype(dtype)
    return CallSite(
        op="block_sumexp",
        name=name,
        dtypes={"x": internal},
        facts={"block_size": block_size, "internal": internal},
    )


def logprob_site(
    name: str,
    *,
    dtype: str,
    form: str = "torch",
    block_size: int = LOGPROB_BLOCK,
    temperature_form: str = "divide",
) -> CallSite:
    internal = internal_dtype(dtype)
    return CallSite(
        op="logprob",
        name=name,
        dtypes={"x": internal},
        facts={
            "form": _one_of("form", form, LOGPROB_FORMS),
            "block_size": block_size,
            "temperature_form": _one_of("temperature_form", temperature_form, TEMPERATURE_FORMS),
            "internal": internal,
        },
    )


def logit_edits_site(name: str, *, dtype: str) -> CallSite:
    internal = internal_dtype(dtype)
    return CallSite(
        op="logit_edits", name=name, dtypes={"x": internal}, facts={"internal": internal}
    )


def sample_site(name: str, *, dtype: str, temperature_form: str = "divide") -> CallSite:
    internal = internal_dtype(dtype)
    return CallSite(
        op="sample",
        name=name,
        dtypes={"x": internal},
        facts={
            "temperature_form": _one_of("temperature_form", temperature_form, TEMPERATURE_FORMS),
            "internal": internal,
        },
    )


def _rounding(switch: str, value: str, dtype: str) -> str:
    """The dtype that ``model`` (D) or ``float32`` (A: the value is not narrowed) stands for."""
    _one_of(switch, value, ("model", "float32"))
    return dtype if value == "model" else internal_dtype(dtype)


def _rope_table_form(ramp: str, frequency: str) -> str:
    """How the table is computed before it is rounded, as its order says it."""
    _one_of("yarn_ramp_mask_device", ramp, YARN_DEVICES)
    _one_of("yarn_frequency_device", frequency, YARN_DEVICES)
    if ramp == frequency == "host":
        return "float64 on the host"
    places = {"host": "float64 on the host", "cpu": "float32 on cpu", "cuda": "float32 on cuda"}
    return f"YaRN ramp {places[ramp]}, frequencies, angles, cos and sin {places[frequency]}"


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    return value
