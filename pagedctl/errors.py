"""The error family: every refusal says what, where, the rule that was broken and the remedy.

An error carries one or more :class:`Fault` records, because all faults of one input are
reported together. These errors are answers to a user, not crashes: the command line
prints them without a traceback and exits 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

MAX_FAULTS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One broken rule.

    Example: ``Fault(what="top_p 1.5 is out of range", where='prompts.jsonl, line 3 (id
    "q17"), field top_p', rule="0 < top_p <= 1", remedy="use a value in (0, 1]")``.
    """

    what: str
    where: str
    rule: str
    remedy: str

    def lines(self) -> list[str]:
        """The fault as printed: one line per part."""
        return [
            f"error: {self.what}",
            f"where: {self.where}",
            f"rule: {self.rule}",
            f"remedy: {self.remedy}",
        ]

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class PagedctlError(Exception):
    """Base of all refusals; ``faults`` is never empty."""

    def __init__(self, what: str, *, where: str, rule: str, remedy: str) -> None:
        self._set_faults((Fault(what=what, where=where, rule=rule, remedy=remedy),))

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> Self:
        """One error holding every fault found in one input; *faults* must not be empty."""
        error = cls.__new__(cls)
        error._set_faults(tuple(faults))
        return error

    def _set_faults(self, faults: tuple[Fault, ...]) -> None:
        if not faults:
            raise ValueError("an error needs at least one fault")
        self.faults = faults
        Exception.__init__(self, "\n".join(self.lines()))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild, (type(self), self.faults)

    @property
    def what(self) -> str:
        return self.faults[0].what

    @property
    def where(self) -> str:
        return self.faults[0].where

    @property
    def rule(self) -> str:
        return self.faults[0].rule

    @property
    def remedy(self) -> str:
        return self.faults[0].remedy

    def lines(self) -> list[str]:
        """All faults as printed: the first 20, then a count of the rest."""
        shown = self.faults[:MAX_FAULTS_SHOWN]
        lines = [line for fault in shown for line in fault.lines()]
        hidden = len(self.faults) - len(shown)
        if hidden:
            lines.append(f"error: {hidden} more faults of this input are not shown")
        return lines

    def as_dict(self) -> dict[str, object]:
        """The manifest's ``error`` object: the first fault, and all of them if several."""
        head: dict[str, object] = dict(self.faults[0].as_dict())
        if len(self.faults) > 1:
            head["faults"] = [fault.as_dict() for fault in self.faults]
        return head


def _rebuild(kind: type[PagedctlError], faults: tuple[Fault, ...]) -> PagedctlError:
    return kind.of(faults)


class ConfigError(PagedctlError):
    """A flag, environment variable, plan key, or keyword argument cannot be used."""


class ModelError(PagedctlError):
    """A config.json, tokenizer, or checkpoint cannot be served."""


class RequestError(PagedctlError):
    """One request cannot be served; others are.

    ``kind`` is the machine-readable reason of an error line, for example
    ``out_of_vocabulary``.
    """

    kind: str = "bad_field"

    @classmethod
    def of_kind(cls, kind: str, faults: Iterable[Fault]) -> Self:
        error = cls.__new__(cls)
        error.kind = kind
        error._set_faults(tuple(faults))
        return error

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild_request, (self.kind, self.faults)


def _rebuild_request(kind: str, faults: tuple[Fault, ...]) -> RequestError:
    return RequestError.of_kind(kind, faults)


class NumericsRefused(PagedctlError):
    """A numerical contract cannot be kept with what was asked for."""


class CapacityError(PagedctlError):
    """Something does not fit into the memory it was given."""


class NonFiniteError(PagedctlError):
    """A forward pass produced NaN, or infinity where only finite values are legal."""


class DesyncError(PagedctlError):
    """The ranks of one engine no longer agree on the step they are about to run."""


class RankLostError(PagedctlError):
    """A rank died or did not arrive within the collective timeout."""


def nearest(name: str, known: Mapping[str, object] | Iterable[str]) -> str | None:
    """The known name closest to *name*, or None if nothing is close."""
    from difflib import get_close_matches

    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
