"""The cases of the proof: which runs each consists of, and where it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pagedctl.verify.case_legs import (
    ENOUGH_ROWS,
    Subject,
    chunk_legs,
    packed_leg,
    packed_legs,
    pool_legs,
    preemption_legs,
    repeat_legs,
)
from pagedctl.verify.legs import Leg
from pagedctl.verify.prefix_legs import prefix_legs, room
from pagedctl.verify.rescore_legs import rescore_legs
from pagedctl.verify.sampled_legs import sampled_legs, unseeded_leg

ALONE = "alone"
PROCESS = "process"
PROCESS_ROWS = 64
ABSENT = frozenset({"graphs", "topology"})
"""Cases of what this version does not have: nothing is left out without them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case: its runs, how many rows must be resident at once in one of them, and the
    counters that are told, words to a trace's field: over all runs none of them may be 0."""

    name: str
    legs: Callable[[Subject], Iterator[Leg]]
    least_rows: int = 0
    counters: Mapping[str, str] = field(default_factory=dict)


def _nothing(subject: Subject) -> Iterator[Leg]:
    return iter(())


def process_legs(subject: Subject) -> Iterator[Leg]:
    """What another process runs: a batch with cold prompts, one at lag 1, one without seeds."""
    rows = subject.rows(PROCESS_ROWS)
    yield packed_leg(subject, "batch", rows, prefix_cache=False)
    yield packed_leg(subject, "batch at lag 1", rows, lag=1)
    yield unseeded_leg(subject)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        case.name: case
        for case in (
            Case(name=ALONE, legs=_nothing),
            Case(
                name="packed",
                legs=packed_legs,
                least_rows=ENOUGH_ROWS,
                counters={"overshoots": "overshoots"},
            ),
            Case(name="repeat", legs=repeat_legs, least_rows=ENOUGH_ROWS),
            Case(name=PROCESS, legs=process_legs, least_rows=ENOUGH_ROWS),
            Case(
                name="chunks",
                legs=chunk_legs,
                least_rows=2,
                counters={"chunk splits": "chunk_splits"},
            ),
            Case(
                name="pools",
                legs=pool_legs,
                least_rows=2,
                counters={"preemptions": "preemptions"},
            ),
            Case(
                name="preemption",
                legs=preemption_legs,
                least_rows=2,
                counters={"preemptions": "preemptions"},
            ),
            Case(
                name="prefix",
                legs=prefix_legs,
                counters={"hit tokens": "prefix_hit_tokens"},
            ),
            Case(name="rescore", legs=rescore_legs),
            Case(name="graphs", legs=_nothing),
            Case(name="sampled", legs=sampled_legs, least_rows=2),
            Case(name="topology", legs=_nothing),
        )
    }
)
"""In the order in which they run."""


def not_applicable(case: Case, subject: Subject, processes: int) -> str | None:
    """Why *case* has nothing to compare here, or None."""
    reasons = {
        PROCESS: "one process lifetime was asked for" if processes == 1 else None,
        "prefix": _no_prefixes(subject),
        "graphs": "the CPU has no graphs" if subject.config.device == "cpu" else None,
        "topology": "bits are promised for one tp only, without --topology-invariant",
    }
    return reasons.get(case.name)


def _no_prefixes(subject: Subject) -> str | None:
    return room(subject) if subject.config.prefix_cache else "the prefix cache is off"
