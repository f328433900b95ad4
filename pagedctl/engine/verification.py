"""An engine's contract: what it runs, in the terms of records, and who vouches. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pagedctl import __version__
from pagedctl.config.engine_config import EngineConfig, engine_options
from pagedctl.config.groups import ContractOptions, ModelOptions
from pagedctl.config.home import home_folder
from pagedctl.config.kinds import Boolean
from pagedctl.config.loader import DEFAULT
from pagedctl.config.options import Option, options_of
from pagedctl.errors import NumericsRefused
from pagedctl.manifest import environment
from pagedctl.manifest.schema import FileEntry, ManifestWarning
from pagedctl.numerics.combination import Combination, Command, Device, Layout, Versions
from pagedctl.numerics.eligibility import (
    NOTHING_TO_VERIFY,
    Eligibility,
    judge,
    judge_by_profile,
)
from pagedctl.numerics.plugins import installed
from pagedctl.numerics.records import (
    DAMAGED_RECORD,
    ProvedManifest,
    VerificationRecord,
    default_name,
    read_records,
    records_folder,
    write_record_file,
)
from pagedctl_kernels.catalogue import house_registry
from pagedctl_kernels.machine import Machine

if TYPE_CHECKING:
    from pagedctl.engine.model_parts import BoundModel

UNVERIFIED = "unverified"
"""The code of the warning that no profile or record covers the contract here."""

NOT_IN_A_COMMAND = frozenset({"numerics", "model", "unverified", "explain_numerics"})
BESIDE_CONTRACT = ("kv_dtype", "enforce_eager", "tp", "tp_layout")
"""Options beside those of model and contract that a record is about."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Who vouches for an engine's contract, and what a run should know of it."""

    eligibility: Eligibility
    warnings: tuple[ManifestWarning, ...] = ()


def verified_contract(
    bound: BoundModel, config: EngineConfig, environ: Mapping[str, str], *, needs_record: bool
) -> Verification:
    """Judge the contract of *bound* by the shipped profiles and the records of PAGEDCTL_HOME.

    Raises NumericsRefused if a bitwise contract that was asked for has neither, unless *config*
    says ``unverified``. The default contract runs, with a warning. Without *needs_record*
    nothing is refused, and nothing is warned of.
    """
    eligibility = eligibility_of(bound, environ)
    if not needs_record:
        return Verification(eligibility=eligibility)
    if not eligibility.verified and not config.unverified:
        if config.origins["numerics"] != DEFAULT:
            raise _refusal(bound, config, eligibility)
        return Verification(eligibility=eligibility, warnings=(_unverified(bound, eligibility),))
    damaged = tuple(_damaged(text) for text in eligibility.damaged)
    return Verification(eligibility=eligibility, warnings=damaged)


def eligibility_of(bound: BoundModel, environ: Mapping[str, str]) -> Eligibility:
    """Who vouches for the contract of *bound*: a shipped profile, or records of PAGEDCTL_HOME."""
    if not bound.numerics.contract.bitwise:
        return NOTHING_TO_VERIFY
    found = combination_of(bound)
    by_profile = judge_by_profile(found)
    if by_profile.verified:
        return by_profile  # no folder is read
    return judge(found, read_records(records_folder(home_folder(environ))))


def combination_of(bound: BoundModel) -> Combination:
    """What *bound* runs, in the terms of a verification record."""
    numerics, config, spec = bound.numerics, bound.config, bound.spec
    house = set(house_registry().leaves())
    plans = tuple(bound.plans.all())
    outside = tuple(
        dict.fromkeys((one.site.op, one.leaf.name) for one in plans if one.leaf not in house)
    )
    return Combination(
        contract=numerics.contract.name,
        topology_invariant=bool(numerics["topology_invariant"]),
        spec_digest=spec.spec_digest,
        arithmetic_id=bound.plans.arithmetic_id,
        family=spec.family,
        dtype=spec.dtype,
        kv_dtype=config.kv_dtype,
        device=_device(bound.machine),
        versions=present_versions(),
        layout=Layout(tp=config.tp, tp_layout=config.tp_layout),
        graphs=False,  # this version captures none
        captured_sizes=(),
        switches={name: one.value for name, one in numerics.settings.items()},
        leaves=bound.plans.leaves(),
        packages=installed().versions_of(numerics.contract.name, {name for _, name in outside}),
        outside_leaves=outside,
        evidence=numerics.contract.evidence,
    )


