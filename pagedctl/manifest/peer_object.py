"""One object of a peer's file: values by key, each of its kind or a fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

from pagedctl.errors import Fault
from pagedctl.manifest.peer_result import LatencyStats

_STATISTICS = tuple(each.name for each in fields(LatencyStats))
_INFINITE = ("inf", "infinity")


class PeerObject:
    """Reads by presence: an absent key and null are None; what is ill-typed is collected.

    ``values`` is the object, ``where`` names file and line; ``faults`` grows.
    """

    def __init__(self, values: Mapping[str, object], where: str, faults: list[Fault]) -> None:
        self.values = values
        self._where = where
        self._faults = faults

    def number(self, key: str) -> float | None:
        """A number of any kind, NaN and infinities included."""
        value = self.values.get(key)
        if value is None or _is_number(value):
            return value  # type: ignore[return-value]
        self._add_fault(key, "a number or null")
        return None

    def count(self, key: str) -> float | None:
        """A whole number, which another program may have rewritten as 64.0; an int."""
        value = self.number(key)
        if value is None or not math.isfinite(value):
            return value
        if value == int(value):
            return int(value)
        self._add_fault(key, "a whole number or null")
        return None

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        self._add_fault(key, "a string or null")
        return None

    def items(self, key: str) -> list[object] | None:
        value = self.values.get(key)
        if value is None or isinstance(value, list):
            return value
        self._add_fault(key, "a list or null")
        return None

    def child(self, key: str) -> PeerObject:
        """The object at *key*; an empty one if there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self._add_fault(key, "an object or null")
        values = value if isinstance(value, dict) else {}
        return PeerObject(values, f"{self._where}, key {key}", self._faults)

    def latency(self, name: str) -> LatencyStats | None:
        """``mean_<name>_ms``, ``p99_<name>_ms``, ...; None where the source measured nothing.

        vLLM and SGLang write 0 for every statistic of an empty list (no request completed, a
        server that does not stream, outputs of one token). No latency has a mean of 0.
        """
        found = {statistic: self.number(f"{statistic}_{name}_ms") for statistic in _STATISTICS}
        if found["mean"] == 0 or all(value is None for value in found.values()):
            return None
        return LatencyStats(**found)

    def request_rate(self) -> float | None:
        """Requests per second; "no limit" is spelled Infinity, "inf" or null.

        None where the file does not say: the key is absent, holds another word ("trace"), or the
        rate was ramped.
        """
        if "request_rate" not in self.values or self.values.get("ramp_up_strategy") is not None:
            return None
        value = self.values["request_rate"]
        if value is None:
            return math.inf
        if isinstance(value, str):
            return math.inf if value.lower() in _INFINITE else None
        return self.number("request_rate")

    def _add_fault(self, key: str, expected: str) -> None:
        fault = Fault(
            what=f"{key} is {_shown(self.values[key])}",
            where=f"{self._where}, key {key}",
            rule=f"{key} is {expected}",
            remedy="name the file as the tool wrote it",
        )
        if fault not in self._faults:  # several metrics may come from one key
            self._faults.append(fault)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
