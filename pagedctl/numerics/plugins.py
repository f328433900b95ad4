"""Plug-ins: contracts and leaves of other packages, found through entry points. No torch.

A package offers an entry point of the group ``pagedctl.plugins`` that loads to a
:class:`Plugin`, or to a function without arguments that returns one. A plug-in is taken as a
whole or not at all. ``docs/plugins.md`` is the page about them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from pagedctl.errors import ConfigError, Fault, nearest
from pagedctl.numerics.envelopes import NAME_PATTERN, Envelope, Envelopes, house_envelopes
from pagedctl.numerics.field_types import require_field_types
from pagedctl.numerics.foreign_code import raised
from pagedctl.numerics.resolution import Choices
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import LeafSpec
from pagedctl_kernels.registry import Registry

ENTRY_POINTS = "pagedctl.plugins"

OTHER_NAMES: Mapping[str, str] = {
    "auto": "fast",
    "deterministic": "invariant",
    "batch-invariant": "invariant",
}
"""What other tools call a contract of ours; a plug-in's contract takes none of these names."""


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What a package adds: contracts by name, and leaves of existing ops.

    Raises TypeError if they are anything else.
    """

    envelopes: tuple[Envelope, ...] = ()
    leaves: tuple[LeafSpec, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("envelopes", Envelope), ("leaves", LeafSpec)):
            given = getattr(self, name)
            # exact: a subclass could settle a contract, or be equal to a leaf, as it likes
            if not isinstance(given, tuple) or not all(type(one) is kind for one in given):
                raise TypeError(f"{name} of a Plugin is a tuple of {kind.__name__}, not {given!r}")


@dataclass(frozen=True, kw_only=True)
class Package:
    """The distribution that offers *plugin*; ``version`` None: not known."""

    name: str
    version: str | None
    plugin: Plugin

    def serves(self, contract: str, leaves: Collection[str]) -> bool:
        """Whether the contract, or one of the leaves, is of this package."""
        own = self.plugin
        return any(one.name == contract for one in own.envelopes) or any(
            one.name in leaves for one in own.leaves
        )


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The house's contracts and leaves with those of every sound plug-in.

    ``packages`` are those that the plug-ins are of. ``faults`` has one entry for each plug-in
    that could not be taken.
    """

    envelopes: Envelopes
    leaves: Registry
    plugins: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()
    faults: tuple[Fault, ...] = ()

    def require_sound(self) -> Installed:
        """Raises ConfigError if a plug-in is broken: what it would add decides which leaf runs."""
        if self.faults:
            raise ConfigError.of(self.faults)
        return self

    def versions_of(self, contract: str, leaves: Collection[str]) -> dict[str, str]:
        """The versions of the packages that offer the contract, or one of the leaves."""
        serving = (one for one in self.packages if one.serves(contract, leaves))
        return {one.name: one.version or "unknown" for one in serving}

    def contract_remedy(self) -> str | None:
        """What helps where a contract is unknown and may be a broken plug-in's; None: nothing."""
        if not self.faults:
            return None
        return "; ".join(f"{one.remedy}: {one.what}" for one in self.faults)


@cache
def installed() -> Installed:
    """What this process has, looked up once."""
    return discover(importlib.metadata.entry_points(group=ENTRY_POINTS))


def discover(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Installed:
    """Take each plug-in, by name, as a whole or not at all.

    What a plug-in prints while it is loaded goes to stderr: stdout is the result.
    """
    found = Installed(envelopes=house_envelopes(), leaves=house_registry())
    with contextlib.redirect_stdout(sys.stderr):
        for point in sorted(entry_points, key=lambda one: (one.name, one.value, _package(one))):
            found = _with_plugin(found, point)
    return found


def _with_plugin(found: Installed, point: importlib.metadata.EntryPoint) -> Installed:
    try:
        plugin = _load(point)
        return Installed(
            envelopes=found.envelopes.with_envelopes(_usable(one) for one in plugin.envelopes),
            leaves=found.leaves.with_leaves(_servable(one, found) for one in plugin.leaves),
            plugins=(*found.plugins, point.name),
            packages=(*found.packages, _package_of(point, plugin)),
            faults=found.faults,
        )
    except (Exception, SystemExit) as problem:  # whatever a foreign module raises
        return Installed(
            envelopes=found.envelopes,
            leaves=found.leaves,
            plugins=found.plugins,
            packages=found.packages,
            faults=(*found.faults, _fault(point, problem)),
        )


def _load(point: importlib.metadata.EntryPoint) -> Plugin:
    loaded = point.load()
    plugin = loaded() if callable(loaded) else loaded
    if not isinstance(plugin, Plugin):
        raise TypeError(f"{point.value} gives {type(plugin).__name__}, not Plugin")
    return plugin


def _usable(envelope: Envelope) -> Envelope:
    """The contract, whose name is free and which resolves on the bare tree; raises ValueError."""
    if envelope.name in OTHER_NAMES:
        raise ValueError(f"{envelope.name} is another tool's name for {OTHER_NAMES[envelope.name]}")
    choices = Choices(envelope.name, {}, {})
    envelope.settle(choices)
    if choices.faults:
        raise ValueError(f"{choices.faults[0].what}: {choices.faults[0].rule}")
    return envelope


def _servable(leaf: LeafSpec, found: Installed) -> LeafSpec:
    """The leaf, which --leaf can name, whose op has call sites and whose entry is there.

    The module of the entry is looked up, not imported. Raises ValueError or TypeError.
    """
    require_field_types(leaf)
    if not re.fullmatch(NAME_PATTERN, leaf.name):
        raise ValueError(f"{leaf.name!r} cannot name a leaf: letters, digits, - _ and .")
    ops = found.leaves.ops()
    if leaf.op not in ops:
        close = nearest(leaf.op, ops)
        meant = f"did you mean {close}?" if close else f"the ops are {', '.join(ops)}"
        raise ValueError(f"leaf {leaf.name} is of op {leaf.op}, which no model has; {meant}")
    module, _, function = leaf.entry.partition(":")
    if not function.isidentifier() or importlib.util.find_spec(module) is None:
        raise ValueError(f"leaf {leaf.name}: there is no entry {leaf.entry!r}")
    return leaf


def _package(point: importlib.metadata.EntryPoint) -> str:
    """The distribution that offers the entry point, or the module where none is known."""
    return point.dist.name if point.dist is not None else point.module


def _package_of(point: importlib.metadata.EntryPoint, plugin: Plugin) -> Package:
    version = point.dist.version if point.dist is not None else None
    return Package(name=_package(point), version=version, plugin=plugin)


def _fault(point: importlib.metadata.EntryPoint, problem: BaseException) -> Fault:
    return Fault(
        what=f"plug-in {point.name} cannot be loaded: {raised(problem)}",
        where=f"entry point {point.value} of the group {ENTRY_POINTS}, package {_package(point)}",
        rule="a plug-in gives a Plugin whose contracts and leaves have names of their own",
        remedy=f"mend or uninstall {_package(point)}",
    )
