"""EngineConfig: every option of model, contract, engine and parallel, with its origin."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from pagedctl.config.groups import (
    ContractOptions,
    EngineOptions,
    ModelOptions,
    ParallelOptions,
)
from pagedctl.config.loader import (
    ARGUMENT,
    DEFAULT,
    Resolved,
    Source,
    argument_source,
    environment_source,
    resolve,
)
from pagedctl.config.options import Option, options_of
from pagedctl.config.plan_file import PlanFile, read_plan_file
from pagedctl.numerics.plugins import installed
from pagedctl.numerics.resolution import Numerics, resolve_numerics
from pagedctl.numerics.switches import SWITCHES, Value


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ModelOptions, ContractOptions, EngineOptions, ParallelOptions):
    """The configuration of one engine, resolved and checked.

    ``EngineConfig(max_num_seqs=64)`` takes keyword arguments alone;
    :meth:`EngineConfig.load` also reads the environment and a plan file. Both refuse unknown
    names, broken values and values looser than the contract. An argument that equals the default
    counts as the default: ``numerics="invariant"`` was not asked for.

    ``origins`` maps each option to ``flag``, ``env NAME``, ``plan FILE``, ``argument``,
    ``default``, or ``derived: RULE``.
    """

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        options = engine_options()
        origins = {name: self.origins.get(name, DEFAULT) for name in options}
        for name, one in options.items():
            if origins[name] == DEFAULT and not _is_default(getattr(self, name), one.default):
                origins[name] = ARGUMENT  # also of dataclasses.replace, which keeps the origins
        given = {name: getattr(self, name) for name in options if origins[name] == ARGUMENT}
        checked = resolve(options, [argument_source(given)]) if given else None
        for name in given:
            assert checked is not None
            object.__setattr__(self, name, checked.values[name])
        object.__setattr__(self, "origins", MappingProxyType(origins))
        self.contract  # noqa: B018  (refused here, not at first use)

    @classmethod
    def load(cls, *, plan: str | None = None, **arguments: object) -> EngineConfig:
        """Resolve keyword arguments over the environment, a plan file and the defaults.

        ``plan`` falls back to PAGEDCTL_PLAN. Raises ConfigError with every fault, or
        NumericsRefused.
        """
        plan_path = plan or os.environ.get("PAGEDCTL_PLAN")
        plan_file = read_plan_file(plan_path) if plan_path else None
        return cls.from_sources(argument_source(arguments), plan_file, os.environ)

    @classmethod
    def from_sources(
        cls, given: Source, plan_file: PlanFile | None, environ: Mapping[str, str]
    ) -> EngineConfig:
        """Resolve the strongest source *given* over the environment and a plan."""
        options = engine_options()
        sources = [given, environment_source(options, environ)]
        if plan_file is not None:
            sources.append(plan_file.source(options))
        return cls.from_resolved(resolve(options, sources))

    @classmethod
    def from_resolved(cls, resolved: Resolved) -> EngineConfig:
        """Build from values that were checked already, keeping their origins."""
        names = engine_options()
        values = {name: resolved.values[name] for name in names}
        origins = {name: resolved.origins[name] for name in names}
        return cls(**values, origins=origins)  # type: ignore[arg-type]

    @cached_property
    def contract(self) -> Numerics:
        """The resolved tree of switches; raises NumericsRefused if one is too loose.

        Raises ConfigError if an installed plug-in is broken.
        """
        given: dict[str, Value] = {one.name: getattr(self, one.name) for one in SWITCHES}
        envelope = installed().require_sound().envelopes[self.numerics]
        return resolve_numerics(envelope, given, self.origins)

    def with_options(self, **values: object) -> EngineConfig:
        """A copy in which *values* stand as arguments, over whatever stood there; all checked."""
        origins = {**self.origins, **dict.fromkeys(values, ARGUMENT)}
        return dataclasses.replace(self, **values, origins=origins)  # type: ignore[arg-type]

    def derive(self, rule: str, **values: object) -> EngineConfig:
        """A copy in which *values* replace what was not given, with origin ``derived: rule``.

        A value that was given is kept; deriving never overrides a user.
        """
        open_names = [name for name in values if self.origins[name] == DEFAULT]
        origins = {**self.origins, **dict.fromkeys(open_names, f"derived: {rule}")}
        changes = {name: values[name] for name in open_names}
        return dataclasses.replace(self, **changes, origins=origins)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, object]:
        """Every option with its value, in the order of the option tables."""
        return {name: getattr(self, name) for name in engine_options()}


def _is_default(value: object, default: object) -> bool:
    """Equal and of one type: 256.0 is not the default 256, and has to be checked."""
    return type(value) is type(default) and value == default


def engine_options() -> Mapping[str, Option]:
    """The options of EngineConfig by name: model, contract, engine, parallel."""
    groups = (ModelOptions, ContractOptions, EngineOptions, ParallelOptions)
    return {name: one for group in groups for name, one in options_of(group).items()}
