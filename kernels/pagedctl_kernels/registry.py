"""The registry: filters the leaves of an op, ranks the rest, and can say why.

Selection reads static facts only and happens once, when a model is built. The forward pass
calls the bound plan and never comes back here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagedctl_kernels.leaf import CallSite, LeafSpec, Requirement
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.order import Order


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One leaf's standing at a call site: eligible if ``refusals`` is empty."""

    leaf: LeafSpec
    refusals: tuple[str, ...]
    order: Order | None
    matched_traits: int


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen leaf and the order that it promises at this call site."""

    site: CallSite
    leaf: LeafSpec
    order: Order


class NoLeafError(LookupError):
    """No leaf qualifies at a call site; lists every candidate and every reason."""

    def __init__(
        self, site: CallSite, machine: Machine, requirement: Requirement, ranked: list[Candidate]
    ) -> None:
        self.site = site
        self.machine = machine
        self.requirement = requirement
        self.candidates = tuple(ranked)
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        features = ", ".join(sorted(self.requirement.features)) or "nothing"
        head = (
            f"no leaf of op {self.site.op} qualifies at {self.site.name} on "
            f"{self.machine.device_class} (required: {features})"
        )
        if not self.candidates:
            return [head, f"  no leaf of op {self.site.op} is registered"]
        return [head, *explain_lines(self.candidates)]


class Registry:
    """An immutable collection of leaf specs, each name once."""

    def __init__(self, leaves: Iterable[LeafSpec]) -> None:
        self._by_name: dict[str, LeafSpec] = {}
        for leaf in leaves:
            if leaf.name in self._by_name:
                raise ValueError(f"leaf {leaf.name} is registered twice")
            self._by_name[leaf.name] = leaf

    def leaves(self, op: str | None = None) -> tuple[LeafSpec, ...]:
        """All leaves, or those of *op*, by name."""
        chosen = (leaf for leaf in self._by_name.values() if op is None or leaf.op == op)
        return tuple(sorted(chosen, key=lambda leaf: leaf.name))

    def ops(self) -> tuple[str, ...]:
        return tuple(sorted({leaf.op for leaf in self._by_name.values()}))

    def with_leaves(self, leaves: Iterable[LeafSpec]) -> Registry:
        """A new registry that also holds *leaves* (a plug-in's); this one is unchanged."""
        return Registry([*self._by_name.values(), *leaves])

    def explain(
        self, site: CallSite, machine: Machine, requirement: Requirement
    ) -> tuple[Candidate, ...]:
        """Every leaf of the op: the eligible ones first in rank order, then the refused."""
        candidates = [_judge(leaf, site, machine, requirement) for leaf in self.leaves(site.op)]
        return tuple(sorted(candidates, key=_rank_key))

    def select(self, site: CallSite, machine: Machine, requirement: Requirement) -> Selection:
        """The best eligible leaf at *site*; raises NoLeafError with all reasons."""
        ranked = self.explain(site, machine, requirement)
        if not ranked or ranked[0].refusals:
            raise NoLeafError(site, machine, requirement, list(ranked))
        best = ranked[0]
        assert best.order is not None
        return Selection(site=site, leaf=best.leaf, order=best.order)


def explain_lines(candidates: Iterable[Candidate]) -> list[str]:
    """One line per candidate: chosen, eligible, or refused with each reason."""
    lines: list[str] = []
    for position, candidate in enumerate(candidates):
        if candidate.refusals:
            standing = "refused: " + "; ".join(candidate.refusals)
        else:
            standing = "chosen" if position == 0 else "eligible"
        lines.append(f"  {candidate.leaf.name} (priority {candidate.leaf.priority}): {standing}")
    return lines


def _rank_key(candidate: Candidate) -> tuple[bool, int, int, str]:
    return (
        bool(candidate.refusals),
        -candidate.leaf.priority,
        -candidate.matched_traits,
        candidate.leaf.name,
    )


def _judge(leaf: LeafSpec, site: CallSite, machine: Machine, requirement: Requirement) -> Candidate:
    refusals = list(_static_refusals(leaf, site, machine, requirement))
    order = None
    if not refusals:
        try:
            order = leaf.resolve_order(site, machine)
        except KeyError as missing:
            refusals.append(f"its order names {missing}, which this call site does not state")
    if order is not None and requirement.order is not None and order != requirement.order:
        refusals.extend(f"order, {text}" for text in order.differences(requirement.order))
    matched = len(set(leaf.traits) & set(requirement.traits))
    return Candidate(leaf=leaf, refusals=tuple(refusals), order=order, matched_traits=matched)


def _static_refusals(
    leaf: LeafSpec, site: CallSite, machine: Machine, requirement: Requirement
) -> Iterable[str]:
    if requirement.names is not None and leaf.name not in requirement.names:
        yield f"not among the requested leaves ({', '.join(requirement.names)})"
    hardware = leaf.capability.refusal(machine)
    if hardware is not None:
        yield hardware
    elif leaf.order.device_class != machine.device_class:
        yield f"its order is of {leaf.order.device_class}, this is {machine.device_class}"
    if not any(fmt.accepts(site.dtypes) for fmt in leaf.formats):
        have = " ".join(f"{operand}:{dtype}" for operand, dtype in site.dtypes.items())
        yield f"no format takes {have}"
    for limit in leaf.limits:
        refusal = limit.refusal(site)
        if refusal is not None:
            yield refusal
    missing = sorted(requirement.features - leaf.features)
    if missing:
        yield f"does not declare {', '.join(missing)}"