def record_of(
    bound: BoundModel, *, command: Command, cases: Iterable[str], manifest: FileEntry
) -> VerificationRecord:
    """The record that *command* earned for *bound*, an engine's ``parts.model``.

    ``cases`` are those that passed, at least one; ``manifest`` is the run's, as it lies there.
    """
    return VerificationRecord(
        **combination_of(bound).values(),
        command=command,
        cases=tuple(cases),
        manifest=ProvedManifest(path=manifest.path, sha256=manifest.sha256),
        created_utc=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )


def write_record(record: VerificationRecord, path: Path | None, environ: Mapping[str, str]) -> Path:
    """Write *record* to *path*, or under a new name into the records of PAGEDCTL_HOME.

    Only the records of that folder are looked at when an engine is built. Returns the file's
    path; raises ConfigError if it exists or cannot be written.
    """
    target = path or records_folder(home_folder(environ)) / default_name(record)
    write_record_file(record, target, create_parents=path is None)
    return target


# -- what is said ----------------------------------------------------------------------------


def _refusal(bound: BoundModel, config: EngineConfig, eligibility: Eligibility) -> NumericsRefused:
    contract = bound.numerics.contract.name
    commands = " and of ".join(bound.numerics.contract.evidence)
    return NumericsRefused(
        "\n  ".join((f"{contract} is not verified for this run", *eligibility.reasons)),
        where=f"option numerics, set by {config.origins['numerics']}",
        rule="a bitwise contract that is asked for is covered by a shipped profile, or by a "
        f"record of {commands} for exactly this run",
        remedy=f"earn it: {how_to_earn(bound, eligibility)}; or run with --unverified",
    )


def _unverified(bound: BoundModel, eligibility: Eligibility) -> ManifestWarning:
    text = (
        f"{bound.numerics.contract.name} runs unverified: {eligibility.reasons[0]}; "
        f"to earn a record: {how_to_earn(bound, eligibility)}"
    )
    return ManifestWarning(code=UNVERIFIED, where="option numerics", text=text)


def _damaged(text: str) -> ManifestWarning:
    return ManifestWarning(
        code=DAMAGED_RECORD, where="PAGEDCTL_HOME", text=f"a record cannot be read: {text}"
    )


def how_to_earn(bound: BoundModel, eligibility: Eligibility) -> str:
    """The command lines that earn the records that *eligibility* misses, in their order."""
    return ", then ".join(_command(bound, one) for one in eligibility.missing)


def _command(bound: BoundModel, command: Command) -> str:
    """The command line that earns a record for *bound*."""
    config = bound.config
    words = ["pagedctl", command, "--numerics", config.numerics, "--model", config.model]
    if command == "align":
        words += ["--dump", "DUMP"]
    for one in _options_of_a_record():
        origin = config.origins[one.name]
        if origin != DEFAULT and not origin.startswith("derived: "):
            words += _as_flag(one, getattr(config, one.name))
    if bound.resolved.checkpoint is None and config.random_weights is None:
        words += ["--random-weights", "0"]  # a record is of the architecture
    return shlex.join([*words, "--record"])


def _options_of_a_record() -> Iterator[Option]:
    names = (*options_of(ModelOptions), *options_of(ContractOptions), *BESIDE_CONTRACT)
    known = engine_options()
    return (known[name] for name in names if name not in NOT_IN_A_COMMAND)


def _as_flag(one: Option, value: object) -> list[str]:
    if isinstance(one.kind, Boolean):
        return [one.flag if value else f"--no-{one.flag[2:]}"]
    values = value if isinstance(value, tuple) else (value,)
    return [word for each in values for word in (one.flag, str(each))]


# -- the machine -----------------------------------------------------------------------------


@cache
def present_versions() -> Versions:
    """What computes in this process; none of it changes while it lives."""
    found = environment.versions()
    return Versions(
        pagedctl=__version__,
        torch=found["torch"],
        triton=found["triton"],
        cuda=found["cuda"],
        driver=found["driver"],
    )


def _device(machine: Machine) -> Device:
    if machine.kind == "cpu":
        return Device(kind="cpu", name=_cpu_name(), capability=machine.isa, threads=machine.threads)
    import torch

    major, minor = machine.capability or (0, 0)
    return Device(
        kind=machine.kind,
        name=torch.cuda.get_device_name(),
        capability=f"{major}.{minor}",
        threads=None,
    )


@cache
def _cpu_name() -> str:
    return environment.cpu_info().name
