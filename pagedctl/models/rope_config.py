"""The rope keys of a config.json resolved to one :class:`RopeSpec`.

A value may stand inside the rope block and at the top level, as long as both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pagedctl.models.architecture import Family
from pagedctl.models.reader import ConfigReader, same_number, shown
from pagedctl.models.rope import YARN_BETA_FAST, YARN_BETA_SLOW, RopeSpec, RopeType
from pagedctl.models.rope_block import merged_block, two_values

COMMON_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor"})
LEGACY_KEYS = frozenset({"rotary_dim"})
TYPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
}
# Keys that a block may hold without entering its type's formula, and the values allowed
# (None: any). "finetuned" is a note in early YaRN releases.
INERT_KEYS: Mapping[str, object] = {
    "finetuned": None,
    "original_max_position_embeddings": None,
    "factor": 1.0,
    "attention_factor": 1.0,
}
ROUNDING_SLACK = 1e-9


def resolve_rope(
    reader: ConfigReader, *, family: Family, head_dim: int, max_position_embeddings: int
) -> RopeSpec | None:
    """The model's rope, or None after recording why it has none."""
    already_broken = len(reader.faults)
    block, label = merged_block(reader)
    inner = reader.child(block, label)
    kind = _rope_type(inner)
    theta = _theta(reader, inner, family)
    rotary_dim = _rotary_dim(reader, inner, head_dim)
    if kind is None or theta is None or rotary_dim is None:
        return None
    _refuse_strangers(inner, kind)
    _warn_partial(reader, inner, rotary_dim, head_dim, family)
    rope = _of_type(reader, inner, kind, theta, rotary_dim, max_position_embeddings)
    return rope if len(reader.faults) == already_broken else None


def _rope_type(inner: ConfigReader) -> RopeType | None:
    kind = inner.text("rope_type")
    if kind is None:
        return None if inner.has("rope_type") else "default"
    if kind not in TYPE_KEYS:
        inner.fault(
            "rope_type",
            f'rope type "{kind}" is not supported',
            f"rope_type is one of {', '.join(TYPE_KEYS)}",
            "use a model with one of these rope types",
        )
        return None
    return cast(RopeType, kind)


def _theta(reader: ConfigReader, inner: ConfigReader, family: Family) -> float | None:
    outside = reader.number("rope_theta", low=1.0, low_is_legal=False)
    inside = inner.number("rope_theta", low=1.0, low_is_legal=False)
    if outside is not None and inside is not None and outside != inside:
        two_values(reader, "rope_theta", outside, f"{inner.prefix}rope_theta", inside)
        return None
    if outside is not None or inside is not None:
        return outside if inside is None else inside
    if reader.has("rope_theta") or inner.has("rope_theta"):
        return None
    reader.warn(
        "default_applied",
        "rope_theta",
        f"rope_theta is absent; the {family.name} default {family.rope_theta:g} is used",
    )
    return family.rope_theta


def _rotary_dim(reader: ConfigReader, inner: ConfigReader, head_dim: int) -> int | None:
    """head_dim x partial_rotary_factor, the factor applied once; it must be an even integer."""
    factor = _partial_factor(reader, inner)
    if factor is None:
        return None
    product = head_dim * factor
    rotary_dim = round(product)
    if abs(product - rotary_dim) > ROUNDING_SLACK or rotary_dim % 2 or not rotary_dim:
        key = "head_dim" if factor == 1.0 else "partial_rotary_factor"
        reader.fault(
            key,
            f"head_dim {head_dim} x partial_rotary_factor {factor:g} = {product:g}",
            "the number of rotated dimensions is a positive even integer",
            "correct head_dim or partial_rotary_factor",
        )
        return None
    return rotary_dim if _legacy_agrees(reader, inner, rotary_dim) else None


