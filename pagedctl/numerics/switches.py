"""The tree of numerical switches as data, and its resolution under a contract. No torch.

A contract only tightens: it sets every switch that was not given, keeps an explicit value
that is equally tight, and refuses one that is looser, naming the switch, the value and the
rule. ``docs/contracts.md`` is the page about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagedctl.errors import Fault, NumericsRefused

Value = bool | str | int | None
Changes = Literal["forward values", "logprobs only", "sampled tokens", "nothing"]

LOGPROB_ORDER_PATTERN = r"torch|blockwise(-direct)?(-[1-9]\d*)?"


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One switch. ``loose`` is its value without a contract.

    ``tight`` lists the values that keep a bitwise contract, the contract's own choice first;
    None means that every value does.
    """

    name: str
    loose: Value
    tight: tuple[Value, ...] | None
    changes: Changes
    rule: str


SWITCHES: tuple[Switch, ...] = (
    Switch(
        name="deterministic_kernels",
        loose=False,
        tight=(True,),
        changes="forward values",
        rule="no autotune, no TF32, no atomics in a sum",
    ),
    Switch(
        name="batch_invariant",
        loose=False,
        tight=(True,),
        changes="forward values",
        rule="only leaves that declare batch_invariant, one declared order per call site",
    ),
    Switch(
        name="deterministic_collectives",
        loose=False,
        tight=(True,),
        changes="forward values",
        rule="data movement and a fold in rank order",
    ),
    Switch(
        name="symmetric_memory",
        loose=True,
        tight=(False,),
        changes="forward values",
        rule="no symmetric-memory route and no distributed arg-max",
    ),
    Switch(
        name="layer_boundary_norm",
        loose=None,
        tight=("unfused",),
        changes="forward values",
        rule="the residual sum is rounded to the model's dtype before the norm reads it",
    ),
    Switch(
        name="rope_table_dtype",
        loose="float32",
        tight=None,
        changes="forward values",
        rule="dtype to which the cos/sin table is rounded",
    ),
    Switch(
        name="norm_cast",
        loose="before",
        tight=None,
        changes="forward values",
        rule="the normalised value is rounded before or after the weight is applied",
    ),
    Switch(
        name="activation_rounding",
        loose="model",
        tight=None,
        changes="forward values",
        rule="dtype of silu(gate) before it meets up",
    ),
    Switch(
        name="softmax_p_dtype",
        loose="model",
        tight=None,
        changes="forward values",
        rule="dtype of the attention probabilities before P V",
    ),
    Switch(
        name="head_dtype",
        loose="model",
        tight=None,
        changes="forward values",
        rule="dtype of the output projection's inputs",
    ),
    Switch(
        name="yarn_ramp_mask_device",
        loose="host",
        tight=None,
        changes="forward values",
        rule="where YaRN's ramp is computed",
    ),
    Switch(
        name="yarn_frequency_device",
        loose="host",
        tight=None,
        changes="forward values",
        rule="where YaRN's frequencies are computed",
    ),
    Switch(
        name="padded_vocab_size",
        loose=None,
        tight=None,
        changes="logprobs only",
        rule="padding columns are exactly minus infinity",
    ),
    Switch(
        name="logprob_order",
        loose="torch",
        tight=None,
        changes="logprobs only",
        rule="block sums of the log-softmax and the form of the last subtraction",
    ),
    Switch(
        name="logprob_basis",
        loose="scaled",
        tight=None,
        changes="logprobs only",
        rule="what the reported logprob is of",
    ),
    Switch(
        name="temperature_form",
        loose="divide",
        tight=None,
        changes="sampled tokens",
        rule="one division by T, or one product with its reciprocal",
    ),
)

FIXED: Mapping[str, Value] = {"sampling_stream": "per-request", "ties": "lowest index"}
"""Held in every contract; shown in the tree, no flag."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A preset over the tree of switches."""

    name: str
    bitwise: bool
    promise: str


CONTRACTS: Mapping[str, Contract] = {
    "fast": Contract(name="fast", bitwise=False, promise="no bitwise promise"),
    "invariant": Contract(
        name="invariant",
        bitwise=True,
        promise="a request's ids and fp32 logprobs are bitwise equal whatever shares its batch",
    ),
}

LATER_CONTRACTS = ("rl-bitwise",)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A switch's resolved value and who set it: ``contract``, ``always``, or an origin."""

    value: Value
    set_by: str
    changes: Changes


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """A resolved contract: every switch with its value, in the tree's order."""

    contract: Contract
    topology_invariant: bool = False
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __getitem__(self, switch: str) -> Value:
        return self.settings[switch].value


def resolve_numerics(
    contract_name: str,
    given: Mapping[str, Value],
    origins: Mapping[str, str],
    *,
    topology_invariant: bool = False,
) -> Numerics:
    """Resolve the tree under a contract.

    ``given`` holds explicit values (None = not given) and ``origins`` where each came from.
    Raises NumericsRefused that lists every explicit value looser than the contract.
    """
    contract = CONTRACTS[contract_name]
    faults = [
        _looser(contract, switch, given[switch.name], origins.get(switch.name, "argument"))
        for switch in SWITCHES
        if given.get(switch.name) is not None and _is_looser(contract, switch, given[switch.name])
    ]
    if topology_invariant and not contract.bitwise:
        faults.append(_topology_needs_bitwise(contract, origins))
    if faults:
        raise NumericsRefused.of(faults)
    settings = {
        switch.name: _setting(contract, switch, given.get(switch.name), origins)
        for switch in SWITCHES
    }
    for name, value in FIXED.items():
        settings[name] = Setting(value=value, set_by="always", changes="sampled tokens")
    return Numerics(contract=contract, topology_invariant=topology_invariant, settings=settings)


def _is_looser(contract: Contract, switch: Switch, value: Value) -> bool:
    return contract.bitwise and switch.tight is not None and value not in switch.tight


def _setting(
    contract: Contract, switch: Switch, value: Value, origins: Mapping[str, str]
) -> Setting:
    if value is not None:
        set_by = origins.get(switch.name, "argument")
        return Setting(value=value, set_by=set_by, changes=switch.changes)
    if contract.bitwise and switch.tight is not None:
        return Setting(value=switch.tight[0], set_by="contract", changes=switch.changes)
    return Setting(value=switch.loose, set_by="default", changes=switch.changes)


def _looser(contract: Contract, switch: Switch, value: Value, origin: str) -> Fault:
    assert switch.tight is not None
    tight = " or ".join(_spelled(one) for one in switch.tight)
    return Fault(
        what=f"{switch.name} {_spelled(value)} is looser than the contract {contract.name}",
        where=f"switch {switch.name}, set by {origin}",
        rule=f"{contract.name} needs {switch.name} {tight}: {switch.rule}",
        remedy=f"drop {switch.name}, or use --numerics fast",
    )


def _topology_needs_bitwise(contract: Contract, origins: Mapping[str, str]) -> Fault:
    return Fault(
        what=f"topology_invariant cannot be kept under the contract {contract.name}",
        where=f"switch topology_invariant, set by {origins.get('topology_invariant', 'argument')}",
        rule="equal bits at every tp need a bitwise contract",
        remedy="use --numerics invariant, or drop topology_invariant",
    )


def _spelled(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
