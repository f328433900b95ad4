"""Who may run a bitwise contract: a shipped profile or verification records vouch for it.

No torch. What is judged is a :class:`Combination`, which is built from a bound model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pagedctl.numerics.combination import Combination, Command, Difference, differences
from pagedctl.numerics.profiles import profile_of, profile_refusals
from pagedctl.numerics.records import Records, StoredRecord

MAX_RECORDS_TOLD = 5
MAX_KEYS_TOLD = 4


@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """Whether a contract is verified here, and who vouches for it.

    ``eligible_by`` is None where nobody does, or nobody needs to. ``reasons`` say why not, one
    line each. ``missing`` are the commands whose record would be needed. ``damaged`` tells of
    files in the records' folder that could not be read.
    """

    verified: bool
    eligible_by: str | None = None
    reasons: tuple[str, ...] = ()
    missing: tuple[Command, ...] = ()
    damaged: tuple[str, ...] = ()


NOTHING_TO_VERIFY = Eligibility(verified=True)
"""Of a contract that promises no bits."""


def judge_by_profile(found: Combination) -> Eligibility:
    """Whether a shipped profile covers *found*; no file is looked at."""
    refusals = profile_refusals(found)
    if refusals:
        return Eligibility(verified=False, reasons=refusals, missing=found.evidence)
    return Eligibility(verified=True, eligible_by=str(profile_of(found)))


def judge(found: Combination, records: Records) -> Eligibility:
    """Whether a profile covers *found*, or a record of every command that it takes."""
    by_profile = judge_by_profile(found)
    return by_profile if by_profile.verified else _judge_by_records(found, records, by_profile)


def _judge_by_records(found: Combination, records: Records, before: Eligibility) -> Eligibility:
    facts = found.facts()
    compared = [(one, differences(one.record, facts)) for one in records.sound]
    granting = {one.record.command: one for one, different in compared if not different}
    needed = found.evidence
    damaged = tuple(_damaged(records))
    if all(command in granting for command in needed):
        paths = " and ".join(str(granting[command].path) for command in needed)
        return Eligibility(verified=True, eligible_by=paths, damaged=damaged)
    reasons = (
        *before.reasons,
        *_refused_records(compared, needed),
        *_halves(granting, needed, found.contract),
        *(f"a record cannot be read: {text}" for text in damaged),
    )
    missing = tuple(command for command in needed if command not in granting)
    return Eligibility(verified=False, reasons=reasons, missing=missing, damaged=damaged)


Compared = tuple[StoredRecord, tuple[Difference, ...]]


def _refused_records(compared: Iterable[Compared], needed: tuple[Command, ...]) -> Iterator[str]:
    """The records of these commands that differ, the nearest first."""
    refused = [pair for pair in compared if pair[1] and pair[0].record.command in needed]
    refused.sort(key=lambda pair: _distance(pair[1]))
    for one, different in refused[:MAX_RECORDS_TOLD]:
        yield refusal_of(one, different)
    if len(refused) > MAX_RECORDS_TOLD:
        yield f"{len(refused) - MAX_RECORDS_TOLD} more records are stale or foreign"


def _damaged(records: Records) -> Iterator[str]:
    for error in records.damaged[:MAX_RECORDS_TOLD]:
        yield f"{error.where}: {error.what}"
    if len(records.damaged) > MAX_RECORDS_TOLD:
        yield f"{len(records.damaged) - MAX_RECORDS_TOLD} more files"


def _distance(different: tuple[Difference, ...]) -> tuple[int, int]:
    return sum(one.is_foreign for one in different), len(different)


def refusal_of(one: StoredRecord, different: tuple[Difference, ...]) -> str:
    """Why a record does not grant: stale or foreign, and each key with both values."""
    kind = "foreign" if different[0].is_foreign else "stale"
    told = "; ".join(map(str, different[:MAX_KEYS_TOLD]))
    more = len(different) - MAX_KEYS_TOLD
    return f"{one.path} is {kind}: {told}" + (f"; and {more} more keys" if more > 0 else "")


def _halves(
    granting: Mapping[Command, StoredRecord], needed: tuple[Command, ...], contract: str
) -> Iterator[str]:
    for command in needed:
        if command in granting:
            yield f"{granting[command].path} is the record of {command}, which is not all"
        elif len(needed) > 1:
            yield f"{contract} needs a record of {command}, and none grants it"
        else:
            yield f"no record of {command} grants it"