def _partial_factor(reader: ConfigReader, inner: ConfigReader) -> float | None:
    """The factor in (0, 1], from either place; 1 if it stands in neither."""
    key = "partial_rotary_factor"
    found = [
        (source, source.number(key, low=0.0, low_is_legal=False))
        for source in (reader, inner)
        if source.has(key)
    ]
    values = [value for _, value in found if value is not None]
    if len(values) != len(found):
        return None
    if len(values) == 2 and values[0] != values[1]:
        two_values(reader, key, values[0], f"{inner.prefix}{key}", values[1])
        return None
    if values and values[0] > 1.0:
        found[0][0].fault(key, f"{key} is {values[0]:g}", f"0 < {key} <= 1", "correct the value")
        return None
    return values[0] if values else 1.0


def _legacy_agrees(reader: ConfigReader, inner: ConfigReader, rotary_dim: int) -> bool:
    """A ``rotary_dim`` key must say what head_dim x partial_rotary_factor says."""
    for source in (reader, inner):
        stated = source.integer("rotary_dim")
        if stated is not None and stated != rotary_dim:
            source.fault(
                "rotary_dim",
                f"rotary_dim is {stated} but head_dim x partial_rotary_factor is {rotary_dim}",
                "both name the number of rotated dimensions",
                "correct partial_rotary_factor, or remove rotary_dim",
            )
            return False
        if stated is None and source.has("rotary_dim"):
            return False
    return True


def _warn_partial(
    reader: ConfigReader, inner: ConfigReader, rotary_dim: int, head_dim: int, family: Family
) -> None:
    if rotary_dim == head_dim:
        return
    source = inner if inner.has("partial_rotary_factor") else reader
    source.warn(
        "partial_rotary",
        "partial_rotary_factor",
        f"the first {rotary_dim} of {head_dim} head dimensions are rotated and the rest pass "
        f"through; transformers' {family.architecture} ignores this key for the default type",
    )


def _refuse_strangers(inner: ConfigReader, kind: RopeType) -> None:
    """Every key of a rope block is arithmetic, so one that the type lacks is refused."""
    for key, value in inner.values.items():
        if key in COMMON_KEYS or key in LEGACY_KEYS or key in TYPE_KEYS[kind]:
            continue
        if key in INERT_KEYS and (INERT_KEYS[key] is None or same_number(value, INERT_KEYS[key])):
            continue
        allowed = sorted(TYPE_KEYS[kind] | COMMON_KEYS)
        inner.fault(
            key,
            f'{key} {shown(value)} has no meaning for rope type "{kind}"',
            f"the keys of this type are {', '.join(allowed)}",
            f"remove {key}, or correct rope_type",
        )


def _of_type(
    reader: ConfigReader,
    inner: ConfigReader,
    kind: RopeType,
    theta: float,
    rotary_dim: int,
    max_position_embeddings: int,
) -> RopeSpec | None:
    if kind == "default":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    if kind == "linear":
        factor = _factor(inner)
        if factor is None:
            return None
        return RopeSpec(type="linear", theta=theta, rotary_dim=rotary_dim, factor=factor)
    original = _original_positions(reader, inner, kind, max_position_embeddings)
    if original is None:
        return None
    if kind == "llama3":
        return _llama3(inner, theta, rotary_dim, original)
    return _yarn(inner, theta, rotary_dim, original, max_position_embeddings)


