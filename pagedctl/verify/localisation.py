"""Names the op behind a difference between two runs of one sequence. No torch.

What differs first, in an order in which everything comes after all that it depends on, is what
made the difference: its inputs were equal, its output was not.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedctl.verify.trace import Point, StageLeaf, Trace

ENGINE = "engine"
"""The op and the switch of a difference that no leaf made."""

SWITCH_OF_OP = {
    "sample": "sampling_stream",
    "logprob": "logprob_order",
    "block_sumexp": "logprob_order",
    "stream": "sampling_stream",
    ENGINE: ENGINE,
}
"""The switch that promised equal bits; of every other op it is batch_invariant."""

FED = {
    "token": "the engine fed another token",
    "position": "the engine fed another position",
    "blocks": "attention read other keys and values through the block table",
    "stream": "the draw had another seed or position: the stream is not the request's own",
    "sampling": "the draw had other sampling parameters",
}
"""Stages that no leaf computes, and what a difference there means."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """What made two runs of a sequence differ.

    ``op`` is an op of the registry, or ``engine``; ``site`` the stage of the model; ``leaf`` the
    bound leaf, if an op is meant. ``position`` is that of the token whose row differed first (what
    is sampled or scored there stands one behind), None where no row did. ``switch`` is the switch
    of the contract that promised equal bits, or ``engine``.
    """

    op: str
    site: str
    layer: int | None
    leaf: str | None
    position: int | None
    switch: str
    text: str


def first_difference(
    reference: Trace, other: Trace, *, until_position: int | None = None
) -> Suspect | None:
    """The first op whose output differs between two traces although its inputs are equal.

    ``until_position`` is the place of the first token whose id or logprob differed: what was
    computed from there on is not looked at. None if all that both runs computed is equal.

    Example::

        with Recorder(engine, "a", 0) as alone:
            engine.generate([request])
        with Recorder(engine, "a", 0) as packed:
            engine.generate([*others, request])
        suspect = first_difference(alone, packed)
    """
    found = (
        point
        for point in reference.differences(other)
        if until_position is None or point.position < until_position
    )
    first = min(found, key=lambda point: point.order, default=None)
    if first is None:
        return None
    return _suspect(first, reference, again=first in reference.changed | other.changed)


def suspect_of(reference: Trace, other: Trace, *, position: int) -> Suspect:
    """Why the token at *position* differs: an op, or the engine if every op agrees before it."""
    return first_difference(reference, other, until_position=position) or Suspect(
        op=ENGINE,
        site=ENGINE,
        layer=None,
        leaf=None,
        position=None,
        switch=ENGINE,
        text=f"every op gave equal bits before position {position}: the engine's own bookkeeping",
    )


def _suspect(point: Point, trace: Trace, *, again: bool) -> Suspect:
    leaf = trace.leaves.get((point.layer, point.stage))
    where = f"position {point.position}" + (" when it was computed again" if again else "")
    layer = "" if point.layer is None else f"layer {point.layer}, "
    if point.stage in FED or leaf is None:
        op = "attention" if point.stage == "blocks" else ENGINE
        switch = SWITCH_OF_OP.get(point.stage, ENGINE)
        text = f"{FED.get(point.stage, point.stage)} ({layer}{where})"
    else:
        op, switch = leaf.op, SWITCH_OF_OP.get(leaf.op, "batch_invariant")
        text = f"{_named(leaf, point)} gave other bits from equal inputs ({layer}{where})"
    return Suspect(
        op=op,
        site=point.stage,
        layer=point.layer,
        leaf=None if leaf is None else leaf.leaf,
        position=point.position,
        switch=switch,
        text=text,
    )


def _named(leaf: StageLeaf, point: Point) -> str:
    site = "" if point.stage == leaf.op else f" {point.stage}"
    return f"{leaf.op}{site}, leaf {leaf.leaf},"
