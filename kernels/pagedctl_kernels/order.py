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

ORDER_FACTS = frozenset(
    {
        *("k", "width", "head_dim", "internal", "isa", "library", "threads"),
        *("norm_cast", "qk_norm", "softmax_p_dtype", "activation_rounding"),
        *(
            "rope_table_form",
            "rope_table_dtype",
            "head_dtype",
            "form",
            "temperature_form",
            "block_size",
        ),
        *("x_dtype", "w_dtype", "y_dtype", "kv_dtype"),
    }
)
"""What an order may depend on: contraction lengths, dtypes, the contract's switches, the machine.

``block_size`` is the width of a sum-exp block; the other block size, of the KV cache, is no
fact of any op that sums over blocks.
"""


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
    selected. Only ORDER_FACTS may be named, so no leaf can declare an order that depends on
    the batch, the shard, the fusion or the output width.
    """

    op: str
    device_class: str
    terms: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.terms]
        if len(set(names)) != len(names):
            raise ValueError(f"order of {self.op} names a term twice: {names}")
        forbidden = sorted(self.placeholders() - ORDER_FACTS)
        if self.op not in ("block_sumexp", "logprob"):
            forbidden += sorted(self.placeholders() & {"block_size"})
        if forbidden:
            raise ValueError(f"order of {self.op} may not depend on {', '.join(forbidden)}")

    def placeholders(self) -> frozenset[str]:
        """The facts named in the terms; a conversion or format counts as part of the name."""
        formatter = string.Formatter()
        return frozenset(
            f"{field}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}"
            for _, text in self.terms
            for _, field, spec, conversion in formatter.parse(text)
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
