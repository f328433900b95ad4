"""Contracts (envelopes): named presets over the tree of switches, and their registry. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from pagedctl.errors import Fault
from pagedctl.numerics.resolution import Choices, Numerics

BLOCKWISE = "blockwise"


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

    ``check_checkpoint`` yields a fault for each rule that a model breaks. Whatever pins
    something for a contract asks for ``bitwise``, never for one name, so that an envelope of a
    plug-in inherits every pin.
    """

    name: str
    bitwise: bool
    promise: str
    resolve: Resolver
    check_checkpoint: CheckpointCheck = any_checkpoint


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


def keep_nothing(choices: Choices) -> None:
    """``fast``: every switch keeps its value; the same bits at every tp cannot be promised."""
    if choices.given.get("topology_invariant"):
        choices.refuse(
            Fault(
                what=f"topology_invariant cannot be kept under the contract "
                f"{choices.contract_name}",
                where=f"switch topology_invariant, set by {choices.origin('topology_invariant')}",
                rule="equal bits at every tp need a bitwise contract",
                remedy="use --numerics invariant, or drop topology_invariant",
            )
        )


def keep_invariance(choices: Choices) -> None:
    """Run and batch invariance: what every bitwise contract begins with."""
    choices.tighten("deterministic_kernels", True)
    choices.tighten("batch_invariant", True)
    choices.tighten("deterministic_collectives", True)
    choices.tighten("symmetric_memory", False)
    choices.tighten("layer_boundary_norm", "unfused")


def keep_alignment(choices: Choices) -> None:
    """Invariance, and the trainer's form wherever the two engines are known to differ."""
    keep_invariance(choices)
    choices.veto(
        "logprob_order",
        "torch",
        instead=BLOCKWISE,
        why="a trainer sums its log-softmax over blocks of the vocabulary",
    )
    choices.tighten("yarn_ramp_mask_device", "cpu")
    choices.tighten("yarn_frequency_device", "cuda")


FAST = Envelope(name="fast", bitwise=False, promise="no bitwise promise", resolve=keep_nothing)
INVARIANT = Envelope(
    name="invariant",
    bitwise=True,
    promise="a request's ids and fp32 logprobs are bitwise equal whatever shares its batch",
    resolve=keep_invariance,
)
RL_BITWISE = Envelope(
    name="rl-bitwise",
    bitwise=True,
    promise="invariant, and a teacher-forced pass gives the trainer's logprobs, bitwise",
    resolve=keep_alignment,
)


def house_envelopes() -> Envelopes:
    """The contracts that the package ships."""
    return Envelopes((FAST, INVARIANT, RL_BITWISE))
