"""Contracts (envelopes): named presets over the tree of switches, and their registry. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, get_args

from pagedctl.errors import Fault
from pagedctl.numerics.combination import Command
from pagedctl.numerics.foreign_code import faults_of_code
from pagedctl.numerics.resolution import Choices, Numerics

BLOCKWISE = "blockwise"
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


class CheckpointFacts(Protocol):
    """What a contract may ask of a model before its weights are read."""

    @property
    def family(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def output_vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...


Resolver = Callable[[Choices], None]
CheckpointCheck = Callable[[CheckpointFacts, Numerics], Iterable[Fault]]


def any_checkpoint(facts: CheckpointFacts, numerics: Numerics) -> Iterable[Fault]:
    """The validator of a contract that takes every model."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """A contract. ``resolve`` tightens, vetoes and refuses on the tree of switches.

    ``check_checkpoint`` yields a fault for each rule that a model breaks. ``evidence`` are the
    commands whose verification records grant the contract, all of them together. Whatever pins
    something for a contract asks for ``bitwise``, never for one name, so that an envelope of a
    plug-in inherits every pin. Raises ValueError or TypeError for what is no contract.
    """

    name: str
    bitwise: bool
    promise: str
    resolve: Resolver
    check_checkpoint: CheckpointCheck = any_checkpoint
    evidence: tuple[Command, ...] = ("invariance",)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(f"{self.name!r} cannot name a contract: letters, digits, - _ and .")
        if not isinstance(self.bitwise, bool) or not isinstance(self.promise, str):
            raise TypeError(f"contract {self.name}: bitwise is a bool and promise a text")
        if not callable(self.resolve) or not callable(self.check_checkpoint):
            raise TypeError(f"contract {self.name}: resolve and check_checkpoint are functions")
        self._check_evidence()

    def _check_evidence(self) -> None:
        """Without the record of ``invariance``, nobody has tried what a contract promises."""
        commands = get_args(Command)
        if not isinstance(self.evidence, tuple):
            raise TypeError(f"contract {self.name}: evidence is a tuple of commands")
        if "invariance" not in self.evidence or set(self.evidence) - set(commands):
            raise ValueError(
                f"contract {self.name}: evidence is invariance, and may be more of "
                f"{', '.join(commands)}, not {self.evidence!r}"
            )

    def settle(self, choices: Choices) -> None:
        """Resolve the tree. What every bitwise contract needs is held before ``resolve`` runs.

        So no resolver can loosen it, and a contract without bits of its own promises none at
        another tp.
        """
        if self.bitwise:
            keep_invariance(choices)
        self.resolve(choices)
        if not self.bitwise:
            refuse_topology(choices)

    def checkpoint_faults(self, facts: CheckpointFacts, numerics: Numerics) -> tuple[Fault, ...]:
        """What ``check_checkpoint`` finds; code of it that fails is a fault like any."""

        def run() -> tuple[Fault, ...]:
            found = tuple(self.check_checkpoint(facts, numerics))
            for one in found:
                if not isinstance(one, Fault):
                    raise TypeError(f"{one!r} is no Fault")
            return found

        found = faults_of_code(f"check_checkpoint of the contract {self.name}", run)
        return (found,) if isinstance(found, Fault) else found


class Envelopes:
    """An immutable registry of contracts, each name once, in the order of registration."""

    def __init__(self, envelopes: Iterable[Envelope]) -> None:
        self._by_name: dict[str, Envelope] = {}
        for one in envelopes:
            if one.name in self._by_name:
                raise ValueError(f"contract {one.name} is registered twice")
            self._by_name[one.name] = one

    def __getitem__(self, name: str) -> Envelope:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Envelope]:
        return iter(self._by_name.values())

    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def bitwise_names(self) -> tuple[str, ...]:
        """The set of bitwise contracts."""
        return tuple(one.name for one in self if one.bitwise)

    def with_envelopes(self, envelopes: Iterable[Envelope]) -> Envelopes:
        """A new registry that also holds *envelopes*; this one is unchanged."""
        return Envelopes([*self, *envelopes])


def keep_invariance(choices: Choices) -> None:
    """Run and batch invariance: what every bitwise contract begins with."""
    choices.tighten("deterministic_kernels", True)
    choices.tighten("batch_invariant", True)
    choices.tighten("deterministic_collectives", True)
    choices.tighten("symmetric_memory", False)
    choices.tighten("layer_boundary_norm", "unfused")


def refuse_topology(choices: Choices) -> None:
    """The same bits at every tp cannot be promised where the bits of one tp are not."""
    if choices.value("topology_invariant"):
        choices.refuse(
            Fault(
                what=f"topology_invariant cannot be kept under the contract "
                f"{choices.contract_name}",
                where=f"switch topology_invariant, set by {choices.origin('topology_invariant')}",
                rule="equal bits at every tp need a bitwise contract",
                remedy="use --numerics invariant, or drop topology_invariant",
            )
        )


def add_nothing(choices: Choices) -> None:
    """The resolver of a contract that leaves the rest of the tree as it is."""


def keep_alignment(choices: Choices) -> None:
    """The trainer's form wherever the two engines are known to differ."""
    choices.veto(
        "logprob_order",
        "torch",
        instead=BLOCKWISE,
        why="a trainer sums its log-softmax over blocks of the vocabulary",
    )
    choices.tighten("yarn_ramp_mask_device", "cpu")
    choices.tighten("yarn_frequency_device", "cuda")


FAST = Envelope(name="fast", bitwise=False, promise="no bitwise promise", resolve=add_nothing)
INVARIANT = Envelope(
    name="invariant",
    bitwise=True,
    promise="a request's ids and fp32 logprobs are bitwise equal whatever shares its batch",
    resolve=add_nothing,
)
RL_BITWISE = Envelope(
    name="rl-bitwise",
    bitwise=True,
    promise="invariant, and a teacher-forced pass gives the trainer's logprobs, bitwise",
    resolve=keep_alignment,
    evidence=("invariance", "align"),
)


def house_envelopes() -> Envelopes:
    """The contracts that the package ships."""
    return Envelopes((FAST, INVARIANT, RL_BITWISE))
