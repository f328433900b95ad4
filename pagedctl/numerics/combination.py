"""Combinations: what decides the bits of an engine, as data that records are held against.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Final, Literal

from pagedctl.numerics.switches import spelled

Command = Literal["invariance", "align"]
"""What earns a verification record."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """``kind`` is cpu or cuda; ``capability`` is ``8.6``, or on a CPU its ISA, ``AVX512``.

    ``threads`` is the intra-op thread count on a CPU and None elsewhere.
    """

    kind: str
    name: str
    capability: str | None
    threads: int | None

    @property
    def device_class(self) -> str:
        """The column of the arithmetic table: ``cpu``, or for example ``sm_90``."""
        if self.kind == "cpu" or self.capability is None:
            return self.kind
        return f"sm_{self.capability.replace('.', '')}"


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What computes; None: not installed."""

    pagedctl: str
    torch: str | None
    triton: str | None
    cuda: str | None
    driver: str | None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks of the engine, and how they share a layer; no layout with one rank."""

    tp: int
    tp_layout: str | None


@dataclass(frozen=True, kw_only=True)
class VerifiedFacts:
    """What decides the bits of an engine, its weights apart; each key has to be equal.

    ``spec_digest`` is of the architecture, ``switches`` are all of them as they hold, and
    ``leaves`` are those of every call site, as in a manifest. ``packages`` has the version of
    each package that offers the contract or one of the leaves, ours apart.
    """

    FOREIGN: ClassVar[frozenset[str]] = frozenset(
        {
            *("contract", "topology_invariant", "spec_digest", "family", "dtype", "kv_dtype"),
            *("device", "layout"),
        }
    )
    """Keys that make a record one of something else; the others make it an old one."""

    contract: str
    topology_invariant: bool
    spec_digest: str
    arithmetic_id: str
    family: str
    dtype: str
    kv_dtype: str
    device: Device
    versions: Versions
    layout: Layout
    graphs: bool
    captured_sizes: tuple[int, ...]
    switches: Mapping[str, object]
    leaves: Mapping[str, str]
    packages: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        """The compared values alone, by field."""
        return {one.name: getattr(self, one.name) for one in fields(VerifiedFacts)}

    def facts(self) -> dict[str, object]:
        """Every compared value by its key, ``device.name`` for one of an inner object."""
        return dict(_flat(self.values()))


@dataclass(frozen=True, kw_only=True)
class Combination(VerifiedFacts):
    """What is to run.

    ``outside_leaves`` are (op, leaf) of the leaves that the house lacks. ``evidence`` are the
    commands whose records grant the contract, all of them together.
    """

    outside_leaves: tuple[tuple[str, str], ...] = ()
    evidence: tuple[Command, ...] = ("invariance",)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key in which a record and what is to run are not equal."""

    key: str
    recorded: object
    found: object

    @property
    def is_foreign(self) -> bool:
        return self.key.partition(".")[0] in VerifiedFacts.FOREIGN

    def __str__(self) -> str:
        return f"{self.key} is {spelled(self.found)}, the record is of {spelled(self.recorded)}"


ABSENT: Final = "(absent)"


def differences(record: VerifiedFacts, found: Mapping[str, object]) -> tuple[Difference, ...]:
    """Every key of *found* in which the record is another: foreign ones first.

    Only keys whose first part *found* has are compared, so that less may be known than a
    built engine knows.
    """
    recorded = record.facts()
    known = {key.partition(".")[0] for key in found}
    keys = [*found, *(key for key in recorded if key not in found)]
    told = [
        Difference(key=key, recorded=recorded.get(key, ABSENT), found=found.get(key, ABSENT))
        for key in keys
        if key.partition(".")[0] in known and _differ(recorded, found, key)
    ]
    return tuple(sorted(told, key=lambda one: not one.is_foreign))


def _flat(values: Mapping[str, object], at: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        key = f"{at}{name}"
        if is_dataclass(value) and not isinstance(value, type):
            inner = {one.name: getattr(value, one.name) for one in fields(value)}
            yield from _flat(inner, f"{key}.")
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _differ(recorded: Mapping[str, object], found: Mapping[str, object], key: str) -> bool:
    """Not equal, or of another type: true is not 1."""
    if key not in recorded or key not in found:
        return True
    one, other = recorded[key], found[key]
    return type(one) is not type(other) or one != other
