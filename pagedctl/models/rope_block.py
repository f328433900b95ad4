"""The rope block of a config.json in every spelling, as one flat object.

transformers 4 writes ``rope_scaling``, transformers 5 ``rope_parameters``, possibly with
one equal block per layer type; ``type`` is the older name of ``rope_type``.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagedctl.models.reader import ConfigReader, same_number, shown

BLOCKS = ("rope_parameters", "rope_scaling")
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def merged_block(reader: ConfigReader) -> tuple[dict[str, object], str]:
    """The union of both blocks with ``type`` renamed, and the name to show for it."""
    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    for name in BLOCKS:
        for key, value in _flat_block(reader, name).items():
            if key in merged and not same_number(merged[key], value):
                two_values(reader, f"{origin[key]}.{key}", merged[key], f"{name}.{key}", value)
            elif key not in merged:
                merged[key], origin[key] = value, name
    used = [name for name in BLOCKS if name in origin.values()]
    return merged, " and ".join(used) or BLOCKS[0]


def _flat_block(reader: ConfigReader, name: str) -> dict[str, object]:
    """One block without nulls and without nesting by layer type."""
    block = reader.mapping(name)
    if not block:
        return {}
    nested = [key for key in block if key in LAYER_TYPES]
    if not nested:
        return _normalised(reader, name, block)
    entries = reader.child(block, name)
    flat = [
        _normalised(reader, f"{name}.{key}", inner)
        for key in nested
        if (inner := entries.mapping(key)) is not None
    ]
    if len(nested) != len(block) or any(inner != flat[0] for inner in flat[1:]):
        reader.fault(
            name,
            f"{name} differs between layer types: {shown(block)}",
            "all layers share one rope",
            "use a model whose layers share one rope",
        )
    return flat[0] if flat else {}


def _normalised(reader: ConfigReader, name: str, block: Mapping[str, object]) -> dict[str, object]:
    present = {key: value for key, value in block.items() if value is not None}
    old = present.pop("type", None)
    if old is not None and present.setdefault("rope_type", old) != old:
        two_values(reader, f"{name}.type", old, f"{name}.rope_type", present["rope_type"])
    return present


def two_values(
    reader: ConfigReader, left_key: str, left: object, right_key: str, right: object
) -> None:
    reader.fault(
        left_key,
        f"{left_key} is {shown(left)} but {right_key} is {shown(right)}",
        "a value that stands in two places is the same in both",
        "remove the wrong one",
    )
