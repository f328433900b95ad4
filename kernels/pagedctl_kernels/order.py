"""Orders: the declared arithmetic of a leaf, and the ``arithmetic_id`` that hashes them.

Two leaves whose orders are equal must give the same bits for the same inputs. An order is
a function of the contraction length, the dtypes, the contract and the device class. It
never names a row count, an output width, a shard or a fusion. ``docs/arithmetic.md`` is
the page that explains every term.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FORBIDDEN_FACTS = frozenset({"rows", "n", "num_tokens", "num_seqs", "shard", "tp"})


@dataclass(frozen=True, kw_only=True)
class Order:
    """One op's arithmetic on one device class, every placeholder filled in.

    Example: ``Order(op="gemm", device_class="cpu", terms=(("inputs", "bfloat16"),
    ("chain", "library product of [16, 4096] x [4096, N] blocks"), ...))``.
    """

    op: str
    device_class: str
    terms: tuple[tuple[str, str], ...]

    def canonical(self) -> str:
        """The text that is hashed: one line of JSON, keys sorted."""
        return json.dumps(
            {"op": self.op, "device_class": self.device_class, "terms": dict(self.terms)},
            sort_keys=True,
            separators=(",", ":"),
        )

    def differences(self, other: Order) -> tuple[str, ...]:
        """Each term in which *self* and *other* disagree, as text for an error."""
        mine, theirs = self._all_terms(), other._all_terms()
        names = list(dict.fromkeys([*mine, *theirs]))
        return tuple(
            f"{name}: {mine.get(name, '(absent)')} here, {theirs.get(name, '(absent)')} required"
            for name in names
            if mine.get(name) != theirs.get(name)
        )

    def _all_terms(self) -> dict[str, str]:
        return {"op": self.op, "device_class": self.device_class, **dict(self.terms)}


@dataclass(frozen=True, kw_only=True)
class OrderTemplate:
    """An order as a leaf declares it: terms may hold ``{fact}`` placeholders.

    A placeholder is filled from the call site's facts and the machine when a plan is
    selected. Facts that vary with the batch, the shard or the fusion are refused here, so
    no leaf can declare an order that depends on them.
    """

    op: str
    device_class: str
    terms: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.terms]
        if len(set(names)) != len(names):
            raise ValueError(f"order of {self.op} names a term twice: {names}")
        forbidden = sorted(self.placeholders() & FORBIDDEN_FACTS)
        if forbidden:
            raise ValueError(f"order of {self.op} may not depend on {', '.join(forbidden)}")

    def placeholders(self) -> frozenset[str]:
        formatter = string.Formatter()
        return frozenset(
            field
            for _, text in self.terms
            for _, field, _, _ in formatter.parse(text)
            if field is not None
        )

    def resolve(self, facts: Mapping[str, object]) -> Order:
        """Fill every placeholder from *facts*; a missing fact raises KeyError."""
        used = {name: facts[name] for name in self.placeholders()}
        terms = tuple((name, text.format(**used)) for name, text in self.terms)
        return Order(op=self.op, device_class=self.device_class, terms=terms)


def arithmetic_id(orders: Iterable[Order]) -> str:
    """The identity of an arithmetic: sha256 over the set of distinct orders, 16 hex digits.

    It is a set, so binding q, k and v apart or fused, or one layer or forty, gives the same
    identity: which order serves a call site follows from op, contraction length and dtypes,
    and those are terms of the order.
    """
    lines = sorted({order.canonical() for order in orders})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
