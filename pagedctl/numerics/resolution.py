"""Resolves the tree of switches under a contract: tighten, veto, refuse. No torch.

A contract only tightens: it sets every switch that was not given, keeps an explicit value
that is equally tight, and refuses one that is looser, naming the switch, the value and the
rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pagedctl.errors import Fault, NumericsRefused
from pagedctl.numerics.switches import FIXED, SWITCHES, Changes, Value, switch_named

if TYPE_CHECKING:
    from pagedctl.numerics.envelopes import Envelope

CONTRACT, ALWAYS = "contract", "always"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A switch's resolved value and who set it: ``contract``, ``always``, or an origin.

    ``note`` says where the value that holds is not the one that was chosen.
    """

    value: Value
    set_by: str
    changes: Changes
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """A resolved contract: every switch with its value, in the tree's order."""

    contract: Envelope
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __getitem__(self, switch: str) -> Value:
        return self.settings[switch].value

    def on_device(self, device: str) -> Numerics:
        """The tree as it holds on ``cpu`` or ``cuda``: without CUDA, cuda means cpu."""
        if device == "cuda":
            return self
        moved = {
            name: replace(one, value="cpu", note="cuda means cpu: this run has no CUDA device")
            for name, one in self.settings.items()
            if name.startswith("yarn_") and one.value == "cuda"
        }
        return replace(self, settings={**self.settings, **moved})


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An explicit value that the contract did not take, and why."""

    switch: str
    value: Value
    fault: Fault


class Choices:
    """The tree while a contract resolves it; a contract's resolver is called with this.

    ``given`` holds explicit values (None = not given) and ``origins`` where each came from.
    """

    def __init__(
        self, contract_name: str, given: Mapping[str, Value], origins: Mapping[str, str]
    ) -> None:
        self.contract_name = contract_name
        self.given = {name: value for name, value in given.items() if value is not None}
        self.origins = origins
        self.refused: list[Refused] = []
        self.faults: list[Fault] = []
        self._set: dict[str, Value] = {}

    def value(self, switch: str) -> Value:
        """What *switch* is so far: given, set by the contract, or its loose value."""
        loose = switch_named(switch).loose
        return self._set.get(switch, self.given.get(switch, loose))

    def origin(self, switch: str) -> str:
        return self.origins.get(switch, "argument")

    def tighten(self, switch: str, *values: Value) -> None:
        """Only *values* keep the contract: the first is set, an explicit other is refused."""
        if self.given.get(switch) in values:
            return
        self._set[switch] = values[0]
        if switch in self.given:
            needed = " or ".join(spelled(one) for one in values)
            self._refuse_value(switch, f"{needed}: {switch_named(switch).rule}")

    def veto(self, switch: str, value: Value, *, instead: Value, why: str) -> None:
        """*value* alone breaks the contract: where it stands by default, *instead* is set."""
        if self.value(switch) != value:
            return
        self._set[switch] = instead
        if switch in self.given:
            self._refuse_value(switch, f"another value than {spelled(value)}: {why}")

    def refuse(self, fault: Fault) -> None:
        """The contract cannot be kept at all."""
        self.faults.append(fault)

    def _refuse_value(self, switch: str, needs: str) -> None:
        value, contract = self.given[switch], self.contract_name
        fault = Fault(
            what=f"{switch} {spelled(value)} is looser than the contract {contract}",
            where=f"switch {switch}, set by {self.origin(switch)}",
            rule=f"{contract} needs {switch} {needs}",
            remedy=f"drop {switch}, or use --numerics fast",
        )
        self.refused.append(Refused(switch=switch, value=value, fault=fault))
        self.faults.append(fault)

    def settings(self) -> dict[str, Setting]:
        """Every switch as it came out, in the tree's order."""
        found = {one.name: self._setting(one.name) for one in SWITCHES}
        for name, value in FIXED.items():
            found[name] = Setting(value=value, set_by=ALWAYS, changes="sampled tokens")
        return found

    def _setting(self, name: str) -> Setting:
        by_contract = name in self._set
        set_by = CONTRACT if by_contract else self.origin(name) if name in self.given else "default"
        return Setting(value=self.value(name), set_by=set_by, changes=switch_named(name).changes)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The tree as the contract would have it, and what it refuses; sound without faults."""

    numerics: Numerics
    refused: tuple[Refused, ...]
    faults: tuple[Fault, ...]


def draft_numerics(
    envelope: Envelope, given: Mapping[str, Value], origins: Mapping[str, str]
) -> Resolution:
    """Resolve the tree and keep the refusals beside it, for a display of both."""
    choices = Choices(envelope.name, given, origins)
    envelope.resolve(choices)
    return Resolution(
        numerics=Numerics(contract=envelope, settings=choices.settings()),
        refused=tuple(choices.refused),
        faults=tuple(choices.faults),
    )


def resolve_numerics(
    envelope: Envelope, given: Mapping[str, Value], origins: Mapping[str, str]
) -> Numerics:
    """Resolve the tree; raises NumericsRefused with every refusal."""
    resolution = draft_numerics(envelope, given, origins)
    if resolution.faults:
        raise NumericsRefused.of(resolution.faults)
    return resolution.numerics


def spelled(value: Value) -> str:
    """A switch's value as the command line spells it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
