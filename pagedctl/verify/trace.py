"""What one sequence met on its way through the model, as digests: data, no torch.

A sequence's computation is a grid of positions and stages. In the order (position, layer,
stage) every stage comes after all that it depends on, however the positions were cut into steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

BEFORE_LAYERS = ("token", "embedding")
IN_LAYER = (
    "input_norm",
    "qkv_proj",
    "position",
    "qk_norm_rope_write",
    "blocks",
    "attention",
    "o_proj",
    "post_attention_norm",
    "gate_up_proj",
    "silu_mul",
    "down_proj",
)
AFTER_LAYERS = (
    "final_norm",
    "head",
    "logit_edits",
    "stream",
    "sampling",
    "sample",
    "reported",
    "likeliest",
    "block_sumexp",
    "logprob",
)
"""The stages of a position, in the order in which it meets them.

Most are the outputs of ops. ``token``, ``position``, ``stream`` (seed and position of the draw)
and ``sampling`` (its other parameters) are what the engine feeds to an op; ``blocks`` is every
key and value that attention finds through the block table; ``reported`` is what the logprob is of.
"""

_RANKS: Mapping[str, tuple[int, int]] = {
    stage: (part, place)
    for part, stages in enumerate((BEFORE_LAYERS, IN_LAYER, AFTER_LAYERS))
    for place, stage in enumerate(stages)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One stage of one position; ``layer`` is None before and after the layers.

    ``position`` is that of the token whose row it is: what is sampled there stands one behind.
    """

    position: int
    layer: int | None
    stage: str

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sorts points so that each comes after all that it depends on."""
        part, place = _RANKS[self.stage]
        return self.position, part, self.layer or 0, place


@dataclass(frozen=True, kw_only=True)
class StageLeaf:
    """The bound leaf behind a stage: its op, the name of its call site, its own name."""

    op: str
    site: str
    leaf: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Digests, 8 bytes each as an integer, of one sequence's points.

    ``leaves`` has the leaf of each (layer, stage) that an op computes. ``digests`` holds the first
    digest of each point; ``changed`` the points that were computed again, after a preemption,
    with another digest. ``steps`` counts the steps that the sequence was in.
    """

    leaves: Mapping[tuple[int | None, str], StageLeaf]
    digests: dict[Point, int] = field(default_factory=dict)
    changed: set[Point] = field(default_factory=set)
    again: set[int] = field(default_factory=set)

    def add(self, point: Point, digest: int) -> None:
        """Keep the first digest of *point*, and note if a later one is another."""
        first = self.digests.get(point)
        if first is None:
            self.digests[point] = digest
            return
        self.again.add(point.position)
        if first != digest:
            self.changed.add(point)

    def differences(self, other: Trace) -> Iterator[Point]:
        """Points that both have with unequal digests, or that changed in one; in no order."""
        for point in self.changed | other.changed:
            yield point
        for point, digest in self.digests.items():
            if other.digests.get(point, digest) != digest:
                yield point
