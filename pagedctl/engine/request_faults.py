"""The faults of one request, collected so that they are reported together. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pagedctl.config.kinds import Broken
from pagedctl.errors import Fault, RequestError
from pagedctl.models.reader import shown

ErrorKind = Literal[
    "bad_json",
    "bad_field",
    "unknown_field",
    "empty_prompt",
    "out_of_vocabulary",
    "too_long",
    "never_fits",
    "duplicate_id",
    "non_finite",
    "out_of_memory",
    "rank_lost",
    "internal",
]
"""The values of ``error.kind``."""

KEEP_THE_RULE = "give a value that keeps the rule"


class BrokenField(Exception):
    """One field breaks a rule; ``what`` is the whole sentence, the field's name included."""

    def __init__(
        self, what: str, *, rule: str, remedy: str = KEEP_THE_RULE, kind: ErrorKind = "bad_field"
    ) -> None:
        super().__init__(what)
        self.what = what
        self.rule = rule
        self.remedy = remedy
        self.kind: ErrorKind = kind

    @classmethod
    def of(cls, name: str, value: object, broken: Broken) -> BrokenField:
        """A rule of an option's kind, broken by a request's field."""
        return cls(
            f"{name} {spelled(value)} {broken.problem}",
            rule=f"{name}: {broken.rule}",
            remedy=broken.remedy or KEEP_THE_RULE,
        )


class RequestFaults:
    """Every broken rule of one request, in the order found; the first decides the error's kind.

    ``where`` names the request, for example ``prompts.jsonl, line 3 (id "q17")``.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.kinds: list[ErrorKind] = []
        self.faults: list[Fault] = []

    def add(self, field: str | None, broken: BrokenField) -> None:
        """Record *broken* at *field*, or at the request as a whole."""
        where = self.where if field is None else f"{self.where}, field {field}"
        self.kinds.append(broken.kind)
        self.faults.append(
            Fault(what=broken.what, where=where, rule=broken.rule, remedy=broken.remedy)
        )

    @contextmanager
    def collecting(self, field: str | None) -> Iterator[None]:
        """Run a check of *field*; what it raises is recorded, and the next check goes on."""
        try:
            yield
        except BrokenField as broken:
            self.add(field, broken)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def error(self) -> RequestError:
        """The refusal that holds them all."""
        return RequestError.of_kind(self.kinds[0], self.faults)


def spelled(value: object) -> str:
    """*value* as a message shows it."""
    if value is None:
        return "null"
    try:
        return shown(list(value) if isinstance(value, tuple) else value)
    except ValueError:  # Python prints no integer beyond 4,300 digits
        return "<an integer too long to print>"


def plain(value: object) -> object:
    """numpy and torch values as Python's own; anything else as it is."""
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()
