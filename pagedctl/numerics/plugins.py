"""Plug-ins: contracts and leaves of other packages, found through entry points. No torch.

A package offers an entry point of the group ``pagedctl.plugins`` that loads to a
:class:`Plugin`, or to a function without arguments that returns one. A plug-in is taken as a
whole or not at all. ``docs/plugins.md`` is the page about them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from pagedctl.errors import ConfigError, Fault
from pagedctl.numerics.envelopes import Envelope, Envelopes, house_envelopes
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.leaf import LeafSpec
from pagedctl_kernels.registry import Registry

ENTRY_POINTS = "pagedctl.plugins"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """What a package adds: contracts by name, and leaves of existing ops."""

    envelopes: tuple[Envelope, ...] = ()
    leaves: tuple[LeafSpec, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The house's contracts and leaves with those of every sound plug-in.

    ``faults`` has one entry for each plug-in that could not be taken.
    """

    envelopes: Envelopes
    leaves: Registry
    plugins: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    def require_sound(self) -> Installed:
        """Raises ConfigError if a plug-in is broken: what it would add decides which leaf runs."""
        if self.faults:
            raise ConfigError.of(self.faults)
        return self


@cache
def installed() -> Installed:
    """What this process has, looked up once."""
    return discover(importlib.metadata.entry_points(group=ENTRY_POINTS))


def discover(entry_points: Iterable[importlib.metadata.EntryPoint]) -> Installed:
    """Take each plug-in, by name, as a whole or not at all."""
    found = Installed(envelopes=house_envelopes(), leaves=house_registry())
    for point in sorted(entry_points, key=lambda one: one.name):
        found = _with_plugin(found, point)
    return found


def _with_plugin(found: Installed, point: importlib.metadata.EntryPoint) -> Installed:
    try:
        plugin = _load(point)
        return Installed(
            envelopes=found.envelopes.with_envelopes(plugin.envelopes),
            leaves=found.leaves.with_leaves(plugin.leaves),
            plugins=(*found.plugins, point.name),
            faults=found.faults,
        )
    except Exception as problem:  # whatever a foreign module raises
        return Installed(
            envelopes=found.envelopes,
            leaves=found.leaves,
            plugins=found.plugins,
            faults=(*found.faults, _fault(point, problem)),
        )


def _load(point: importlib.metadata.EntryPoint) -> Plugin:
    loaded = point.load()
    plugin = loaded if isinstance(loaded, Plugin) else loaded()
    if not isinstance(plugin, Plugin):
        raise TypeError(f"{point.value} gives {type(plugin).__name__}, not Plugin")
    return plugin


def _fault(point: importlib.metadata.EntryPoint, problem: Exception) -> Fault:
    return Fault(
        what=f"plug-in {point.name} cannot be loaded: {type(problem).__name__}: {problem}",
        where=f"entry point {point.value} of the group {ENTRY_POINTS}",
        rule="a plug-in gives a Plugin whose contracts and leaves have names of their own",
        remedy="mend or uninstall the package that offers it",
    )