def _llama3(inner: ConfigReader, theta: float, rotary_dim: int, original: int) -> RopeSpec | None:
    factor = _factor(inner)
    low = _needed(inner, "low_freq_factor")
    high = _needed(inner, "high_freq_factor")
    if factor is None or low is None or high is None:
        return None
    if low >= high:
        inner.fault(
            "high_freq_factor",
            f"low_freq_factor is {low:g} and high_freq_factor is {high:g}",
            "low_freq_factor < high_freq_factor",
            "correct the two values",
        )
        return None
    return RopeSpec(
        type="llama3",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(
    inner: ConfigReader,
    theta: float,
    rotary_dim: int,
    original: int,
    max_position_embeddings: int,
) -> RopeSpec | None:
    factor = _yarn_factor(inner, original, max_position_embeddings)
    attention_factor = inner.number("attention_factor", low=0.0, low_is_legal=False)
    mscale, mscale_all_dim = _mscales(inner, attention_factor)
    fast = inner.number("beta_fast", low=0.0, low_is_legal=False)
    slow = inner.number("beta_slow", low=0.0, low_is_legal=False)
    truncate = inner.boolean("truncate")
    beta_fast = YARN_BETA_FAST if fast is None else fast
    beta_slow = YARN_BETA_SLOW if slow is None else slow
    _check_betas(inner, beta_fast, beta_slow)
    return RopeSpec(
        type="yarn",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=1.0 if factor is None else factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=True if truncate is None else truncate,
    )


def _check_betas(inner: ConfigReader, fast: float, slow: float) -> None:
    if fast < slow:
        inner.fault(
            "beta_fast",
            f"beta_fast is {fast:g} and beta_slow is {slow:g} (defaults 32 and 1)",
            "beta_fast >= beta_slow",
            "correct the two values",
        )


def _mscales(
    inner: ConfigReader, attention_factor: float | None
) -> tuple[float | None, float | None]:
    """Both mscale keys above 0, or None: readers disagree on what one alone, or a zero, means.

    An mscale of 1 without a partner means "not given" to all of them, and an explicit
    attention_factor leaves nothing for the two keys to say.
    """
    mscale = inner.number("mscale", low=0.0)
    all_dim = inner.number("mscale_all_dim", low=0.0)
    if attention_factor is not None or (mscale in (None, 1.0) and not all_dim):
        return None, None
    if mscale and all_dim:
        return mscale, all_dim
    inner.fault(
        "mscale",
        f"mscale is {_or_absent(mscale)} and mscale_all_dim is {_or_absent(all_dim)}",
        "mscale and mscale_all_dim are given together and above 0, or not at all",
        "give both, or state the result as attention_factor",
    )
    return None, None


def _or_absent(value: float | None) -> str:
    return "absent" if value is None else f"{value:g}"


def _yarn_factor(inner: ConfigReader, original: int, positions: int) -> float | None:
    if inner.has("factor"):
        return _factor(inner)
    if positions < original:
        inner.fault(
            "factor",
            f"factor is absent and max_position_embeddings {positions} is below "
            f"original_max_position_embeddings {original}",
            "factor >= 1",
            "add factor",
        )
        return None
    derived = positions / original
    inner.warn(
        "default_applied",
        "factor",
        f"factor is absent; max_position_embeddings {positions} / "
        f"original_max_position_embeddings {original} = {derived:g} is used",
    )
    return derived


def _original_positions(
    reader: ConfigReader, inner: ConfigReader, kind: RopeType, positions: int
) -> int | None:
    """The context of pretraining: in the block or top-level; else max_position_embeddings."""
    key = "original_max_position_embeddings"
    outside, inside = reader.integer(key), inner.integer(key)
    if outside is not None and inside is not None and outside != inside:
        two_values(reader, key, outside, f"{inner.prefix}{key}", inside)
        return None
    if reader.has(key) or inner.has(key):
        return outside if inside is None else inside
    inner.warn(
        "default_applied",
        key,
        f"{key} is absent for rope type {kind}; max_position_embeddings {positions} is used",
    )
    return positions


def _factor(inner: ConfigReader) -> float | None:
    if not inner.has("factor"):
        return _needed(inner, "factor")
    return inner.number("factor", low=1.0)


def _needed(inner: ConfigReader, key: str) -> float | None:
    if not inner.has(key):
        rule = f"rope type {shown(inner.get('rope_type'))} needs {key}"
        inner.fault(key, f"{key} is missing", rule, f"add {key}")
        return None
    return inner.number(key, low=0.0, low_is_legal=False)
