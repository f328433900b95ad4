"""Plans: a leaf bound to a call site. Built once, called on every step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedctl_kernels.leaf import CallSite, LeafSpec, Requirement
from pagedctl_kernels.machine import Machine
from pagedctl_kernels.order import Order
from pagedctl_kernels.registry import Candidate, NoLeafError, Registry, Selection


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A bound leaf: ``run`` is the implementation, whose signature is the op's protocol.

    The protocols are in ``pagedctl_kernels.ops.interfaces``. ``run`` checks the dtypes and
    shapes it is given and never consults the registry. ``candidates`` tells how every leaf of
    the op stood at the call site, for a display.
    """

    site: CallSite
    leaf: LeafSpec
    order: Order
    run: Any
    candidates: tuple[Candidate, ...] = ()


class LeafUnfit(LookupError):
    """A leaf's own check at construction failed on this machine: it may not serve here."""


class LeafBroken(LookupError):
    """A leaf's entry gives no implementation: whoever offers the leaf has to mend it."""


def bind(selection: Selection, machine: Machine) -> Plan:
    """Load the selected leaf's entry and build its implementation for the call site.

    Raises LeafUnfit if the leaf proves at construction that it cannot keep its order here, and
    LeafBroken if the entry of another package gives no implementation, however it fails. A
    failure of our own passes as it is.
    """
    leaf = selection.leaf
    try:
        run = _entry(leaf.entry)(selection.site, machine)
        if not callable(run):
            raise TypeError(f"{leaf.entry} gives {type(run).__name__}, which cannot be called")
    except (LeafUnfit, MemoryError):
        raise
    except (Exception, SystemExit) as problem:
        if leaf.entry.startswith(f"{__package__}."):
            raise
        said = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise LeafBroken(f"leaf {leaf.name}: {said}") from problem
    return Plan(site=selection.site, leaf=selection.leaf, order=selection.order, run=run)


def _entry(entry: str) -> Callable[[CallSite, Machine], Any]:
    module_name, _, function_name = entry.partition(":")
    found = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(found):
        raise TypeError(f"{module_name} has no function {function_name}")
    build: Callable[[CallSite, Machine], Any] = found
    return build


def plan(
    registry: Registry,
    site: CallSite,
    machine: Machine,
    requirement: Requirement,
    *,
    trial: CallSite | None = None,
) -> Plan:
    """Select and bind; a leaf that is unfit on this machine gives way to the next one.

    *trial* is the site that leaves are built for instead: a smaller one, for a display.
    Raises NoLeafError, with the unfit leaves' reasons among the others, if none is left.
    """
    unfit: dict[str, str] = {}
    while True:
        ranked = registry.explain(site, machine, requirement)
        fit = [c for c in ranked if not c.refusals and c.leaf.name not in unfit]
        if not fit:
            raise NoLeafError(site, machine, requirement, _with_unfit(ranked, unfit))
        best = fit[0]
        assert best.order is not None
        try:
            selection = Selection(site=trial or site, leaf=best.leaf, order=best.order)
            bound = bind(selection, machine)
        except LeafUnfit as reason:
            unfit[best.leaf.name] = str(reason)
        else:
            return replace(bound, site=site, candidates=tuple(_with_unfit(ranked, unfit)))


def _with_unfit(ranked: Iterable[Candidate], unfit: Mapping[str, str]) -> list[Candidate]:
    """The candidates, those that failed their own check with that reason among the others."""
    return [
        replace(one, refusals=(*one.refusals, f"unfit on this machine: {unfit[one.leaf.name]}"))
        if one.leaf.name in unfit
        else one
        for one in ranked
    ]
