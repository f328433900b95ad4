"""Resolves the tree of switches under a contract: tighten, veto, refuse. No torch.

A contract only tightens: it sets every switch that was not given, keeps an explicit value
that is equally tight, and refuses one that is looser, naming the switch, the value and the
rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagedctl.errors import Fault, NumericsRefused
from pagedctl.numerics.foreign_code import faults_of_code
from pagedctl.numerics.switches import (
    FIXED,
    SWITCHES,
    Changes,
    Switch,
    Value,
    spelled,
    switch_named,
)

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
    """A resolved contract: every switch with its value, in the tree's order.

    ``device`` and ``tp`` say where it holds; device None: not chosen yet.
    """

    contract: Envelope
    settings: Mapping[str, Setting] = field(default_factory=dict)
    device: str | None = None
    tp: int = 1

    def __getitem__(self, switch: str) -> Value:
        return self.settings[switch].value

    def on_device(self, device: str, *, tp: int = 1) -> Numerics:
        """The tree as it holds on *tp* ranks of a device; without CUDA, cuda means cpu."""
        if device == "cuda":
            return replace(self, device=device, tp=tp)
        moved = {
            name: replace(one, value="cpu", note="cuda means cpu: this run has no CUDA device")
            for name, one in self.settings.items()
            if name.startswith("yarn_") and one.value == "cuda"
        }
        return replace(self, settings={**self.settings, **moved}, device=device, tp=tp)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An explicit value that the contract did not take, and why."""

    switch: str
    value: Value
    fault: Fault


class Choices:
    """The tree while a contract resolves it; a contract's resolver is called with this.

    ``given`` holds explicit values (None = not given) and ``origins`` where each came from.
    What was tightened or vetoed once stays so: a later call only narrows it, and one that
    would widen it is a fault of the contract, which then holds nowhere.
    """

    def __init__(
        self, contract_name: str, given: Mapping[str, Value], origins: Mapping[str, str]
    ) -> None:
        self.contract_name = contract_name
        self.given: Mapping[str, Value] = MappingProxyType(
            {name: value for name, value in given.items() if value is not None}
        )
        self.origins = origins
        self.refused: list[Refused] = []
        self.faults: list[Fault] = []
        self._set: dict[str, Value] = {}
        self._kept: dict[str, tuple[Value, ...]] = {}
        self._barred: dict[str, tuple[Value, ...]] = {}

    def value(self, switch: str) -> Value:
        """What *switch* is so far: given, set by the contract, or its loose value."""
        loose = switch_named(switch).loose
        return self._set.get(switch, self.given.get(switch, loose))

    def origin(self, switch: str) -> str:
        """Who set *switch* so far: ``contract``, or where its explicit value came from."""
        return CONTRACT if switch in self._set else self.origins.get(switch, "argument")

    def tighten(self, switch: str, *values: Value) -> None:
        """Only *values* keep the contract: the first is set, an explicit other is refused.

        Raises KeyError or ValueError if there is no such switch, or no such value of it.
        """
        known = _checked(switch, values)
        left = tuple(one for one in values if self._allows(switch, one))
        if not left:
            self._contradiction(known, " or ".join(spelled(one) for one in values))
            return
        self._kept[switch] = left
        if self.value(switch) not in left or not self._is_set(switch):
            self._hold(switch, left[0], " or ".join(spelled(one) for one in left), known.rule)

    def veto(self, switch: str, value: Value, *, instead: Value, why: str) -> None:
        """*value* alone breaks the contract: where it stands by default, *instead* is set.

        Raises KeyError or ValueError if there is no such switch, or no such value of it.
        """
        known = _checked(switch, (value, instead))
        stands = self.value(switch) == value
        if stands and (instead == value or not self._allows(switch, instead)):
            self._contradiction(known, spelled(instead))
            return
        self._barred[switch] = (*self._barred.get(switch, ()), value)
        if stands:
            self._hold(switch, instead, f"another value than {spelled(value)}", why)

    def refuse(self, fault: Fault) -> None:
        """The contract cannot be kept at all."""
        self.faults.append(fault)

    def _is_set(self, switch: str) -> bool:
        return switch in self.given or switch in self._set

    def _allows(self, switch: str, value: Value) -> bool:
        kept = self._kept.get(switch)
        return (kept is None or value in kept) and value not in self._barred.get(switch, ())

    def _hold(self, switch: str, value: Value, needs: str, rule: str) -> None:
        """Set *switch*; an explicit value, which is looser, is refused once."""
        first = switch not in self._set
        origin = self.origin(switch)
        self._set[switch] = value
        if switch not in self.given or not first:
            return
        given, contract = self.given[switch], self.contract_name
        fault = Fault(
            what=f"{switch} {spelled(given)} is looser than the contract {contract}",
            where=f"switch {switch}, set by {origin}",
            rule=f"{contract} needs {switch} {needs}: {rule}",
            remedy=f"drop {switch}, or use --numerics fast",
        )
        self.refused.append(Refused(switch=switch, value=given, fault=fault))
        self.faults.append(fault)

    def _contradiction(self, switch: Switch, asked: str) -> None:
        held = " or ".join(spelled(one) for one in self._kept.get(switch.name, ()))
        barred = " or ".join(spelled(one) for one in self._barred.get(switch.name, ()))
        needs = held or f"another value than {barred or asked}"
        self.refuse(
            Fault(
                what=f"the contract {self.contract_name} loosens {switch.name} to {asked}",
                where=f"contract {self.contract_name}, switch {switch.name}",
                rule=f"it already needs {switch.name} {needs}, and a contract only tightens",
                remedy="mend the package that offers the contract, or use another one",
            )
        )

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
    """Resolve the tree and keep the refusals beside it, for a display of both.

    A resolver that fails holds nowhere, like one that refuses.
    """
    choices = Choices(envelope.name, given, origins)
    failed = faults_of_code(
        f"the resolver of the contract {envelope.name}", lambda: envelope.settle(choices)
    )
    if failed is not None:
        choices.refuse(failed)
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


def _checked(switch: str, values: tuple[Value, ...]) -> Switch:
    """The switch, which has each of *values*; raises KeyError or ValueError."""
    known = switch_named(switch)
    for value in values:
        if not known.takes(value):
            raise ValueError(f"{value!r} is no value of the switch {switch}")
    if not values:
        raise ValueError(f"no value is left for the switch {switch}")
    return known
