"""The acceptance grammar: ``STEP.METRIC = "OP NUMBER [* STEP.METRIC]"``.

``compare --require`` uses the same right-hand side with ``baseline`` for a step.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
}
_NAME = r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*"
_BOUND = re.compile(
    rf"\s*(?P<op>>=|<=|==)\s*(?P<factor>[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
    rf"\s*(?:\*\s*(?P<other>{_NAME})\s*)?"
)

BOUND_RULE = 'OP NUMBER [* STEP.METRIC], OP one of >= <= ==, for example ">= 0.95 * fast.metric"'


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a metric must satisfy: ``metric OP factor [* other]``."""

    op: str
    factor: float
    other: str | None = None

    def holds(self, value: float, other: float | None = None) -> bool:
        """Judge *value*; *other* is the value of ``self.other`` where there is one."""
        if (other is None) != (self.other is None):
            raise ValueError(f"bound {self} needs a value for {self.other}")
        limit = self.factor if other is None else self.factor * other
        return _COMPARE[self.op](value, limit)

    def __str__(self) -> str:
        tail = f" * {self.other}" if self.other else ""
        return f"{self.op} {self.factor:g}{tail}"


def parse_bound(text: str) -> Bound | None:
    """Parse a right-hand side; None if it does not follow the grammar."""
    match = _BOUND.fullmatch(text)
    if match is None:
        return None
    return Bound(op=match["op"], factor=float(match["factor"]), other=match["other"])
