"""What a call site needs and what a leaf offers: frozen data, no torch.

A *leaf* is one implementation of one op. It declares formats, hardware, static limits,
features, traits, priority and the order of its arithmetic. A *call site* is one place in a
model that needs an op, described by static facts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagedctl_kernels.machine import Machine
from pagedctl_kernels.order import Order, OrderTemplate

BATCH_INVARIANT = "batch_invariant"
"""Feature: a row's bits depend on that row's operands alone."""

DETERMINISTIC = "deterministic"
"""Feature: equal inputs in an equal batch give equal bits (no atomics, no autotune)."""

CUDA_GRAPH = "cuda_graph"
"""Feature: the leaf can be recorded into a CUDA graph."""

Fact = int | float | str | bool | None


@dataclass(frozen=True, kw_only=True)
class CallSite:
    """One place in a model that needs an op.

    ``dtypes`` maps each operand to a dtype name (``float32``, ``bfloat16``, ...); ``facts``
    holds the static geometry and semantics (``k``, ``head_dim``, ``norm_cast``, ...);
    ``varying`` names the dimensions that change from call to call (``rows``).

    Example: ``CallSite(op="gemm", name="down_proj", dtypes={"x": "bfloat16", "w":
    "bfloat16", "y": "bfloat16"}, facts={"k": 12288, "n": 4096, "bias": False})``.
    """

    op: str
    name: str
    dtypes: Mapping[str, str]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    varying: frozenset[str] = frozenset({"rows"})


@dataclass(frozen=True, kw_only=True)
class Format:
    """One accepted combination of operand dtypes; operands not named are free."""

    dtypes: tuple[tuple[str, str], ...]

    def accepts(self, dtypes: Mapping[str, str]) -> bool:
        return all(dtypes.get(operand) == dtype for operand, dtype in self.dtypes)

    def __str__(self) -> str:
        return " ".join(f"{operand}:{dtype}" for operand, dtype in self.dtypes)


def formats(*operands: str, dtypes: tuple[str, ...]) -> tuple[Format, ...]:
    """One format per dtype in which all *operands* have that dtype."""
    return tuple(Format(dtypes=tuple((operand, dtype) for operand in operands)) for dtype in dtypes)


def cache_formats(*, dtypes: tuple[str, ...]) -> tuple[Format, ...]:
    """Operand ``x`` with a KV cache ``kv`` of its dtype, or a float32 ``x`` with a bfloat16 one."""
    narrowed = Format(dtypes=(("x", "float32"), ("kv", "bfloat16")))
    return (*formats("x", "kv", dtypes=dtypes), narrowed)


@dataclass(frozen=True, kw_only=True)
class Capability:
    """The hardware a leaf runs on. ``minimum`` is a CUDA compute capability."""

    kind: str
    minimum: tuple[int, int] | None = None
    maximum: tuple[int, int] | None = None

    def refusal(self, machine: Machine) -> str | None:
        if machine.kind != self.kind:
            return f"needs a {self.kind} device, this is {machine.device_class}"
        if machine.capability is None:
            return None
        if self.minimum is not None and machine.capability < self.minimum:
            return f"needs sm_{self.minimum[0]}{self.minimum[1]}, this is {machine.device_class}"
        if self.maximum is not None and machine.capability > self.maximum:
            newest = f"sm_{self.maximum[0]}{self.maximum[1]}"
            return f"runs up to {newest}, this is {machine.device_class}"
        return None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A static bound on one fact of the call site."""

    fact: str
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int | None = None
    allowed: tuple[Fact, ...] | None = None

    def refusal(self, site: CallSite) -> str | None:
        if self.fact in site.varying:
            return f"bounds {self.fact}, which varies at this call site"
        if self.fact not in site.facts:
            return f"bounds {self.fact}, which this call site does not state"
        value = site.facts[self.fact]
        if self.allowed is not None:
            if value in self.allowed:
                return None
            return f"{self.fact} {value} is not one of {', '.join(map(str, self.allowed))}"
        return self._number_refusal(value)

    def _number_refusal(self, value: Fact) -> str | None:
        if not isinstance(value, int) or isinstance(value, bool):
            return f"{self.fact} {value!r} is not an integer"
        if self.minimum is not None and value < self.minimum:
            return f"{self.fact} {value} is below {self.minimum}"
        if self.maximum is not None and value > self.maximum:
            return f"{self.fact} {value} is above {self.maximum}"
        if self.multiple_of is not None and value % self.multiple_of:
            return f"{self.fact} {value} is not a multiple of {self.multiple_of}"
        return None


@dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """The description of one implementation.

    ``features`` are affirmed and may be required (a silent leaf is excluded); ``traits``
    are advertised and only rank. ``entry`` is ``module:function``; the function takes the
    call site and the machine and returns the bound implementation. ``priority`` ranks
    first; the name breaks ties, so selection is deterministic.
    """

    name: str
    op: str
    entry: str
    formats: tuple[Format, ...]
    capability: Capability
    order: OrderTemplate
    limits: tuple[Limit, ...] = ()
    features: frozenset[str] = frozenset()
    traits: tuple[tuple[str, str], ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        if self.order.op != self.op:
            raise ValueError(f"{self.name} implements {self.op}, its order is of {self.order.op}")
        if (self.capability.kind == "cpu") != (self.order.device_class == "cpu"):
            raise ValueError(
                f"{self.name} runs on {self.capability.kind}, its order is of "
                f"{self.order.device_class}"
            )

    def resolve_order(self, site: CallSite, machine: Machine) -> Order:
        """The order of this leaf at *site* on *machine*."""
        dtypes = {f"{operand}_dtype": dtype for operand, dtype in site.dtypes.items()}
        return self.order.resolve({**machine.facts(), **site.facts, **dtypes})


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """What a caller insists on (``features``, ``order``, ``names``) and prefers (``traits``).

    ``order`` pins the bits to those of a leaf bound earlier at the same call site or in the
    trainer. ``names`` restricts the candidates by name and bypasses nothing else.
    """

    features: frozenset[str] = frozenset()
    order: Order | None = None
    names: tuple[str, ...] | None = None
    traits: tuple[tuple[str, str], ...] = ()
