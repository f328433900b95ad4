"""Sliding windows: which layers see only the last W keys, the token's own key included."""

from __future__ import annotations

from pagedctl.models.architecture import Family
from pagedctl.models.reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"
LATE_LAYERS_DEFAULT = 28


def resolve_windows(
    reader: ConfigReader, *, family: Family, layers: int
) -> tuple[int | None, ...] | None:
    """One entry per layer (None: all keys), or None after recording a fault.

    ``layer_types`` wins where it is given; else the family's rule: every layer, or those
    from max_window_layers on, if sliding_window is set and use_sliding_window allows it.
    """
    already_broken = len(reader.faults)
    window = reader.integer("sliding_window")
    slides = _sliding_layers(reader, family, layers, window)
    if slides is None or len(reader.faults) > already_broken:
        return None
    if not any(slides):
        return (None,) * layers
    if window is None:
        reader.fault(
            "sliding_window",
            "layers are declared sliding but sliding_window is absent",
            "a sliding layer needs its width in keys",
            "add sliding_window, or declare full attention",
        )
        return None
    if family.windows == "none":
        reader.fault(
            "sliding_window",
            f"sliding_window {window} is given for {family.name}",
            f"{family.architecture} has no sliding windows",
            "remove sliding_window, or correct model_type",
        )
        return None
    return tuple(window if slide else None for slide in slides)


def _sliding_layers(
    reader: ConfigReader, family: Family, layers: int, window: int | None
) -> tuple[bool, ...] | None:
    if reader.has("layer_types"):
        return _from_layer_types(reader, layers)
    allowed = reader.boolean("use_sliding_window")
    if family.windows == "late_layers":
        return _late_layers(reader, layers, allowed is True)
    if family.windows == "all_layers" and "sliding_window" not in reader.values:
        reader.warn(
            "default_applied",
            "sliding_window",
            f"sliding_window is absent, which means none here; transformers' "
            f"{family.architecture} would use 4096",
        )
    return (window is not None and allowed is not False,) * layers


def _from_layer_types(reader: ConfigReader, layers: int) -> tuple[bool, ...] | None:
    kinds = reader.texts("layer_types")
    if kinds is None:
        return None
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        reader.fault(
            "layer_types",
            f"layer types {', '.join(unknown)} are not supported",
            f"a layer is {FULL} or {SLIDING}",
            "use a model with these layer types",
        )
    if len(kinds) != layers:
        reader.fault(
            "layer_types",
            f"layer_types has {len(kinds)} entries for {layers} layers",
            "one entry per layer (num_hidden_layers)",
            "correct layer_types or num_hidden_layers",
        )
    if SLIDING in kinds and reader.boolean("use_sliding_window") is False:
        reader.warn(
            "layer_types_win",
            "use_sliding_window",
            "use_sliding_window is false but layer_types has sliding layers; layer_types wins",
        )
    return tuple(kind == SLIDING for kind in kinds)


def _late_layers(reader: ConfigReader, layers: int, allowed: bool) -> tuple[bool, ...]:
    first = reader.integer("max_window_layers", low=0)
    if allowed and not reader.has("max_window_layers"):
        reader.warn(
            "default_applied",
            "max_window_layers",
            f"max_window_layers is absent; {LATE_LAYERS_DEFAULT} is used",
        )
    start = LATE_LAYERS_DEFAULT if first is None else first
    return tuple(allowed and layer >= start for layer in range(layers))
